"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from nextstate.chat.events import AnswerEvent, ReasoningDelta, TextDelta, ToolCall
from nextstate.chat.template import MessagesRefused, render
from nextstate.dialects.messages import read_messages
from nextstate.dialects.reading import Read
from nextstate.errors import ContextLengthExceeded
from nextstate.serve.answer import Answer, Ask
from nextstate.serve.asking import (
    Choice,
    CommonBody,
    ask_of,
    count_ignored,
    grammar_of,
    open_answers,
    refuse,
    refuse_unreadable,
    sampling_of,
)
from nextstate.serve.errors import ApiError, anthropic_error
from nextstate.serve.models import resolve_model
from nextstate.serve.services import Services
from nextstate.serve.streaming import merged, respond, sse
from nextstate.types import FinishReason

SIGNATURE = "bmV4dHN0YXRl"
"""Anthropic signs thoughts, and clients keep only signed ones. Ours are text, which nobody needs to unseal."""

_CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "tool": "auto", "none": "none"}

_NEEDED: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}
"""What blocks must have, by their type; of blocks of other types the reader says what it cannot take."""


def check_blocks(content: Any) -> Any:
    """A message's content: a string, or blocks that have what their type needs."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "Input should be a string or a list of content blocks")
    for n, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content", "block {n} is not an object with a 'type'", {"n": n})
        for key, needed in _NEEDED.get(kind, {}).items():
            if not isinstance(block.get(key), needed):
                what = "an object" if needed is dict else "a string"
                raise PydanticCustomError(
                    "content",
                    "block {n} is of type '{kind}' and needs '{key}', {what}",
                    {"n": n, "kind": kind, "key": key, "what": what},
                )
        if kind == "tool_result":
            check_blocks(block.get("content") or "")
    return content


def check_tool(tool: Any) -> Any:
    """A tool of the client's own has a name and an object for its input; those of other types are passed over."""
    if not isinstance(tool, dict):
        raise PydanticCustomError("tool", "a tool is an object")
    if tool.get("type") in (None, "custom"):
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise PydanticCustomError("tool", "a tool has a 'name'")
        if not isinstance(tool.get("input_schema", {}), dict | None):
            raise PydanticCustomError("tool", "the 'input_schema' of a tool is a JSON schema, an object")
    return tool


Content = Annotated[str | list[dict[str, Any]], BeforeValidator(check_blocks)]


class InputMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolChoice(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def has_name(self) -> Self:
        if self.type == "tool" and not self.name:
            raise PydanticCustomError("missing", "Field required: name, for a choice of type 'tool'")
        return self


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    format: OutputFormat | None = None


class Conversation(CommonBody):
    """What /v1/messages and /v1/messages/count_tokens have in common."""

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Content | None = None
    tools: list[Annotated[dict[str, Any], BeforeValidator(check_tool)]] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of output_config.format."""

    @property
    def callable_tools(self) -> bool:
        return self.tool_choice is None or self.tool_choice.type != "none"


class MessagesRequest(Conversation):
    """The fields that mean something here. Others are refused where ignoring them would make the answer something else
    than asked for, and ignored and counted where not."""

    mcp_servers: Any = None
    container: Any = None

    @model_validator(mode="after")
    def says_something_to_answer(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise PydanticCustomError(
                "prefill", "messages ends with one of the assistant; this server cannot go on with an answer"
            )
        return self

    max_tokens: PositiveInt
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        for field in ("mcp_servers", "container"):
            if getattr(body, field):
                raise refuse(field)
        ask = read_request(services, body, request)
        try:
            [answer] = await open_answers(services, ask, 1)
        except ApiError as error:
            if isinstance(too_long := error.__cause__, ContextLengthExceeded):
                # In the words by which Anthropic's clients know that they have to shorten the conversation.
                numbers = f"{too_long.prompt_tokens} tokens > {too_long.context_tokens} maximum"
                raise ApiError(400, f"prompt is too long: {numbers}") from too_long
            raise
        reply = _Reply(answer, body.model)
        return await respond(request, [answer], reply, stream=bool(body.stream))

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: Conversation) -> dict[str, int]:
        """The exact length of the prompt that the same request to /v1/messages would have."""
        resolve_model(services.engine, body.model)
        read = _read(services, body)
        tools = read.tools if body.callable_tools else ()
        try:
            prompt = await asyncio.to_thread(render, services.engine.loaded.tokenizer, read.messages, tools)
        except MessagesRefused as error:
            raise ApiError(400, str(error), param="messages") from error
        return {"input_tokens": len(prompt)}

    return routes


def _read(services: Services, body: Conversation) -> Read:
    read = read_messages(body.model_dump(include={"messages", "system", "tools"}, exclude_none=True))
    refuse_unreadable(read)
    count_ignored(services, body, read)
    if body.output_config is not None and body.output_config.model_extra:
        services.metrics.ignored_fields.labels("output_config").inc()
    return read


def read_request(services: Services, body: MessagesRequest, request: Request) -> Ask:
    """Check a request and put it into our own words.

    Raises:
        ApiError: it asks for what this server does not have.
    """
    read = _read(services, body)
    choice = body.tool_choice or ToolChoice(type="auto")
    form = body.output_format or (body.output_config.format if body.output_config is not None else None)
    parallel = not choice.disable_parallel_tool_use
    grammar = grammar_of(
        services,
        read.tools,
        choice=_CHOICES[choice.type],
        named=choice.name if choice.type == "tool" else None,
        parallel=parallel,
        json_schema=form.schema_ if form is not None else None,
        param="output_config.format" if body.output_format is None else "output_format",
    )
    sampling = sampling_of(services, body, max_tokens=body.max_tokens, stop=body.stop_sequences or (), grammar=grammar)
    return ask_of(
        services,
        request,
        body,
        read,
        dialect="messages",
        sampling=sampling,
        callable_tools=body.callable_tools,
        parallel_calls=parallel,
    )


class _Reply:
    """The answer to a request in Anthropic's words, whole or as events."""

    def __init__(self, answer: Answer, model: str) -> None:
        self._answer, self._model = answer, model
        self._index = 0
        self._open: type[TextDelta] | type[ReasoningDelta] | None = None
        """What the block that is being streamed is made of."""

    def whole(self) -> dict[str, Any]:
        return self._message([_block(part) for part in self._answer.parts], self._answer.reply_tokens) | self._ending()

    async def events(self) -> AsyncGenerator[str]:
        """The server-sent events. The last ones leave after the turn is committed."""
        yield _event("message_start", message=self._message([], 0))
        async with aclosing(merged([self._answer])) as events:
            async for _, event in events:
                for piece in self._pieces(event):
                    yield piece
        for piece in self._close():
            yield piece
        yield _event("message_delta", delta=self._ending(), usage=self._usage(self._answer.reply_tokens))
        yield _event("message_stop")

    def failed(self, message: str, code: str) -> str:  # Anthropic's errors have a type and no code
        return sse(anthropic_error(500, message), "error")

    def _message(self, content: list[dict[str, Any]], output_tokens: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self._answer.turn_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output_tokens),
        }

    def _usage(self, output_tokens: int) -> dict[str, int]:
        return {"input_tokens": self._answer.prompt_tokens, "output_tokens": output_tokens}

    def _ending(self) -> dict[str, str | None]:
        """Why it ended, in Anthropic's words."""
        answer = self._answer
        if answer.finish is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if answer.tool_calls:
            # Also where a stop string came behind the calls: a client that does not read 'tool_use' makes none of them.
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if answer.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _pieces(self, event: AnswerEvent | None) -> Iterator[str]:
        match event:
            case None:
                # The official clients hide pings from those who watch for silence. An empty delta they pass on, but it
                # needs an open block; nothing else of this dialect may come twice with every client.
                empty = None if self._open is None else _delta(self._open(""))
                yield _event("ping") if empty is None else self._block_event("delta", delta=empty)
            case ToolCall():
                yield from self._close()
                yield self._block_event("start", content_block=_block(event) | {"input": {}})
                yield self._block_event("delta", delta=_delta(event))
                yield from self._end_block()
            case _:
                if self._open is not type(event):
                    yield from self._close()
                    self._open = type(event)
                    yield self._block_event("start", content_block=_block(type(event)(""), signature=""))
                yield self._block_event("delta", delta=_delta(event))

    def _close(self) -> Iterator[str]:
        """End the block that is being streamed, if there is one."""
        if self._open is ReasoningDelta:
            yield self._block_event("delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            yield from self._end_block()

    def _end_block(self) -> Iterator[str]:
        yield self._block_event("stop")
        self._open = None
        self._index += 1

    def _block_event(self, kind: str, **fields: Any) -> str:
        return _event(f"content_block_{kind}", index=self._index, **fields)


def _event(kind: str, **fields: Any) -> str:
    return sse({"type": kind, **fields}, kind)


def _block(part: AnswerEvent, signature: str = SIGNATURE) -> dict[str, Any]:
    match part:
        case TextDelta(text=text):
            return {"type": "text", "text": text}
        case ReasoningDelta(text=text):
            return {"type": "thinking", "thinking": text, "signature": signature}
        case ToolCall():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(part.arguments)}


def _delta(part: AnswerEvent) -> dict[str, Any]:
    match part:
        case TextDelta(text=text):
            return {"type": "text_delta", "text": text}
        case ReasoningDelta(text=text):
            return {"type": "thinking_delta", "thinking": text}
        case ToolCall():
            return {"type": "input_json_delta", "partial_json": part.arguments}
