"""Whether a stored answer is the one that a client sends back, perhaps merged with others, cut or touched up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from nextstate.collect import clients, spine
from nextstate.collect.clients import Said
from nextstate.collect.spine import Conversation, Step
from nextstate.store.store import AnyRow
from nextstate.types import Message

TELLING = 24
"""Characters of an answer that hardly two conversations share."""


def holds(theirs: Conversation, ours: Sequence[tuple[str, str, tuple[spine.Call, ...]]]) -> bool:
    """Whether a conversation has all of these steps, in order, and perhaps more between them."""
    steps = iter([(step.role, step.text, step.calls) for step in theirs.steps])
    return all(step in steps for step in ours)


def is_telling(step: Step) -> bool:
    return bool(step.calls) or len(step.text) >= TELLING


def unusable(row: AnyRow) -> bool:
    """Whether an answer holds a tool call that no client can read."""
    return any(not _is_json(call.get("function", {}).get("arguments", "")) for call in row.tool_calls or ())


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def answer_of(row: AnyRow) -> Step | None:
    """A stored answer in canonical form; None when there is nothing in it."""
    message = {"role": "assistant", "content": row.answer or "", "tool_calls": row.tool_calls or ()}
    answers = spine.read([message]).answers
    return answers[0] if answers else None


def call_ids(row: AnyRow) -> frozenset[str]:
    answer = answer_of(row)
    return answer.call_ids if answer is not None else frozenset()


def equal(row: AnyRow, step: Step) -> bool:
    answer = answer_of(row)
    return answer is not None and (answer.text, answer.calls) == (step.text, step.calls)


def similar(row: AnyRow, step: Step) -> bool:
    """Whether an answer may have become what the client sends back: merged with its neighbours, cut, or touched up."""
    answer = answer_of(row)
    if answer is None:
        return False
    if answer.calls != step.calls[len(step.calls) - len(answer.calls) :]:
        return False
    ours, theirs = answer.text, step.text
    if ours == theirs or (not ours and answer.calls):
        return True
    if not ours or not theirs:
        return bool(answer.calls)
    if theirs.endswith(f"\n{ours}") or theirs.startswith(f"{ours}\n"):
        return True
    if len(ours) >= TELLING and (theirs.endswith(ours) or theirs.startswith(ours)):
        return True
    if len(theirs) >= TELLING and ours.startswith(theirs):
        return True
    if len(ours) > 4000 or len(theirs) > 4000:
        return ours[:200] == theirs[:200] and ours[-200:] == theirs[-200:]
    return SequenceMatcher(None, ours, theirs, autojunk=False).ratio() >= 0.8


def quoted(text: str, row: AnyRow) -> int:
    """How many texts of a turn stand in `text`: what was said to the model, and what it said."""
    whole = folded(text)
    said = [clients.read_user_text(spine.flatten(m.get("content"))) for m in row.messages if m["role"] == "user"]
    texts = [words.text for words in said if words.said is Said.HUMAN]
    probes = {folded(part)[:120] for part in [*texts, row.answer or ""]}
    return sum(len(probe) >= 12 and probe in whole for probe in probes)


def folded(text: str) -> str:
    """Text on one line, also if it was spelt as JSON."""
    return " ".join(text.replace("\\n", " ").replace('\\"', '"').split())


def strings(calls: Iterable[Message]) -> list[str]:
    """The texts among the arguments of tool calls."""
    texts = []
    for call in calls:
        try:
            arguments = json.loads(call.get("function", {}).get("arguments") or "{}")
        except (ValueError, RecursionError):
            continue
        values = arguments.values() if isinstance(arguments, dict) else ()
        texts += [value.strip() for value in values if isinstance(value, str)]
    return texts
