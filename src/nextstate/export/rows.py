"""Turns as rows that TRL and `datasets` read, with the tokens as they were sampled beside the texts.

    turns          prompt, completion, label                     unpaired preferences, as for KTO
    preferences    prompt, chosen, rejected                      pairs, as for DPO
    distillation   prompt, privileged_context, answer            self-distillation with the hint, as for SDFT

Turns that nobody may learn from are in none of them, and everything that is left out is counted by why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, select

from nextstate.store.forgetting import NOBODY
from nextstate.store.learning import MAX_HINTS
from nextstate.store.schema import hints, next_states, samples, sessions, tool_sets, turns
from nextstate.store.store import AnyRow, Store
from nextstate.store.turns import load_messages, load_turn
from nextstate.types import FinishReason, Message, SkipReason, Source, Turn

Row = dict[str, Any]

MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
"""What a message keeps: OpenAI's fields, without marks of ours."""

_PAGE = 100


class Kind(StrEnum):
    TURNS = "turns"
    PREFERENCES = "preferences"
    DISTILLATION = "distillation"


class NotExported(StrEnum):
    """Why a turn is not a row. The first that applies counts. Each is explained in docs/your-data.md."""

    FORGOTTEN = "forgotten"
    EXPIRED = "expired"
    OPTED_OUT = "opted_out"
    UNFINISHED = "unfinished"
    SIDE_REQUEST = "side_request"
    QUARANTINED = "quarantined"
    RAW_PROMPT = "raw_prompt"
    NO_VERDICT = "no_verdict"
    NO_HINT = "no_hint"
    GOOD_ANSWER = "good_answer"
    NO_BETTER_ANSWER = "no_better_answer"


def rows(store: Store, kind: Kind, left_out: Counter[NotExported]) -> Iterator[Row]:
    """All rows of a kind, in the order of their turns.

    Args:
        left_out: is counted up.
    """
    after = 0
    while True:
        # A page a view of the database: an export of a large store does not keep its log from being emptied.
        found = store.read_now(_page, kind, after)
        for _, row in found:
            if isinstance(row, NotExported):
                left_out[row] += 1
            else:
                yield row
        if len(found) < _PAGE:
            return
        after = found[-1][0]


def _page(db: Connection, kind: Kind, after: int) -> list[tuple[int, Row | NotExported]]:
    query = _TURNS.where(turns.c.turn_id > after).order_by(turns.c.turn_id).limit(_PAGE)
    return [(row.turn_id, _MAKE[kind](db, row) if (why := _why_not(row)) is None else why) for row in db.execute(query)]


_TURNS = (
    select(
        *(turns.c.turn_id, turns.c.session_id, turns.c.user, turns.c.parent_turn_id, turns.c.kind, turns.c.reason),
        *(turns.c.learn, turns.c.dialect, turns.c.finish_reason, turns.c.request_spine, turns.c.tool_calls),
        *(samples.c.reward, samples.c.hint, samples.c.verdict_id, tool_sets.c.tools, sessions.c.key),
    )
    .join(sessions)
    .outerjoin(samples, samples.c.turn_id == turns.c.turn_id)
    .outerjoin(tool_sets, tool_sets.c.tool_set == turns.c.tool_set)
)


def _why_not(row: AnyRow) -> NotExported | None:
    reasons = {
        NotExported.FORGOTTEN: row.reason == SkipReason.FORGOTTEN,
        NotExported.EXPIRED: row.user == NOBODY,
        NotExported.OPTED_OUT: not row.learn,
        NotExported.UNFINISHED: row.finish_reason != FinishReason.STOP,
        NotExported.SIDE_REQUEST: row.kind == "side",
        NotExported.QUARANTINED: row.reason == SkipReason.QUARANTINED,
        # Such a prompt was not made of messages, so messages would not say what the model read.
        NotExported.RAW_PROMPT: row.dialect in ("completions", "generate"),
        NotExported.NO_VERDICT: row.reward is None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _turn(db: Connection, row: AnyRow) -> Row:
    conversation = _conversation(db, row.turn_id)
    return {
        "prompt": conversation[:-1],
        "completion": conversation[-1:],
        "label": row.reward > 0,
        **_about(row),
        **_tokens(load_turn(db, row.turn_id)),
    }


def _distillation(db: Connection, row: AnyRow) -> Row | NotExported:
    if row.hint is None:
        return NotExported.NO_HINT
    conversation = _conversation(db, row.turn_id)
    texts = select(hints.c.text).where(hints.c.verdict_id == row.verdict_id).order_by(hints.c.n).limit(MAX_HINTS)
    return {
        "prompt": conversation[:-1],
        "privileged_context": row.hint,
        "hints": list(db.execute(texts).scalars()),
        # Not "completion": what was said without the hint is nothing to imitate, and a trainer would.
        "answer": conversation[-1:],
        "label": row.reward > 0,
        **_about(row),
        **_tokens(load_turn(db, row.turn_id)),
    }


def _preference(db: Connection, row: AnyRow) -> Row | NotExported:
    if row.reward > 0:
        return NotExported.GOOD_ANSWER
    conversation = _conversation(db, row.turn_id)
    better = _regenerated(db, row, conversation[:-1]) or _corrected(db, row)
    if better is None:
        return NotExported.NO_BETTER_ANSWER
    how, other = better
    chosen, rejected = load_turn(db, other.turn_id), load_turn(db, row.turn_id)
    return {
        "prompt": conversation[:-1],
        "chosen": _conversation(db, other.turn_id)[-1:],
        "rejected": conversation[-1:],
        "pair": how,
        **_about(row),
        "chosen_turn_id": other.turn_id,
        **{f"chosen_{name}": value for name, value in _tokens(chosen).items()},
        **{f"rejected_{name}": value for name, value in _tokens(rejected).items()},
    }


def _regenerated(db: Connection, row: AnyRow, prompt: list[Row]) -> tuple[str, AnyRow] | None:
    """The newest good answer to the same request, word for word."""
    same = _TURNS.where(
        turns.c.user == row.user,
        turns.c.request_spine == row.request_spine,
        turns.c.session_id == row.session_id,
        samples.c.reward > 0,
    )
    for other in db.execute(same.order_by(turns.c.turn_id.desc())):
        if _why_not(other) is None and _conversation(db, other.turn_id)[:-1] == prompt:
            return "regeneration", other
    return None


def _corrected(db: Connection, row: AnyRow) -> tuple[str, AnyRow] | None:
    """The good answer to what the user said about the bad one. Both are texts: a call belongs to its conversation."""
    said = select(next_states.c.from_turn_id).where(
        next_states.c.turn_id == row.turn_id, next_states.c.source == Source.USER
    )
    other = db.execute(_TURNS.where(turns.c.turn_id.in_(said), samples.c.reward > 0)).first()
    if other is None or _why_not(other) is not None or row.tool_calls or other.tool_calls:
        return None
    return "correction", other


_MAKE = {Kind.TURNS: _turn, Kind.PREFERENCES: _preference, Kind.DISTILLATION: _distillation}


def _about(row: AnyRow) -> Row:
    # The tools as text: as columns, each would have the parameters of all.
    return {"tools": row.tools, "turn_id": row.turn_id, "session": row.key}


def _tokens(turn: Turn) -> Row:
    """As sampled, never tokenised again."""
    return {
        "prompt_token_ids": list(turn.prompt_ids),
        "answer_token_ids": list(turn.reply_ids),
        "answer_logprobs": list(turn.reply_logprobs),
        "answer_versions": list(turn.reply_versions),
        "temperature": turn.temperature,
    }


def _conversation(db: Connection, turn_id: int) -> list[Row]:
    return [_message(message) for message in load_messages(db, turn_id)]


def _message(message: Message | Mapping[str, Any]) -> Row:
    return {name: message[name] for name in MESSAGE_FIELDS if name in message}
