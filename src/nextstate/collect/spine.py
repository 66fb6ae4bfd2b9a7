"""What a conversation is recognised by: chains of hashes over its messages, in a canonical form.

    user "Hi"  ─▶  assistant "Hello!"  ─▶  user "More"
      s1     ──▶       s2          ──▶       s3           `spine`: each covers all messages up to its own
      h1     ──▶       h1          ──▶       h2           `heard`: the same without what the model said

System text is left out, since clients put dates and changing facts into it. So is what clients change when they send
an answer back: space at the ends, thoughts, unknown keys, tool call ids, the spacing of JSON arguments, the border
between two answers in a row. And so is what they put around their users' words, which `clients` knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from nextstate.collect.clients import Said, UserText, read_answer_text, read_user_text
from nextstate.types import Message

_SYSTEM = ("system", "developer")
Call = tuple[str, str]
"""Name and arguments, the latter as JSON with sorted keys."""
_Counted = tuple[int, str, str, tuple[Call, ...], frozenset[str]]


@dataclass(frozen=True, slots=True)
class Step:
    """One message that counts, or several answers in a row."""

    index: int
    """Of the message among those given; the last one of several answers."""
    role: str
    """user, tool, assistant, or summary for a text in place of the beginning."""
    text: str
    calls: tuple[Call, ...]
    call_ids: frozenset[str]
    """Letters and digits of them."""
    spine: str
    heard: str
    block: str
    """Hash of what was said to the model since it last spoke."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as they are compared with others."""

    steps: tuple[Step, ...]
    said: tuple[UserText, ...]
    """The texts of the user's role, in order."""
    answers: tuple[Step, ...]
    """The steps of the model."""
    opening: str
    """Hash of the first words of the user."""
    setting: str
    """Hash of them with their date prefix, and of the system text: it tells conversations apart that begin alike."""
    wording: str
    """Hash of all that was said to the model, with date prefixes and the client's retry texts."""

    @property
    def spine(self) -> str:
        return self.steps[-1].spine if self.steps else _hash("", [])

    @property
    def heard(self) -> str:
        return self.steps[-1].heard if self.steps else _hash("", [])

    @property
    def block(self) -> str:
        return self.steps[-1].block if self.steps else _hash("", [])

    @property
    def after_answer(self) -> tuple[Step, ...]:
        """The steps behind the last answer; all of them when there is none."""
        n = max((i + 1 for i, step in enumerate(self.steps) if step.role == "assistant"), default=0)
        return self.steps[n:]


def read(messages: Sequence[Message]) -> Conversation:
    """Messages in canonical form."""
    said: list[UserText] = []
    counted: list[_Counted] = []
    wording = ""
    for index, message in enumerate(messages):
        role, text = message["role"], flatten(message.get("content"))
        if role in _SYSTEM:
            continue
        if role == "assistant":
            calls, ids = _calls(message)
            text = read_answer_text(text)
            if not text and not calls:
                continue
            if counted and counted[-1][1] == "assistant":
                _, _, before, calls_before, ids_before = counted.pop()
                text = f"{before}\n{text}" if before and text else before or text
                calls, ids = calls_before + calls, ids_before | ids
            counted.append((index, role, text, calls, ids))
            continue
        text = text.strip()
        if role == "user":
            user_text = read_user_text(text)
            said.append(user_text)
            if user_text.said is Said.CARRIER:
                continue
            wording = _hash(wording, [user_text.said, user_text.retry, user_text.stamped])
            if user_text.said in (Said.RETRY, Said.UNSEEN):
                continue
            role, text = ("summary" if user_text.said is Said.SUMMARY else role), user_text.text
        else:
            wording = _hash(wording, text)
        counted.append((index, role, text, (), frozenset()))
    if not counted:
        # A request of nothing but system text, or of the client's own texts, has only that to be known by.
        counted = [(i, m["role"], flatten(m.get("content")).strip(), (), frozenset()) for i, m in enumerate(messages)]
    steps = _chain(counted)
    first = next((text for text in said if text.said is Said.HUMAN), None)
    system = [flatten(m.get("content")).strip() for m in messages if m["role"] in _SYSTEM]
    return Conversation(
        steps=tuple(steps),
        said=tuple(said),
        answers=tuple(step for step in steps if step.role == "assistant"),
        opening=opening_of(first.text if first else ""),
        setting=_hash("", [first.stamped if first else "", system[:1]]),
        wording=wording,
    )


def _chain(counted: Sequence[_Counted]) -> list[Step]:
    steps = []
    spine = heard = block = ""
    for index, role, text, calls, ids in counted:
        # Hashed once: a long text is in three chains.
        entry = _hash("", [role, text, *([calls] if calls else ())])
        spine = _hash(spine, entry)
        if role == "assistant":
            steps.append(Step(index, role, text, calls, ids, spine, heard, block))
            block = ""
            continue
        heard = _hash(heard, entry)
        # What stands in place of the beginning is nothing that the next answer was given to.
        block = "" if role == "summary" else _hash(block, entry)
        steps.append(Step(index, role, text, calls, ids, spine, heard, block))
    return steps


def request_spine(messages: Sequence[Message]) -> str:
    """The hash of a whole request."""
    return read(messages).spine


def answer_spine(messages: Sequence[Message], answer: Message) -> str:
    """The hash of a request with its answer behind it, as the next request will carry them.

    Args:
        answer: the assistant message as it was answered, with its tool calls if it has any.
    """
    return request_spine([*messages, answer])


def says_something(answer: Message) -> bool:
    """Whether there is anything in an answer that a reply could be about: text or a tool call."""
    return bool(answer.get("tool_calls") or read_answer_text(flatten(answer.get("content"))))


def opening_of(text: str) -> str:
    """The hash that conversations which begin with this text share."""
    return _hash("", ["opening", text.strip()])


def flatten(content: Any) -> str:
    """The text of a message's content, which is a string, a list of parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content)


def _calls(message: Message) -> tuple[tuple[Call, ...], frozenset[str]]:
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return tuple(_call(call) for call in calls), frozenset(
        letters for call in calls if (letters := "".join(filter(str.isalnum, str(call.get("id") or "")))[:40])
    )


def _call(call: Mapping[str, Any]) -> Call:
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = arguments.strip()
    return str(function.get("name")), json.dumps(arguments, sort_keys=True)


def _hash(before: str, entry: Any) -> str:
    return sha256(f"{before}{json.dumps(entry)}".encode()).hexdigest()[:32]
