"""POST /v1/chat/completions, as OpenAI's clients speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError
from starlette.types import Receive, Scope, Send

from nextstate.errors import EngineFault
from nextstate.serve.answer import Answer, Ask, open_answer
from nextstate.serve.body import RequestBody
from nextstate.serve.errors import ApiError, own_type, server_error
from nextstate.serve.models import resolve_model
from nextstate.serve.services import Services
from nextstate.types import Message, Sampling

KEEP_ALIVE_S = 8.0
"""A stream that has nothing to say for this long gets an empty piece: clients give up on silence, and proxies on 10 s
of it. Comments do not count as life with all of them, chunks do."""

_MAX_KEY = 256
_TEXT_PART = '{"type": "text", "text": "..."}'


def _flat(content: Any) -> Any:
    """Content as one string; what is neither a string nor parts is left to the type check."""
    if not isinstance(content, list):
        return content
    texts = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind == "text" and isinstance(text, str):
            texts.append(text)
        elif kind in ("text", None):
            raise PydanticCustomError(
                "content_part", "part {n} is not of the form {form}", {"n": n, "form": _TEXT_PART}
            )
        else:
            raise PydanticCustomError(
                own_type("unsupported_content"),
                "part {n} is of type '{kind}'; this server takes parts of type 'text' only",
                {"n": n, "kind": str(kind)},
            )
    return "".join(texts)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_flat)] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def has_content(self) -> Self:
        if self.role != "assistant" and self.content is None:
            raise PydanticCustomError("missing", "Field required: content, a string or parts of text")
        return self

    def as_message(self) -> Message:
        """What is stored and rendered; keys that a client leaves empty are left out, so that copies compare equal."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        for key in ("name", "tool_calls", "tool_call_id"):
            if value := getattr(self, key):
                message[key] = value
        return message


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class ChatCompletionRequest(RequestBody, extra="allow"):
    """The fields that mean something here. Others that OpenAI has are refused where ignoring them would make the
    answer something else than asked for, and ignored where not."""

    model: str = "policy"
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    seed: int | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(_listed)] = None
    user: str | None = None
    """Whose conversations this may continue; those of different users never meet."""
    session_id: Annotated[str, Field(max_length=_MAX_KEY)] | None = None
    turn_type: Literal["main", "side"] | None = None
    session_done: bool | None = None

    tools: Any = None
    functions: Any = None
    n: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None

    def unsupported(self) -> str | None:
        """Name of the first field that asks for what this server cannot do yet."""
        asked = {
            "tools": bool(self.tools),
            "functions": bool(self.functions),
            "n": self.n not in (None, 1),
            "logprobs": bool(self.logprobs),
            "top_logprobs": bool(self.top_logprobs),
            "logit_bias": bool(self.logit_bias),
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
            "top_k": self.top_k not in (None, 0, -1),
            "min_p": bool(self.min_p),
            "repetition_penalty": self.repetition_penalty not in (None, 0, 1),
            "response_format": self.response_format not in (None, {"type": "text"}),
            "modalities": self.modalities not in (None, [], ["text"]),
            "audio": self.audio is not None,
        }
        return next((name for name, wanted in asked.items() if wanted), None)


_KNOWN_IGNORED = frozenset(
    {
        "chat_template_kwargs", "enable_thinking", "function_call", "metadata", "parallel_tool_calls",
        "prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning", "reasoning_effort",
        "safety_identifier", "service_tier", "store", "tool_choice", "verbosity",
        "web_search_options",
    }
)  # fmt: skip
"""Fields that get a metric under their own name; any other counts as 'other', so that the page cannot grow."""


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        for field in body.model_extra or ():
            services.metrics.ignored_fields.labels(field if field in _KNOWN_IGNORED else "other").inc()
        ask = read_request(services, body, request)
        answer = await open_answer(services, ask)
        headers = {
            "x-nextstate-turn-id": str(answer.turn_id),
            "x-nextstate-session-id": _for_header(answer.session_key),
            "x-nextstate-policy-version": str(answer.start_version),
        }
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return AnswerStream(answer, _events(answer, body.model, include_usage), headers)
        return await _whole(answer, body.model, request, headers)

    return routes


def read_request(services: Services, body: ChatCompletionRequest, request: Request) -> Ask:
    """Check a request and put it into our own words.

    Raises:
        ApiError: it asks for what this server does not have.
    """
    refused = body.unsupported()
    if refused is not None:
        raise ApiError(
            400,
            f"'{refused}' asks for something that this server cannot do yet; leave it out.",
            param=refused,
            code="unsupported_parameter",
        )
    serve = services.config.serve
    sampling = Sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens or serve.max_tokens,
        temperature=serve.temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=tuple(body.stop or ()),
    )
    headers = request.headers
    session_key = headers.get("x-session-id") or body.session_id or None
    if session_key is not None and len(session_key) > _MAX_KEY:
        raise ApiError(400, f"X-Session-Id has more than {_MAX_KEY} characters.", param="session_id")
    turn_type = (headers.get("x-turn-type") or body.turn_type or "main").lower()
    if turn_type not in ("main", "side"):
        raise ApiError(400, f"X-Turn-Type is '{turn_type}'; it must be 'main' or 'side'.", param="turn_type")
    done = headers.get("x-session-done")
    retries = headers.get("x-stainless-retry-count", "0")
    return Ask(
        user=body.user or "",
        messages=tuple(message.as_message() for message in body.messages),
        sampling=sampling,
        policy=resolve_model(services.engine, body.model),
        session_key=session_key,
        side=turn_type == "side",
        session_done=bool(body.session_done) if done is None else done.lower() in ("1", "true", "yes", "on"),
        retry_count=int(retries) if retries.isdecimal() else 0,
    )


def _for_header(text: str) -> str:
    """A session key as an HTTP header may carry it."""
    return text.encode("latin-1", "replace").decode("latin-1").replace("\r", "?").replace("\n", "?")


# -- not streaming -----------------------------------------------------------------------------------------------------


async def _whole(answer: Answer, model: str, request: Request, headers: dict[str, str]) -> Response:
    reading = asyncio.create_task(_read(answer))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return Response(status_code=499)  # nobody reads it; nginx's number for a client that left
        reading.result()
    except EngineFault as error:
        return JSONResponse(server_error(str(error), "engine_fault"), 500, headers)
    finally:
        answer.abandon()
        reading.cancel()
        leaving.cancel()
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    body = {
        "id": f"chatcmpl-{answer.turn_id}",
        "object": "chat.completion",
        "created": answer.created_at,
        "model": model,
        "system_fingerprint": _fingerprint(answer),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}],
        "usage": _usage(answer),
    }
    return JSONResponse(body, headers=headers)


async def _read(answer: Answer) -> None:
    async for _ in answer.pieces(KEEP_ALIVE_S):
        pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- streaming ---------------------------------------------------------------------------------------------------------


class AnswerStream(StreamingResponse):
    """A stream whose answer ends with it, however it ends."""

    def __init__(self, answer: Answer, events: AsyncIterator[str], headers: dict[str, str]) -> None:
        never_buffer = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers | never_buffer, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.abandon()


async def _events(answer: Answer, model: str, include_usage: bool) -> AsyncIterator[str]:
    """The server-sent events of one answer. The last chunk leaves after the turn is committed."""

    def chunk(choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        body = {
            "id": f"chatcmpl-{answer.turn_id}",
            "object": "chat.completion.chunk",
            "created": answer.created_at,
            "model": model,
            "system_fingerprint": _fingerprint(answer),
            "choices": choices,
        }
        if include_usage:
            body["usage"] = usage
        return _event(body)

    yield chunk([_choice({"role": "assistant", "content": ""})])
    try:
        async for piece in answer.pieces(KEEP_ALIVE_S):
            yield chunk([_choice({"content": piece} if piece else {})])
    except EngineFault as error:
        yield _event(server_error(str(error), "engine_fault"))
        return
    except Exception:
        # The headers are out, so an event is all that can say it; the answer's task has logged the traceback.
        yield _event(server_error("The server failed on this request; its log says more.", "internal_error"))
        return
    yield chunk([_choice({}, answer.finish)])
    if include_usage:
        yield chunk([], _usage(answer))
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def _fingerprint(answer: Answer) -> str:
    return f"nextstate-v{answer.version}"


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.reply_tokens,
        "total_tokens": answer.prompt_tokens + answer.reply_tokens,
    }
