"""POST /v1/completions: a plain prompt, as text or as token ids, and what the model makes of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from pydantic_core import PydanticCustomError

from nextstate.chat.events import TextDelta
from nextstate.dialects.reading import Read
from nextstate.serve.answer import Answer
from nextstate.serve.asking import CommonBody, ask_of, count_ignored, open_answers, refuse, sampling_of
from nextstate.serve.chat_completions import StreamOptions, as_list
from nextstate.serve.errors import ApiError, server_error
from nextstate.serve.logprobs import completion_logprobs
from nextstate.serve.services import Services
from nextstate.serve.streaming import merged, respond, sse
from nextstate.types import TokenIds


def _one_prompt(prompt: Any) -> Any:
    """Clients may send a list of prompts; a list of one is taken."""
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        if len(prompt) > 1:
            raise PydanticCustomError("prompts", "{n} prompts; this server takes one a request", {"n": len(prompt)})
        return prompt[0]
    return prompt


class CompletionRequest(CommonBody):
    prompt: Annotated[str | list[NonNegativeInt], BeforeValidator(_one_prompt), Field(min_length=1)]
    """One prompt: text, or token ids."""
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(as_list)] = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    echo: Any = None
    suffix: Any = None
    best_of: Any = None

    def unsupported(self) -> str | None:
        """Name of the first field that asks for what this server cannot do."""
        asked = {
            "echo": bool(self.echo),
            "suffix": bool(self.suffix),
            "best_of": self.best_of not in (None, self.n or 1),
        }
        return next((name for name, wanted in asked.items() if wanted), None)


def raw_prompt(services: Services, prompt: str | Sequence[int], field: str) -> tuple[TokenIds, Read]:
    """A prompt that no template has made, and the message that stands for it in the store.

    Raises:
        ApiError: a number that is no token, or no token at all.
    """
    tokenizer = services.engine.loaded.tokenizer
    if isinstance(prompt, str):
        ids, text = tuple(tokenizer.encode(prompt)), prompt
    else:
        vocabulary = len(tokenizer)
        strange = next((token for token in prompt if token >= vocabulary), None)
        if strange is not None:
            raise ApiError(400, f"The prompt holds {strange}; tokens are numbers below {vocabulary}.", param=field)
        ids, text = tuple(prompt), str(tokenizer.decode(prompt))
    if not ids:
        raise ApiError(400, "The prompt has no tokens; an answer needs at least one before it.", param=field)
    return ids, Read(messages=({"role": "user", "content": text},))


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        refused = body.unsupported()
        if refused is not None:
            raise refuse(refused)
        ids, read = raw_prompt(services, body.prompt, "prompt")
        count_ignored(services, body, read)
        sampling = sampling_of(
            services, body, max_tokens=body.max_tokens, stop=body.stop or (), top_logprobs=body.logprobs or 0
        )
        ask = ask_of(
            services,
            request,
            body,
            read,
            dialect="completions",
            sampling=sampling,
            prompt_ids=ids,
            prompt_field="prompt",
            report_logprobs=body.logprobs is not None,
        )
        answers = await open_answers(services, ask, body.n or 1)
        reply = _Reply(answers, body, services)
        return await respond(request, answers, reply, stream=bool(body.stream))

    return routes


class _Reply:
    """The answers to one prompt in OpenAI's words, whole or as events."""

    def __init__(self, answers: Sequence[Answer], body: CompletionRequest, services: Services) -> None:
        self._answers, self._body = answers, body
        self._tokenizer = services.engine.loaded.tokenizer
        self._reported = [0] * len(answers)
        self._offsets = [0] * len(answers)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(n, answer.text, answer.finish) for n, answer in enumerate(self._answers)]
        return self._body_of(choices) | {"usage": self._usage()}

    async def events(self) -> AsyncGenerator[str]:
        async with aclosing(merged(self._answers)) as events:
            async for n, event in events:
                yield self._chunk(n, event.text if isinstance(event, TextDelta) else "")
        for n, answer in enumerate(self._answers):
            yield self._chunk(n, "", answer.finish)
        if self._include_usage:
            yield sse(self._body_of([]) | {"usage": self._usage()})
        yield "data: [DONE]\n\n"

    def failed(self, message: str, code: str) -> str:
        return sse(server_error(message, code))

    def _chunk(self, n: int, text: str, finish: str | None = None) -> str:
        body = self._body_of([self._choice(n, text, finish)])
        return sse(body | {"usage": None} if self._include_usage else body)

    @property
    def _include_usage(self) -> bool:
        return self._body.stream_options is not None and self._body.stream_options.include_usage

    def _choice(self, n: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": n, "text": text, "logprobs": self._logprobs(n), "finish_reason": finish}

    def _logprobs(self, n: int) -> dict[str, Any] | None:
        """Of the tokens that have come since the last time."""
        new = self._answers[n].tokens[self._reported[n] :]
        if not new:
            return None
        self._reported[n] += len(new)
        found = completion_logprobs(self._tokenizer, new, self._offsets[n])
        self._offsets[n] += sum(map(len, found["tokens"]))
        return found

    def _body_of(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        first = self._answers[0]
        return {
            "id": f"cmpl-{first.turn_id}",
            "object": "text_completion",
            "created": first.created_at,
            "model": self._body.model,
            "system_fingerprint": f"nextstate-v{first.version}",
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt = self._answers[0].prompt_tokens
        reply = sum(answer.reply_tokens for answer in self._answers)
        return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
