"""Bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextstate.dialects.reading import Notes, Read, listed, role_of
from nextstate.types import Message


def read_messages(body: Mapping[str, Any]) -> Read:
    """Messages and tools of a chat completion.

    `reasoning` and `reasoning_content` are both taken for what the model thought; a `function` message is a tool's.
    """
    notes = Notes()
    messages = [_message(message, notes) for message in listed(body.get("messages")) if isinstance(message, Mapping)]
    tools = []
    for tool in [*listed(body.get("tools")), *({"function": f} for f in listed(body.get("functions")))]:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            tools.append({"type": "function", "function": dict(function)})
        else:
            kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
            notes.ignored[f"tool '{kind}'"] += 1
    return Read(
        messages=tuple(messages),
        tools=tuple(tools),
        ignored=dict(notes.ignored),
        unreadable=dict(notes.unreadable),
    )


def read_prompt(body: Mapping[str, Any]) -> Read:
    """A plain completion: its prompt as the one message of the user. Of several prompts, only the first is read."""
    notes = Notes()
    prompt = body.get("prompt")
    prompts = listed(prompt)
    if prompts and isinstance(prompts[0], str):
        prompt = prompts[0]
        notes.ignored["further prompt"] += len(prompts) - 1
    elif prompts:
        prompt = ""
        notes.unreadable["prompt of token ids"] += 1
    messages = ({"role": "user", "content": notes.text(prompt)},)
    return Read(messages=messages, ignored=dict(+notes.ignored), unreadable=dict(notes.unreadable))


def _message(message: Mapping[str, Any], notes: Notes) -> Message:
    role = "tool" if message.get("role") == "function" else role_of(message.get("role"))
    read: dict[str, Any] = {"role": role, "content": notes.text(message.get("content"))}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            read["reasoning_content"] = reasoning
        calls = [_call(call) for call in listed(message.get("tool_calls")) if isinstance(call, Mapping)]
        if isinstance(old_call := message.get("function_call"), Mapping):
            calls.append(_call({"function": old_call}))
        if calls:
            read["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if isinstance(value := message.get(key), str) and value:
            read[key] = value
    return read


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        # As the client spells them: a template may show them to the model, and what it sees must be what was sent.
        "function": {
            "name": str(function.get("name") or ""),
            "arguments": arguments if isinstance(arguments, str) else "",
        },
    }
