"""POST /v1/generate: tokens in, tokens out, each with its log-prob and the version that made it.

For programs that keep the tokens of a conversation themselves, an environment's rollout for instance.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from nextstate.serve.answer import Answer
from nextstate.serve.asking import CommonBody, ask_of, count_ignored, open_answers, refuse, sampling_of
from nextstate.serve.chat_completions import as_list
from nextstate.serve.completions import raw_prompt
from nextstate.serve.errors import server_error
from nextstate.serve.services import Services
from nextstate.serve.streaming import merged, respond, sse


class GenerateRequest(CommonBody):
    prompt_ids: Annotated[list[NonNegativeInt], Field(min_length=1)]
    max_tokens: PositiveInt | None = None
    n: int | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(as_list)] = None


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/generate", response_model=None)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """The reply's ids, log-probs (nats, under the sampling transform) and versions, one of each a token.

        Streaming, every event holds the tokens since the last one; the last event has a finish reason.
        """
        if body.n not in (None, 1):
            raise refuse("n")
        ids, read = raw_prompt(services, body.prompt_ids, "prompt_ids")
        count_ignored(services, body, read)
        sampling = sampling_of(services, body, max_tokens=body.max_tokens, stop=body.stop or ())
        ask = ask_of(
            services,
            request,
            body,
            read,
            dialect="generate",
            sampling=sampling,
            prompt_ids=ids,
            prompt_field="prompt_ids",
            report_logprobs=True,
        )
        [answer] = await open_answers(services, ask, 1)
        return await respond(request, [answer], _Reply(answer), stream=bool(body.stream))

    return routes


class _Reply:
    """The answer's tokens, whole or as events."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def whole(self) -> dict[str, Any]:
        return self._tokens(0) | {"text": self._answer.text}

    async def events(self) -> AsyncGenerator[str]:
        sent = 0
        async with aclosing(merged([self._answer])) as events:
            async for _ in events:
                body = self._tokens(sent)
                sent += len(body["ids"])
                yield sse(body)
        yield sse(self._tokens(sent))
        yield "data: [DONE]\n\n"

    def failed(self, message: str, code: str) -> str:
        return sse(server_error(message, code))

    def _tokens(self, start: int) -> dict[str, Any]:
        """The tokens from number `start` on."""
        answer, tokens = self._answer, self._answer.tokens[start:]
        return {
            "turn_id": answer.turn_id,
            "session_id": answer.session_key,
            "prompt_tokens": answer.prompt_tokens,
            "ids": [token.id for token in tokens],
            "logprobs": [token.logprob for token in tokens],
            "versions": [token.version for token in tokens],
            "finish_reason": answer.finish,
        }
