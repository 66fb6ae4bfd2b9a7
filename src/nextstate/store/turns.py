"""Sessions and turns: written by serve and collect, read by everyone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, delete, func, insert, or_, select, update

from nextstate.errors import TokenMismatch
from nextstate.store.arrays import (
    pack_ids,
    pack_logprobs,
    pack_versions,
    unpack_ids,
    unpack_logprobs,
    unpack_versions,
)
from nextstate.store.schema import feedback, next_states, samples, sessions, tool_sets, turns
from nextstate.store.store import AnyRow, note
from nextstate.types import (
    FinishReason,
    Message,
    Sampling,
    SkipReason,
    Source,
    TokenIds,
    Turn,
    TurnState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What later requests find a turn by, beside its spines; see collect/spine.py."""

    heard_spine: str = ""
    block_spine: str = ""
    opening: str = ""
    setting: str = ""
    wording: str = ""
    trace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request belongs, decided by collect."""

    session_id: int | None
    """None: a new session."""
    session_key: str | None
    """The client's own session id; None: we make one for a new session."""
    parent_turn_id: int | None
    """The turn whose answer this request continues."""
    kind: str
    """new, continuation, branch, retry, regeneration, subagent or side."""
    because: str
    next_state: tuple[Message, ...] = ()
    """What follows the parent's answer."""
    source: Source | None = None
    instead_of: int | None = None
    """The turn that was taken for what follows the parent's answer until this one showed that it is not."""
    marks: Marks = field(default_factory=Marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTurn:
    """A request that is about to be answered."""

    user: str
    placement: Placement
    messages: tuple[Message, ...]
    dialect: str
    """Which API it came through; of 'completions' and 'generate' the messages are not what the prompt was made of."""
    tools: tuple[Mapping[str, Any], ...]
    """Those that the model saw."""
    prompt_ids: TokenIds
    request_spine: str
    sampling: Sampling
    learn: bool
    """False: serve it and never judge or train it."""
    received_at: float = field(default_factory=time.time)


OWN_KEY = "s-"


def open_turn(db: Connection, new: NewTurn) -> tuple[int, int, str]:
    """Write a request down before it is answered, and give its parent the next state it brings.

    Returns the turn's id, its session's id, and the session's key.
    """
    now, place = new.received_at, new.placement
    session_id, key = _session(db, new.user, place, now)
    messages_kept, prompt_kept = 0, 0
    if place.parent_turn_id is not None:
        parent_messages = load_messages(db, place.parent_turn_id)
        messages_kept = _common(parent_messages, new.messages)
        parent = load_turn(db, place.parent_turn_id)
        prompt_kept = _common(parent.prompt_ids + parent.reply_ids, new.prompt_ids)
    row = {
        "session_id": session_id,
        "user": new.user,
        "parent_turn_id": place.parent_turn_id,
        "kind": place.kind,
        "dialect": new.dialect,
        "tool_set": _keep_tools(db, new.tools),
        "placed_because": place.because,
        "state": TurnState.GENERATING,
        "messages_kept": messages_kept,
        "messages": [dict(m) for m in new.messages[messages_kept:]],
        "prompt_kept": prompt_kept,
        "prompt_suffix": pack_ids(new.prompt_ids[prompt_kept:]),
        "prompt_tokens": len(new.prompt_ids),
        "request_spine": new.request_spine,
        "sampling": new.sampling.as_json(),
        "created_at": now,
        "learn": new.learn,
        **asdict(place.marks),
    }
    turn_id = int(db.execute(insert(turns).values(row).returning(turns.c.turn_id)).scalar_one())
    if place.parent_turn_id is not None and place.instead_of is not None:
        _replace_next_state(db, place.parent_turn_id, place.instead_of, turn_id)
    if place.parent_turn_id is not None and place.next_state:
        _add_next_state(db, place, turn_id, now)
    return turn_id, session_id, key


def _keep_tools(db: Connection, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Write tools down unless they are known; clients send the same ones with every request. Gives their hash."""
    if not tools:
        return None
    text = json.dumps(tools, ensure_ascii=False)
    digest = sha256(text.encode()).hexdigest()[:32]
    known = select(tool_sets.c.tool_set).where(tool_sets.c.tool_set == digest)
    if db.execute(known).first() is None:
        db.execute(insert(tool_sets).values(tool_set=digest, tools=text))
    return digest


def load_tools(db: Connection, tool_set: str | None) -> tuple[Mapping[str, Any], ...]:
    """The tools behind a turn's `tool_set`, as the client sent them."""
    if tool_set is None:
        return ()
    text = db.execute(select(tool_sets.c.tools).where(tool_sets.c.tool_set == tool_set)).scalar_one()
    return tuple(json.loads(text))


def _session(db: Connection, user: str, place: Placement, now: float) -> tuple[int, str]:
    if place.session_id is not None:
        changed = update(sessions).where(sessions.c.session_id == place.session_id)
        # A session that had ended goes on: the client came back.
        row = db.execute(changed.values(last_at=now, ended_at=None, end_reason=None).returning(sessions.c.key)).one()
        if place.session_key is not None and place.session_key != row.key and row.key.startswith(OWN_KEY):
            # The first request of a session did not name it, as those for titles do not.
            named = update(sessions).where(sessions.c.session_id == place.session_id)
            db.execute(named.values(key=place.session_key))
            return place.session_id, place.session_key
        return place.session_id, row.key
    key = place.session_key or f"{OWN_KEY}{uuid4().hex[:12]}"
    values = {"user": user, "key": key, "started_at": now, "last_at": now}
    return int(db.execute(insert(sessions).values(values).returning(sessions.c.session_id)).scalar_one()), key


def _add_next_state(db: Connection, place: Placement, turn_id: int, now: float) -> None:
    """The first continuation of an answer is its next state; a later branch from it changes nothing."""
    known = select(next_states.c.turn_id).where(next_states.c.turn_id == place.parent_turn_id)
    if db.execute(known).first() is not None:
        return
    messages = [dict(m) for m in place.next_state]
    values = {"turn_id": place.parent_turn_id, "from_turn_id": turn_id, "source": place.source, "messages": messages}
    db.execute(insert(next_states).values(created_at=now, **values))
    # Turns left out because their session had ended get their chance after all.
    ended = (turns.c.state == TurnState.LEFT_OUT) & (turns.c.reason == SkipReason.NO_NEXT_STATE)
    waiting = update(turns).where(
        turns.c.turn_id == place.parent_turn_id, (turns.c.state == TurnState.FINISHED) | ended
    )
    db.execute(waiting.values(state=TurnState.CONTINUED, reason=None, detail=None))


JUDGED_AGAIN = (SkipReason.NO_NEXT_STATE, SkipReason.NEUTRAL, SkipReason.ABSTAINED, SkipReason.JUDGE_GAVE_UP)
"""What a turn was left out for that better evidence may change."""


def can_be_judged_again(row: AnyRow) -> bool:
    """Whether other evidence would still count: a turn, by its state and reason, that is in no update."""
    return row.state in (TurnState.FINISHED, TurnState.CONTINUED, TurnState.JUDGED) or row.reason in JUDGED_AGAIN


def _replace_next_state(db: Connection, turn_id: int, from_turn_id: int, by_turn_id: int) -> None:
    """Take away a next state that proved to be none, with what was made of it. A turn in an update keeps it."""
    row = db.execute(select(turns.c.state, turns.c.reason).where(turns.c.turn_id == turn_id)).one()
    if not can_be_judged_again(row):
        return
    taken = delete(next_states).where(next_states.c.turn_id == turn_id, next_states.c.from_turn_id == from_turn_id)
    if db.execute(taken).rowcount == 0:
        return
    told = select(feedback.c.feedback_id).where(feedback.c.turn_id == turn_id)
    if db.execute(told.limit(1)).first() is None:  # else the verdict rests on that
        db.execute(delete(samples).where(samples.c.turn_id == turn_id))
        afresh = {"state": TurnState.FINISHED, "reason": None, "detail": None, "lease_until": None, "judge_attempts": 0}
        db.execute(update(turns).where(turns.c.turn_id == turn_id).values(afresh))
    because = f"Turn {by_turn_id} went on from the same answer without it: it was work on the side."
    unfinished = turns.c.reason.in_((SkipReason.ABORTED, SkipReason.ENGINE_FAULT, SkipReason.SERVER_STOPPED))
    aside = (turns.c.turn_id == from_turn_id) & (turns.c.reason.is_(None) | ~unfinished)
    db.execute(update(turns).where(aside).values(kind="side", placed_because=because))
    done = update(turns).where(aside, turns.c.state == TurnState.FINISHED)
    db.execute(done.values(state=TurnState.LEFT_OUT, reason=SkipReason.SIDE_REQUEST, detail=because))
    note(db, "next_state_replaced", turn_id, was_from=from_turn_id, now_from=by_turn_id)


def finish_turn(
    db: Connection,
    turn_id: int,
    *,
    answer: Message,
    malformed_calls: int,
    answer_spine: str,
    reply_ids: TokenIds,
    reply_logprobs: Sequence[float],
    reply_versions: Sequence[int],
    finish_reason: FinishReason,
    counted_tokens: int,
    finished_at: float | None = None,
) -> None:
    """Write the answer down, exactly as sampled, and decide whether it can be learned from at all.

    Args:
        answer: the assistant's message as the client saw it.
        malformed_calls: tool calls in it that were none, and went out as text.
        finished_at: seconds since the epoch; now by default.
        counted_tokens: reply tokens as counted on their way to the client; a difference quarantines the turn.
    """
    columns = turns.c.sampling, turns.c.kind, turns.c.placed_because, turns.c.learn, turns.c.reason
    row = db.execute(select(*columns).where(turns.c.turn_id == turn_id)).one()
    if row.reason == SkipReason.FORGOTTEN:
        return  # while it was being answered
    skip, detail = _why_not(row, finish_reason)
    counts = len(reply_ids), len(reply_logprobs), len(reply_versions)
    if set(counts) != {counted_tokens}:
        skip, detail = SkipReason.QUARANTINED, f"{TokenMismatch(turn_id, *counts)} The client got {counted_tokens}."
        note(db, "quarantined", turn_id, tokens=counts[0], logprobs=counts[1], versions=counts[2], sent=counted_tokens)
    values = {
        "state": TurnState.LEFT_OUT if skip else TurnState.FINISHED,
        "reason": skip,
        "detail": detail,
        "answer": answer["content"],
        "reasoning": answer.get("reasoning_content"),
        "tool_calls": answer.get("tool_calls"),
        "malformed_calls": malformed_calls,
        "answer_spine": answer_spine,
        "reply_ids": pack_ids(reply_ids),
        "reply_logprobs": pack_logprobs(reply_logprobs),
        "reply_versions": pack_versions(reply_versions),
        "reply_tokens": len(reply_ids),
        "finish_reason": finish_reason,
        "finished_at": time.time() if finished_at is None else finished_at,
    }
    db.execute(update(turns).where(turns.c.turn_id == turn_id).values(values))


def _why_not(row: AnyRow, finish_reason: FinishReason) -> tuple[SkipReason | None, str | None]:
    if finish_reason is FinishReason.ABORTED:
        return SkipReason.ABORTED, "The client went away before the answer was complete."
    if row.kind == "side":
        return SkipReason.SIDE_REQUEST, row.placed_because
    if not row.learn:
        return SkipReason.LEARNING_OFF, "Learning is off: for the server, the key or this request."
    if (what := Sampling.from_json(row.sampling).why_not_trainable) is not None:
        return SkipReason.SAMPLING_NOT_REPRODUCIBLE, f"The request asked for {what}."
    if finish_reason is FinishReason.LENGTH:
        return SkipReason.TRUNCATED, "The answer reached the token limit."
    return None, None


def leave_out(
    db: Connection, turn_ids: Sequence[int], reason: SkipReason, detail: str, *, at: float | None = None
) -> None:
    """Close turns that will not be trained, with the reason. A turn that was forgotten meanwhile stays that.

    Args:
        at: when, seconds since the epoch; now by default.
    """
    closed_at = func.coalesce(turns.c.finished_at, time.time() if at is None else at)
    values: dict[str, Any] = {"state": TurnState.LEFT_OUT, "reason": reason, "detail": detail, "lease_until": None}
    values["finished_at"] = closed_at
    there = or_(turns.c.reason.is_(None), turns.c.reason != SkipReason.FORGOTTEN)
    db.execute(update(turns).where(turns.c.turn_id.in_(turn_ids), there).values(values))


def close_interrupted(db: Connection) -> int:
    """At start: turns that a server which died was answering. Returns how many there were."""
    interrupted = update(turns).where(turns.c.state == TurnState.GENERATING)
    done = db.execute(
        interrupted.values(
            state=TurnState.LEFT_OUT,
            reason=SkipReason.SERVER_STOPPED,
            detail="The server stopped before the answer was complete.",
            finished_at=time.time(),
        )
    )
    return done.rowcount


def end_sessions(db: Connection, *, idle_before: float) -> int:
    """End sessions without a request since then; their last turns have no next state. Returns how many ended."""
    return _end(db, sessions.c.ended_at.is_(None) & (sessions.c.last_at < idle_before), "idle")


def end_session(db: Connection, session_id: int) -> None:
    """The client said that a session is over."""
    _end(db, sessions.c.session_id == session_id, "done")


def _end(db: Connection, which: ColumnElement[bool], why: str) -> int:
    # The turns first, while the sessions can still be told by `which`; neither is ever listed here, for there may be
    # a hundred thousand.
    said = "The client ended the session" if why == "done" else "The session went idle"
    db.execute(
        update(turns)
        .where(turns.c.session_id.in_(select(sessions.c.session_id).where(which)), turns.c.state == TurnState.FINISHED)
        .values(
            state=TurnState.LEFT_OUT,
            reason=SkipReason.NO_NEXT_STATE,
            detail=f"{said} and nothing had followed this answer.",
        )
    )
    return db.execute(update(sessions).where(which).values(ended_at=time.time(), end_reason=why)).rowcount


def load_messages(db: Connection, turn_id: int) -> tuple[Message, ...]:
    """The whole conversation of a turn, its answer as the last message when there is one."""
    columns = turns.c.parent_turn_id, turns.c.messages_kept, turns.c.messages, *_ANSWER
    pieces: list[Mapping[str, Any]] = []
    kept: int | None = None
    next_id: int | None = turn_id
    while next_id is not None and kept != 0:
        row = db.execute(select(*columns).where(turns.c.turn_id == next_id)).one()
        answer = [] if row.answer is None else [_answer_message(row)]
        here = [*row.messages, *answer]
        # Of this turn's conversation the child keeps `kept` messages, of which `messages_kept` are further up.
        pieces = here[: None if kept is None else max(0, kept - row.messages_kept)] + pieces
        kept = row.messages_kept if kept is None else min(kept, row.messages_kept)
        next_id = row.parent_turn_id
    return tuple(pieces)


_ANSWER = turns.c.answer, turns.c.reasoning, turns.c.tool_calls


def _answer_message(row: AnyRow) -> dict[str, Any]:
    """An answer as a message; what it has not is left out, as in the messages of requests."""
    more = {"reasoning_content": row.reasoning, "tool_calls": row.tool_calls}
    return {"role": "assistant", "content": row.answer, **{key: value for key, value in more.items() if value}}


def load_turn(db: Connection, turn_id: int) -> Turn:
    """A turn with its whole prompt.

    Raises:
        TokenMismatch: the stored counts differ.
    """
    row = db.execute(select(turns).where(turns.c.turn_id == turn_id)).one()
    return Turn(
        turn_id=turn_id,
        prompt_ids=_prompt(db, row.parent_turn_id, row.prompt_kept) + unpack_ids(row.prompt_suffix),
        reply_ids=unpack_ids(row.reply_ids or b""),
        reply_logprobs=unpack_logprobs(row.reply_logprobs or b""),
        reply_versions=unpack_versions(row.reply_versions or []),
        temperature=row.sampling["temperature"],
    )


def _prompt(db: Connection, turn_id: int | None, length: int) -> TokenIds:
    """The first `length` tokens of a turn's prompt and reply, followed up the tree only as far as needed."""
    columns = turns.c.parent_turn_id, turns.c.prompt_kept, turns.c.prompt_suffix, turns.c.reply_ids
    pieces: TokenIds = ()
    while turn_id is not None and length > 0:
        row = db.execute(select(*columns).where(turns.c.turn_id == turn_id)).one()
        here = unpack_ids(row.prompt_suffix) + unpack_ids(row.reply_ids or b"")
        pieces = here[: max(0, length - row.prompt_kept)] + pieces
        turn_id, length = row.parent_turn_id, min(length, row.prompt_kept)
    return pieces


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
