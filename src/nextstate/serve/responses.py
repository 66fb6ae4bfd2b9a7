"""POST /v1/responses, as OpenAI's newer clients and codex speak it, and GET /v1/responses/{id}."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from nextstate.chat.events import AnswerEvent, ReasoningDelta, TextDelta, ToolCall
from nextstate.dialects.reading import Read, listed
from nextstate.dialects.responses import read_messages
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
    refuse_unreadable,
    sampling_of,
)
from nextstate.serve.auth import caller, owner, owns
from nextstate.serve.errors import ApiError, own_type
from nextstate.serve.services import Services
from nextstate.serve.streaming import merged, respond, sse
from nextstate.store.status import show_turn
from nextstate.store.store import AnyRow
from nextstate.store.turns import load_messages, load_tools
from nextstate.types import FinishReason, Message, Sampling, TurnState

_ID = "resp_"
_MARK = "instructions"
"""On a stored system message that came as `instructions`: a response that continues this one has its own."""

_NEEDED = {
    "message": ("role",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
}
"""The strings that items must have, by their type; items of other types are read as far as they can be."""


def check_items(given: Any) -> Any:
    """An input: a string, or items that have what their type needs."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise PydanticCustomError("input", "Input should be a string or a list of items")
    for n, item in enumerate(given):
        if not isinstance(item, dict):
            raise PydanticCustomError("input", "item {n} is not an object", {"n": n})
        kind = item.get("type") or "message"
        if kind == "item_reference":
            raise PydanticCustomError(
                own_type("unsupported_content"),
                "item {n} is a reference to another item; send the item itself, or previous_response_id",
                {"n": n},
            )
        for key in _NEEDED.get(kind, ()) if isinstance(kind, str) else ():
            if not isinstance(item.get(key), str):
                raise PydanticCustomError(
                    "input",
                    "item {n} is of type '{kind}' and needs '{key}', a string",
                    {"n": n, "kind": kind, "key": key},
                )
        if kind == "message" and not isinstance(item.get("content"), str | list):
            raise PydanticCustomError("input", "item {n} is a message and needs 'content', a string or parts", {"n": n})
    return given


def check_tool(tool: Any) -> Any:
    """A function has a name and an object of parameters; tools of other types are passed over."""
    if not isinstance(tool, dict):
        raise PydanticCustomError("tool", "a tool is an object")
    if tool.get("type") == "function":
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise PydanticCustomError("tool", "a tool of type 'function' has a 'name'")
        if not isinstance(tool.get("parameters", {}), dict | None):
            raise PydanticCustomError("tool", "the 'parameters' of a function are a JSON schema, an object")
    return tool


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: str


class AllowedTools(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def has_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise PydanticCustomError("missing", "Field required: schema")
        return self


class TextConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    format: TextFormat | None = None


class ResponsesRequest(CommonBody):
    """The fields that mean something here. Others that OpenAI has are refused where ignoring them would make the
    answer something else than asked for, and ignored where not."""

    input: Annotated[str | list[dict[str, Any]], BeforeValidator(check_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Annotated[dict[str, Any], BeforeValidator(check_tool)]] | None = None
    tool_choice: Choice | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: PositiveInt | None = None
    text: TextConfig | None = None

    background: Any = None
    conversation: Any = None
    prompt: Any = None

    def unsupported(self) -> str | None:
        """Name of the first field that asks for what this server cannot do."""
        extra = self.model_extra or {}
        included = extra.get("include")
        asked = {
            "background": bool(self.background),
            "conversation": self.conversation is not None,
            "prompt": self.prompt is not None,
            "top_logprobs": bool(extra.get("top_logprobs")),
            "include": isinstance(included, list) and "message.output_text.logprobs" in included,
        }
        return next((name for name, wanted in asked.items() if wanted), None)


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        ask = await read_request(services, body, request)
        [answer] = await open_answers(services, ask, 1)
        reply = _Reply(answer, body, ask.sampling, services)
        return await respond(request, [answer], reply, stream=bool(body.stream))

    @routes.get("/v1/responses/{response_id}", response_model=None)
    async def show_response(response_id: str, request: Request) -> dict[str, Any]:
        row = await _find(services, response_id)
        if row is None or not owns(caller(request), row.user):
            raise ApiError(404, f"There is no response '{response_id}'.", param="response_id", code="not_found")
        tools = await services.store.read(load_tools, row.tool_set)
        return _stored(services, row, tools)

    return routes


async def _find(services: Services, response_id: str) -> AnyRow | None:
    """The turn behind a response's id, whoever it belongs to; None where there is no such response."""
    number = response_id.removeprefix(_ID)
    # A number beyond 64 bits is one that the database does not take.
    if number == response_id or not (number.isascii() and number.isdecimal() and len(number) <= 18):
        return None
    row = await services.store.read(show_turn, int(number))
    return row if row is not None and row.dialect == "responses" else None


async def read_request(services: Services, body: ResponsesRequest, request: Request) -> Ask:
    """Check a request and put it into our own words.

    Raises:
        ApiError: it asks for what this server does not have.
    """
    refused = body.unsupported()
    if refused is not None:
        raise refuse(refused)
    read = read_messages({"instructions": body.instructions, "input": body.input, "tools": body.tools})
    refuse_unreadable(read, "input")
    count_ignored(services, body, read)
    continues, read = await _behind_previous(services, body, request, read)
    named = body.tool_choice.name if isinstance(body.tool_choice, NamedTool) else None
    choice: Choice = body.tool_choice if isinstance(body.tool_choice, str) else "auto"
    if isinstance(body.tool_choice, AllowedTools):
        choice, read = body.tool_choice.mode, only_tools(read, [tool.name for tool in body.tool_choice.tools])
    form = body.text.format if body.text is not None else None
    grammar = grammar_of(
        services,
        read.tools,
        choice=choice,
        named=named,
        parallel=body.parallel_tool_calls is not False,
        json_schema=form.schema_ if form is not None and form.type == "json_schema" else None,
        json_object=form is not None and form.type == "json_object",
        param="text.format",
    )
    return ask_of(
        services,
        request,
        body,
        read,
        dialect="responses",
        sampling=sampling_of(services, body, max_tokens=body.max_output_tokens, grammar=grammar),
        callable_tools=choice != "none",
        parallel_calls=body.parallel_tool_calls is not False,
        continues=continues,
    )


async def _behind_previous(
    services: Services, body: ResponsesRequest, request: Request, read: Read
) -> tuple[int | None, Read]:
    """The turn that a request continues, and its messages behind those of that turn, which had instructions of its own.

    Raises:
        ApiError: there is no such turn with an answer, or nothing is said at all.
    """
    own: list[Message] = list(read.messages)
    instructions: list[Message] = [{**own.pop(0), _MARK: True}] if body.instructions else []
    if body.previous_response_id is None:
        if not own:
            raise ApiError(400, "'input' says nothing. Send a text, or at least one message.", param="input")
        return None, replace(read, messages=(*instructions, *own))
    row = await _find(services, body.previous_response_id)
    if row is None or row.user != owner(caller(request), body.user) or row.answer is None:
        raise ApiError(
            404,
            f"There is no finished response '{body.previous_response_id}' to continue. Send the conversation itself.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    earlier = [m for m in await services.store.read(load_messages, row.turn_id) if _MARK not in m]
    return row.turn_id, replace(read, messages=(*instructions, *earlier, *own))


class _Reply:
    """The answer to a request in OpenAI's words, whole or as events."""

    def __init__(self, answer: Answer, body: ResponsesRequest, sampling: Sampling, services: Services) -> None:
        self._answer, self._services = answer, services
        self._namespaces = _namespaces(body.tools or ())
        self._head = _head(
            answer.turn_id,
            created_at=answer.created_at,
            model=body.model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=(body.model_extra or {}).get("metadata") or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            temperature=sampling.temperature,
            text=body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else _PLAIN,
            tool_choice=body.tool_choice.model_dump() if isinstance(body.tool_choice, BaseModel) else body.tool_choice,
            tools=body.tools or [],
            top_p=sampling.top_p,
        )
        self._sent = 0
        self._items: list[dict[str, Any]] = []
        """Those that are complete."""
        self._open: TextDelta | ReasoningDelta | None = None
        """What the item that is being streamed says so far."""

    def whole(self) -> dict[str, Any]:
        statuses = _statuses(self._answer.parts, self._answer.finish)
        items = [self._item(n, *said) for n, said in enumerate(zip(self._answer.parts, statuses, strict=True))]
        return self._head | self._ending(items)

    async def events(self) -> AsyncGenerator[str]:
        """The server-sent events. The last ones leave after the turn is committed."""
        yield self._event("created", response=self._head)
        yield self._event("in_progress", response=self._head)
        async with aclosing(merged([self._answer])) as events:
            async for _, event in events:
                for piece in self._pieces(event):
                    yield piece
        for piece in self._close("incomplete" if self._answer.finish is FinishReason.LENGTH else "completed"):
            yield piece
        ending = self._ending(self._items)
        yield self._event(ending["status"], response=self._head | ending)

    def _ending(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        answer = self._answer
        usage = _usage(self._services, answer.prompt_tokens, answer.reply_tokens, answer.reasoning)
        return _ended(answer.finish, time.time()) | {"output": items, "usage": usage}

    def failed(self, message: str, code: str) -> str:  # of the codes that its clients know, one is ours
        failure = {"status": "failed", "error": {"code": "server_error", "message": message}, "output": self._items}
        return self._event("failed", response=self._head | failure)

    def _pieces(self, event: AnswerEvent | None) -> Iterator[str]:
        match event:
            case None:
                # Comments are no sign of life to all clients; this event is, and says nothing new to any.
                yield self._event("in_progress", response=self._head)
            case ToolCall():
                yield from self._close("completed")
                yield from self._begin_item(event)
                where = {"item_id": self._item_id(event), "output_index": len(self._items)}
                yield self._event("function_call_arguments.delta", **where, delta=event.arguments)
                yield self._event("function_call_arguments.done", **where, name=event.name, arguments=event.arguments)
                yield self._end_item(event, "completed")
            case _:
                kind = type(event)
                if not isinstance(self._open, kind):
                    yield from self._close("completed")
                    self._open = kind("")
                    yield from self._begin_item(self._open)
                yield self._part_event(self._open, f"{_TEXTS[kind]}.delta", delta=event.text)
                self._open = kind(self._open.text + event.text)

    def _begin_item(self, part: AnswerEvent) -> Iterator[str]:
        item = self._item(len(self._items), part, "in_progress")
        match part:
            case TextDelta():
                yield self._event("output_item.added", output_index=len(self._items), item=item | {"content": []})
                yield self._part_event(part, "content_part.added", part=item["content"][0])
            case ReasoningDelta():
                empty: dict[str, Any] = {"summary": [], "content": []}
                yield self._event("output_item.added", output_index=len(self._items), item=item | empty)
                yield self._part_event(part, "reasoning_summary_part.added", part=item["summary"][0])
            case ToolCall():
                yield self._event("output_item.added", output_index=len(self._items), item=item | {"arguments": ""})

    def _close(self, status: str) -> Iterator[str]:
        """End the text that is being streamed, if there is one."""
        said = self._open
        if said is None:
            return
        item = self._item(len(self._items), said, status)
        if isinstance(said, TextDelta):
            yield self._part_event(said, "output_text.done", text=said.text)
            yield self._part_event(said, "content_part.done", part=item["content"][0])
        else:
            yield self._part_event(said, "reasoning_summary_text.done", text=said.text)
            yield self._part_event(said, "reasoning_summary_part.done", part=item["summary"][0])
        self._open = None
        yield self._end_item(said, status)

    def _end_item(self, part: AnswerEvent, status: str) -> str:
        item = self._item(len(self._items), part, status)
        self._items.append(item)
        return self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, item: AnswerEvent, kind: str, **fields: Any) -> str:
        """An event about the one part that an open item of text has."""
        where: dict[str, Any] = {"item_id": self._item_id(item), "output_index": len(self._items)}
        where["content_index" if isinstance(item, TextDelta) else "summary_index"] = 0
        if kind.startswith("output_text"):
            where["logprobs"] = []
        return self._event(kind, **where, **fields)

    def _item_id(self, part: AnswerEvent) -> str:
        return _item_id(self._answer.turn_id, len(self._items), part)

    def _item(self, n: int, part: AnswerEvent, status: str) -> dict[str, Any]:
        item = _item(self._answer.turn_id, n, part, status)
        if isinstance(part, ToolCall) and part.name in self._namespaces:
            item["namespace"] = self._namespaces[part.name]
        return item

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": f"response.{kind}", "sequence_number": self._sent, **fields}
        self._sent += 1
        return sse(event, event["type"])


_TEXTS = {TextDelta: "output_text", ReasoningDelta: "reasoning_summary_text"}
_PREFIXES = {TextDelta: "msg", ReasoningDelta: "rs", ToolCall: "fc"}
_PLAIN = {"format": {"type": "text"}}


def _item_id(turn_id: int, n: int, part: AnswerEvent) -> str:
    return f"{_PREFIXES[type(part)]}_{turn_id}_{n}"


def _item(turn_id: int, n: int, part: AnswerEvent, status: str) -> dict[str, Any]:
    """Item number `n` of a response's output."""
    head = {"id": _item_id(turn_id, n, part), "status": status}
    match part:
        case TextDelta(text=text):
            content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
            return {"type": "message", **head, "role": "assistant", "content": content}
        case ReasoningDelta(text=text):
            # The whole of it as its own summary, too: codex sends back nothing else, and many show nothing else.
            return {
                "type": "reasoning",
                **head,
                "summary": [{"type": "summary_text", "text": text}],
                "content": [{"type": "reasoning_text", "text": text}],
                "encrypted_content": None,
            }
        case ToolCall():
            call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
            return {"type": "function_call", **head, **call}


def _statuses(parts: Sequence[AnswerEvent], finish: str | None) -> list[str]:
    """Of the items: the text at the end of an answer that was cut off is incomplete; calls are whole or none."""
    statuses = ["completed" for _ in parts]
    if parts and finish == FinishReason.LENGTH and not isinstance(parts[-1], ToolCall):
        statuses[-1] = "incomplete"
    return statuses


def _namespaces(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The namespace of each function that came in one; codex finds such a function by both names."""
    found: dict[str, str] = {}
    for tool in tools:
        if tool.get("type") == "namespace" and isinstance(tool.get("name"), str):
            names = (inner.get("name") for inner in listed(tool.get("tools")) if isinstance(inner, Mapping))
            found |= {name: tool["name"] for name in names if isinstance(name, str)}
    outside = {tool.get("name") for tool in tools if tool.get("type") == "function"}
    return {name: namespace for name, namespace in found.items() if name not in outside}


def _head(turn_id: int, *, tool_choice: Any, **fields: Any) -> dict[str, Any]:
    """A response that has just begun."""
    return {
        "id": f"{_ID}{turn_id}",
        "object": "response",
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "tool_choice": tool_choice or "auto",
        "truncation": "disabled",
        "usage": None,
        **fields,
    }


def _ended(finish: FinishReason | None, at: float) -> dict[str, Any]:
    """How a response ended."""
    if finish is FinishReason.LENGTH:
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed", "completed_at": int(at)}


def _usage(services: Services, prompt_tokens: int, reply_tokens: int, reasoning: str) -> dict[str, Any]:
    # The end of the reasoning is in no token of its own; its text, tokenised again, is as near as it gets.
    thought = len(services.engine.loaded.tokenizer.encode(reasoning, add_special_tokens=False))
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply_tokens,
        "output_tokens_details": {"reasoning_tokens": min(thought, reply_tokens)},
        "total_tokens": prompt_tokens + reply_tokens,
    }


def _stored(services: Services, row: AnyRow, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A response as it can be told from its turn: text is in one piece, and before the calls."""
    parts: list[AnswerEvent] = [ReasoningDelta(row.reasoning)] if row.reasoning else []
    parts += [TextDelta(row.answer)] if row.answer else []
    for n, call in enumerate(row.tool_calls or ()):
        parts.append(ToolCall(n, call["id"], call["function"]["name"], call["function"]["arguments"]))
    sampling = Sampling.from_json(row.sampling)
    head = _head(
        row.turn_id,
        created_at=int(row.created_at),
        model="policy",
        instructions=None,
        max_output_tokens=sampling.max_tokens,
        metadata={},
        parallel_tool_calls=True,
        previous_response_id=None,
        temperature=sampling.temperature,
        text=_PLAIN,
        tool_choice="auto",
        tools=[{"type": "function", **tool["function"]} for tool in tools],
        top_p=sampling.top_p,
    )
    statuses = _statuses(parts, row.finish_reason)
    head["output"] = [_item(row.turn_id, n, *said) for n, said in enumerate(zip(parts, statuses, strict=True))]
    if row.state == TurnState.GENERATING:
        return head
    if row.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return head | {"status": "failed", "error": {"code": "server_error", "message": row.detail}}
    usage = _usage(services, row.prompt_tokens, row.reply_tokens, row.reasoning or "")
    return head | _ended(FinishReason(row.finish_reason), row.finished_at) | {"usage": usage}
