"""POST /v1/chat/completions, as OpenAI's clients speak it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from nextstate.chat.events import AnswerEvent, ReasoningDelta, TextDelta, ToolCall
from nextstate.dialects.chat import read_messages
from nextstate.serve.answer import Answer, Ask
from nextstate.serve.asking import (
    Choice,
    CommonBody,
    ask_of,
    count_ignored,
    grammar_of,
    only_tools,
    open_answers,
    refuse,
    sampling_of,
)
from nextstate.serve.errors import own_type, server_error
from nextstate.serve.logprobs import chat_logprobs
from nextstate.serve.services import Services
from nextstate.serve.streaming import merged, respond, sse
from nextstate.types import FinishReason, Sampling

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
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
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


def as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class FunctionCall(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, BeforeValidator(_flat)] = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def has_content(self) -> Self:
        if self.role != "assistant" and self.content is None:
            raise PydanticCustomError("missing", "Field required: content, a string or parts of text")
        return self


def check_tool(tool: Any) -> Any:
    """A function has a name and an object of parameters; tools of other types are passed over."""
    if not isinstance(tool, dict):
        raise PydanticCustomError("tool", "a tool is an object")
    if tool.get("type", "function") == "function":
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise PydanticCustomError("tool", "a tool of type 'function' has a 'function' with a 'name'")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise PydanticCustomError("tool", "the 'parameters' of a function are a JSON schema, an object")
    return tool


Tool = Annotated[dict[str, Any], BeforeValidator(check_tool)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True)

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "Field required: json_schema, with a 'schema'")
        return self


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: NamedFunction


class AllowedList(BaseModel):
    model_config = ConfigDict(strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


class ChatCompletionRequest(CommonBody):
    """The fields that mean something here. Others that OpenAI has are refused where ignoring them would make the
    answer something else than asked for, and ignored where not."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(as_list)] = None
    tools: list[Tool] | None = None
    tool_choice: Choice | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None

    def unsupported(self) -> str | None:
        """Name of the first field that asks for what this server cannot do."""
        asked = {
            "functions": bool(self.functions),
            "function_call": self.function_call not in (None, "none", "auto"),
            "modalities": self.modalities not in (None, [], ["text"]),
            "audio": self.audio is not None,
            "web_search_options": self.web_search_options is not None,
        }
        return next((name for name, wanted in asked.items() if wanted), None)

    @model_validator(mode="after")
    def top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("logprobs", "top_logprobs needs logprobs to be true")
        return self


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        ask = read_request(services, body, request)
        answers = await open_answers(services, ask, body.n or 1)
        reply = _Reply(answers, body, services)
        return await respond(request, answers, reply, stream=bool(body.stream))

    return routes


def read_request(services: Services, body: ChatCompletionRequest, request: Request) -> Ask:
    """Check a request and put it into our own words.

    Raises:
        ApiError: it asks for what this server does not have.
    """
    refused = body.unsupported()
    if refused is not None:
        raise refuse(refused)
    read = read_messages(body.model_dump(include={"messages", "tools"}, exclude_none=True))
    count_ignored(services, body, read)
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    choice: Choice = body.tool_choice if isinstance(body.tool_choice, str) else "auto"
    if isinstance(body.tool_choice, AllowedTools):
        choice = body.tool_choice.allowed_tools.mode
        read = only_tools(read, [tool.function.name for tool in body.tool_choice.allowed_tools.tools])
    form = body.response_format
    grammar = grammar_of(
        services,
        read.tools,
        choice=choice,
        named=named,
        parallel=body.parallel_tool_calls is not False,
        json_schema=form.json_schema.schema_ if form is not None and form.json_schema is not None else None,
        json_object=form is not None and form.type == "json_object",
    )
    sampling: Sampling = sampling_of(
        services,
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=body.stop or (),
        grammar=grammar,
        top_logprobs=body.top_logprobs or 0,
    )
    return ask_of(
        services,
        request,
        body,
        read,
        dialect="chat",
        sampling=sampling,
        callable_tools=choice != "none",
        parallel_calls=body.parallel_tool_calls is not False,
        report_logprobs=bool(body.logprobs),
    )


class _Reply:
    """The answers to one request in OpenAI's words, whole or as events."""

    def __init__(self, answers: Sequence[Answer], body: ChatCompletionRequest, services: Services) -> None:
        self._answers, self._body = answers, body
        self._tokenizer = services.engine.loaded.tokenizer
        self._reported = [0] * len(answers)

    def whole(self) -> dict[str, Any]:
        return self._body_of("chat.completion") | {
            "choices": [self._choice(n, answer) for n, answer in enumerate(self._answers)],
            "usage": self._usage(),
        }

    def _choice(self, n: int, answer: Answer) -> dict[str, Any]:
        message = {"refusal": None, **answer.message}
        if answer.tool_calls and not answer.text:
            message["content"] = None
        return {
            "index": n,
            "message": message,
            "logprobs": self._logprobs(n),
            "finish_reason": finish_reason(answer),
        }

    async def events(self) -> AsyncGenerator[str]:
        """The server-sent events. The last chunk of an answer leaves after its turn is committed."""
        for n in range(len(self._answers)):
            yield self._chunk(n, {"role": "assistant", "content": ""})
        async with aclosing(merged(self._answers)) as events:
            async for n, event in events:
                for delta in _deltas(event):
                    yield self._chunk(n, delta)
        for n, answer in enumerate(self._answers):
            yield self._chunk(n, {}, finish_reason(answer))
        if self._include_usage:
            yield sse(self._body_of("chat.completion.chunk") | {"choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def failed(self, message: str, code: str) -> str:
        return sse(server_error(message, code))

    def _chunk(self, n: int, delta: Mapping[str, Any], finish: str | None = None) -> str:
        choice = {"index": n, "delta": delta, "logprobs": self._logprobs(n), "finish_reason": finish}
        body = self._body_of("chat.completion.chunk") | {"choices": [choice]}
        return sse(body | {"usage": None} if self._include_usage else body)

    @property
    def _include_usage(self) -> bool:
        return self._body.stream_options is not None and self._body.stream_options.include_usage

    def _body_of(self, kind: str) -> dict[str, Any]:
        first = self._answers[0]
        return {
            "id": f"chatcmpl-{first.turn_id}",
            "object": kind,
            "created": first.created_at,
            "model": self._body.model,
            "system_fingerprint": f"nextstate-v{first.version}",
        }

    def _logprobs(self, n: int) -> dict[str, Any] | None:
        """Of the tokens that have come since the last time."""
        if not self._body.logprobs:
            return None
        new = self._answers[n].tokens[self._reported[n] :]
        self._reported[n] += len(new)
        return chat_logprobs(self._tokenizer, new) if new else None

    def _usage(self) -> dict[str, Any]:
        prompt = self._answers[0].prompt_tokens
        reply = sum(answer.reply_tokens for answer in self._answers)
        return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def finish_reason(answer: Answer) -> str | None:
    """Why it ended, in OpenAI's words."""
    if answer.tool_calls and answer.finish is FinishReason.STOP:
        return "tool_calls"
    return answer.finish


def _deltas(event: AnswerEvent | None) -> list[dict[str, Any]]:
    """None, a sign of life, is an empty delta."""
    match event:
        case None:
            return [{}]
        case TextDelta(text=text):
            return [{"content": text}]
        case ReasoningDelta(text=text):
            return [{"reasoning_content": text}]
        case ToolCall():
            head = {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
            rest = {"function": {"arguments": event.arguments}}
            return [{"tool_calls": [{"index": event.index, **part}]} for part in (head, rest)]
