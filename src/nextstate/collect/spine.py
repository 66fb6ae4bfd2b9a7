"""What a conversation is recognised by: a chain of hashes over its messages, in a canonical form.

    user "Hi"  ─▶  assistant "Hello!"  ─▶  user "More"
      s1     ──▶       s2          ──▶       s3           each hash covers all messages up to its own

System text is left out, since clients put dates and changing facts into it. So is what clients change when they send
an answer back: space at the ends, unknown keys, the punctuation of tool call ids, the spacing of JSON arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from nextstate.types import Message

_SYSTEM = ("system", "developer")


def request_spine(messages: Sequence[Message]) -> str:
    """The hash of a whole request."""
    return _chain(messages)[-1][1]


def answer_spine(messages: Sequence[Message], answer: str) -> str:
    """The hash of a request with its answer behind it, as the next request will carry them."""
    return request_spine([*messages, {"role": "assistant", "content": answer}])


def answer_prefixes(messages: Sequence[Message]) -> list[tuple[int, str]]:
    """For every assistant message: its index, and the hash of the messages up to it; in order."""
    return [(i, spine) for i, spine in _chain(messages) if messages[i]["role"] == "assistant"]


def _chain(messages: Sequence[Message]) -> list[tuple[int, str]]:
    counted = [(i, m) for i, m in enumerate(messages) if m["role"] not in _SYSTEM]
    chain = []
    spine = ""
    # A request of nothing but system text has only that to be known by.
    for i, message in counted or list(enumerate(messages)):
        spine = sha256(f"{spine}{_canonical(message)}".encode()).hexdigest()[:32]
        chain.append((i, spine))
    return chain


def _canonical(message: Message) -> str:
    parts: list[Any] = [message["role"], flatten(message.get("content")).strip()]
    if calls := message.get("tool_calls"):
        parts.append([_call(call) for call in calls])
    if call_id := message.get("tool_call_id"):
        parts.append(_call_id(call_id))
    return json.dumps(parts)


def flatten(content: Any) -> str:
    """The text of a message's content, which is a string, a list of parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content)


def _call(call: Any) -> list[str]:
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = arguments.strip()
    return [_call_id(call.get("id") or ""), str(function.get("name")), json.dumps(arguments, sort_keys=True)]


def _call_id(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[:40]
