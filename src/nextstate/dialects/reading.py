"""What the dialects have in common: the result of reading a body, and text out of the forms that text comes in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nextstate.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A body in our own words."""

    messages: tuple[Message, ...]
    """In OpenAI's chat shape; content is a string, "" when there was none."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """OpenAI function tools: {"type": "function", "function": {...}}."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Items and tools of a type unknown here, by what they are, e.g. {"tool 'web_search'": 1}. Nothing of what was
    said is lost with them."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """Parts of a message that are no text, e.g. {"part 'image_url'": 1}: without them the message says something
    else."""


class Notes:
    """Counts what a reader could not take, while it reads."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()
        self.unreadable: Counter[str] = Counter()

    def text(self, content: Any) -> str:
        """The text of a message's content: a string, parts, or nothing; parts are joined as they are."""
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if not isinstance(content, Sequence):
            self.unreadable[f"content of type '{type(content).__name__}'"] += 1
            return ""
        return "".join(self._part(part) for part in content)

    def _part(self, part: Any) -> str:
        if isinstance(part, str):
            return part
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind in _TEXT_PARTS and isinstance(text, str):
            return text
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            return str(part["refusal"])
        self.unreadable[f"part '{kind}'"] += 1
        return ""


_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def compact(arguments: Any) -> str:
    """Arguments of a tool call as compact JSON; text that is no JSON stays as it is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False, separators=(",", ":"))


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in OpenAI's chat shape; what the client left out is left out."""
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str) and description:
        function["description"] = description
    if isinstance(parameters, Mapping):
        function["parameters"] = dict(parameters)
    return {"type": "function", "function": function}


def role_of(role: Any) -> str:
    """Developer text is system text; a role nobody knows is the user's."""
    if role in ("system", "developer"):
        return "system"
    return role if role in ("user", "assistant", "tool") else "user"


def listed(value: Any) -> list[Any]:
    """A list as it is, anything else as an empty one."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
