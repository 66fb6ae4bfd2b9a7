"""Bodies of /v1/messages, as Anthropic's clients speak it: a message is a list of blocks of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextstate.dialects.reading import Notes, Read, compact, function_tool, listed, role_of
from nextstate.types import Message


def read_messages(body: Mapping[str, Any]) -> Read:
    """Messages and tools of a messages request.

    System blocks become the first system message, one block a paragraph. Tool results become messages of role "tool",
    in order, before the text of the same user message. Thinking becomes reasoning_content; redacted thinking is lost.
    """
    notes = Notes()
    messages: list[Message] = []
    if system := _system(body.get("system"), notes):
        messages.append({"role": "system", "content": system})
    for message in listed(body.get("messages")):
        if not isinstance(message, Mapping):
            notes.ignored[f"message of type '{type(message).__name__}'"] += 1
            continue
        role, content = role_of(message.get("role")), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else listed(content)
        if role == "assistant":
            messages.append(_assistant(blocks, notes))
        elif role == "system":
            messages.append({"role": "system", "content": _system(content, notes)})
        else:
            messages += _user(blocks, notes)
    tools = []
    for tool in listed(body.get("tools")):
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        if isinstance(tool, Mapping) and isinstance(tool.get("name"), str) and kind in (None, "custom"):
            tools.append(function_tool(tool["name"], tool.get("description"), tool.get("input_schema")))
        else:
            notes.ignored[f"tool '{kind}'"] += 1
    return Read(
        messages=tuple(messages),
        tools=tuple(tools),
        ignored=dict(notes.ignored),
        unreadable=dict(notes.unreadable),
    )


def _system(content: Any, notes: Notes) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n\n".join(text for block in listed(content) if (text := notes.text([block])))


def _user(blocks: list[Any], notes: Notes) -> list[Message]:
    results: list[Message] = []
    rest = []
    for block in blocks:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            result = {
                "role": "tool",
                "content": notes.text(block.get("content")),
                "tool_call_id": str(block.get("tool_use_id") or ""),
            }
            results.append(result | {"is_error": True} if block.get("is_error") is True else result)
        else:
            rest.append(block)
    if rest or not results:
        results.append({"role": "user", "content": notes.text(rest)})
    return results


def _assistant(blocks: list[Any], notes: Notes) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
        elif kind == "redacted_thinking":
            notes.ignored["block 'redacted_thinking'"] += 1
        elif kind == "tool_use":
            call = {
                "id": str(block.get("id") or ""),
                "type": "function",
                "function": {"name": str(block.get("name") or ""), "arguments": compact(block.get("input"))},
            }
            message.setdefault("tool_calls", []).append(call)
        else:
            message["content"] += notes.text([block])
    return message
