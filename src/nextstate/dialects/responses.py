"""Bodies of /v1/responses: a list of items, of which several may make one message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextstate.dialects.reading import Notes, Read, compact, function_tool, listed, role_of
from nextstate.types import Message


def read_messages(body: Mapping[str, Any]) -> Read:
    """Messages and tools of a response request.

    `instructions` become the first system message. What the model said in one go comes as several items in a row
    (reasoning, message, function calls) and becomes one assistant message.
    """
    notes = Notes()
    messages: list[Message] = []
    if instructions := notes.text(body.get("instructions")):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else listed(given)
    messages += read_items(items, notes)
    tools: list[dict[str, Any]] = []
    for tool in listed(body.get("tools")):
        _add_tool(tools, tool, notes)
    return Read(
        messages=tuple(messages),
        tools=tuple(tools),
        ignored=dict(notes.ignored),
        unreadable=dict(notes.unreadable),
    )


def read_items(items: list[Any], notes: Notes) -> list[Message]:
    """Items of an input or an output as messages."""
    messages: list[dict[str, Any]] = []
    saying: dict[str, Any] | None = None  # the assistant message that further items may belong to
    for item in items:
        if not isinstance(item, Mapping):
            notes.ignored[f"item of type '{type(item).__name__}'"] += 1
            continue
        kind = item.get("type") or "message"
        if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            saying = None
            messages.append(
                {
                    "role": "tool",
                    "content": _output(item.get("output"), notes),
                    "tool_call_id": str(item.get("call_id") or ""),
                }
            )
            continue
        role = role_of(item.get("role")) if kind == "message" else "assistant"
        if kind == "message" and role != "assistant":
            saying = None
            messages.append({"role": role, "content": notes.text(item.get("content"))})
            continue
        if kind not in ("message", "reasoning", "function_call", "custom_tool_call"):
            notes.ignored[f"item '{kind}'"] += 1
            continue
        # Reasoning behind a text or a call begins the next answer; a text behind a call is one, too.
        begun = saying is not None and bool(
            saying.get("tool_calls") or (kind in ("message", "reasoning") and saying["content"])
        )
        if saying is None or (begun and kind in ("message", "reasoning")):
            saying = {"role": "assistant", "content": ""}
            messages.append(saying)
        if kind == "message":
            saying["content"] += notes.text(item.get("content"))
        elif kind == "reasoning":
            thought = notes.text(item.get("content")) or notes.text(item.get("summary"))
            if thought:
                saying["reasoning_content"] = saying.get("reasoning_content", "") + thought
        else:
            saying.setdefault("tool_calls", []).append(_call(item))
    return [message for message in messages if message["role"] != "assistant" or len(message) > 2 or message["content"]]


def _output(output: Any, notes: Notes) -> str:
    if isinstance(output, str) or output is None:
        return output or ""
    return notes.text(output) if isinstance(output, list) else compact(output)


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = compact({"input": item.get("input")})
    return {
        "id": str(item.get("call_id") or item.get("id") or ""),
        "type": "function",
        "function": {
            "name": str(item.get("name") or ""),
            "arguments": arguments if isinstance(arguments, str) else compact(arguments),
        },
    }


def _add_tool(tools: list[dict[str, Any]], tool: Any, notes: Notes) -> None:
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    # Some clients shorten a tool to its name.
    named = isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
    if kind == "function" and named:
        tools.append(function_tool(tool["name"], tool.get("description"), tool.get("parameters")))
    elif kind == "namespace" and named:
        for inner in listed(tool.get("tools")):
            _add_tool(tools, inner, notes)
    else:
        notes.ignored[f"tool '{kind}'"] += 1
