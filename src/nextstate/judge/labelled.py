"""Labelled turns: what a judge is measured on and a head is fitted to. One JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nextstate.errors import NextstateError
from nextstate.types import FinishReason, TurnToJudge, Vote

ROLES = ("user", "tool", "system", "assistant", "function")


class LabelledDataError(NextstateError):
    """A file of labelled turns that cannot be read; it names the line and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTurn:
    turn: TurnToJudge
    label: Vote
    kind: str
    """What sort of next state it is, e.g. 'correction'; '' where the file does not say."""
    directive: bool | None
    """Whether the next state says how the turn should have been done; None where the file does not say."""
    group: str
    """Rows of one group, e.g. of one conversation, belong into one fold; the row itself where the file names none."""


def read_labelled(path: Path, *, first_id: int = 0) -> list[LabelledTurn]:
    """All rows of a file, numbered from `first_id` on. A judge sees `request`, `response` and `next_state` alone.

    Raises:
        LabelledDataError: the file, a line or a field is not what it should be.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LabelledDataError(f"{path} cannot be read as text: {error}. Nothing was measured.") from error
    rows: list[LabelledTurn] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_row(line, f"{path}, line {number}", first_id + len(rows)))
    if not rows:
        raise LabelledDataError(f"{path} has no rows. It should hold one JSON object a line; see docs/judge.md.")
    return rows


def _row(line: str, where: str, turn_id: int) -> LabelledTurn:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LabelledDataError(f"{where}: this is not JSON ({error}). Nothing was measured.") from error
    if not isinstance(row, dict):
        raise LabelledDataError(f"{where}: there is a {type(row).__name__} instead of an object in braces.")
    label = _field(row, "label", int, where)
    if label not in (-1, 0, 1):
        raise LabelledDataError(f"{where}: 'label' is {label}; it is 1 for good, -1 for bad and 0 for no evidence.")
    messages = _field(row, "next_state", list, where)
    for at, message in enumerate(messages):
        known = isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        if not known:
            raise LabelledDataError(
                f"{where}: 'next_state[{at}]' is no message: it needs 'content', a text, and 'role', one of "
                f"{', '.join(ROLES)}."
            )
    directive = row.get("directive")
    if directive is not None and not isinstance(directive, bool):
        raise LabelledDataError(f"{where}: 'directive' is {directive!r}; it is true or false, or left out.")
    return LabelledTurn(
        turn=TurnToJudge(
            turn_id=turn_id,
            history=({"role": "user", "content": _field(row, "request", str, where)},),
            answer=_field(row, "response", str, where),
            next_state=tuple(messages),
            finish_reason=FinishReason.STOP,
        ),
        label=Vote(label),
        kind=str(row.get("kind") or ""),
        directive=directive,
        group=str(row.get("group") or where),
    )


def _field(row: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    if name not in row:
        raise LabelledDataError(f"{where}: the field '{name}' is missing. See docs/judge.md for what a row holds.")
    value = row[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        words = {int: "a whole number", str: "a text", list: "a list"}
        raise LabelledDataError(f"{where}: '{name}' is {type(value).__name__}; it should be {words[kind]}.")
    return value
