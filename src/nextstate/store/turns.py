"""Sessions and turns: written by serve and collect, read by everyone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, exists, insert, select, update

from nextstate.errors import TokenMismatch
from nextstate.store.arrays import (
    pack_ids,
    pack_logprobs,
    pack_versions,
    unpack_ids,
    unpack_logprobs,
    unpack_versions,
)
from nextstate.store.schema import next_states, sessions, tool_sets, turns
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
class Placement:
    """Where a request belongs, decided by collect."""

    session_id: int | None
    """None: a new session."""
    session_key: str | None
    """The client's own session id; None: we make one for a new session."""
    parent_turn_id: int | None
    """The turn whose answer this request continues."""
    kind: str
    """new, continuation, retry, regeneration or side."""
    because: str
    next_state: tuple[Message, ...] = ()
    """What follows the parent's answer."""
    source: Source | None = None


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


def open_turn(db: Connection, new: NewTurn) -> tuple[int, int, str]:
    """Write a request down before it is answered, and give its parent the next state it brings.

    Returns the turn's id, its session's id, and the session's key.
    """
    now, place = time.time(), new.placement
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
    }
    turn_id = int(db.execute(insert(turns).values(row).returning(turns.c.turn_id)).scalar_one())
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
        return place.session_id, row.key
    key = place.session_key or f"s-{uuid4().hex[:12]}"
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
) -> None:
    """Write the answer down, exactly as sampled, and decide whether it can be learned from at all.

    Args:
        answer: the assistant's message as the client saw it.
        malformed_calls: tool calls in it that were none, and went out as text.
        counted_tokens: reply tokens as counted on their way to the client; a difference quarantines the turn.
    """
    row = db.execute(select(turns.c.sampling, turns.c.kind, turns.c.learn).where(turns.c.turn_id == turn_id)).one()
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
        "finished_at": time.time(),
    }
    db.execute(update(turns).where(turns.c.turn_id == turn_id).values(values))


def _why_not(row: AnyRow, finish_reason: FinishReason) -> tuple[SkipReason | None, str | None]:
    if finish_reason is FinishReason.ABORTED:
        return SkipReason.ABORTED, "The client went away before the answer was complete."
    if row.kind == "side":
        return SkipReason.SIDE_REQUEST, "The client marked this request as a side request."
    if not row.learn:
        return SkipReason.LEARNING_OFF, "Learning is off."
    if (what := Sampling.from_json(row.sampling).why_not_trainable) is not None:
        return SkipReason.SAMPLING_NOT_REPRODUCIBLE, f"The request asked for {what}."
    if finish_reason is FinishReason.LENGTH:
        return SkipReason.TRUNCATED, "The answer reached the token limit."
    return None, None


def leave_out(db: Connection, turn_ids: Sequence[int], reason: SkipReason, detail: str) -> None:
    """Close turns that will not be trained, with the reason."""
    values = {"state": TurnState.LEFT_OUT, "reason": reason, "detail": detail, "lease_until": None}
    db.execute(update(turns).where(turns.c.turn_id.in_(turn_ids)).values(values))


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
    idle = sessions.c.ended_at.is_(None) & (sessions.c.last_at < idle_before)
    return _end(db, list(db.execute(select(sessions.c.session_id).where(idle)).scalars()), "idle")


def end_session(db: Connection, session_id: int) -> None:
    """The client said that a session is over."""
    _end(db, [session_id], "done")


def _end(db: Connection, session_ids: list[int], why: str) -> int:
    now = time.time()
    db.execute(update(sessions).where(sessions.c.session_id.in_(session_ids)).values(ended_at=now, end_reason=why))
    open_ends = (turns.c.session_id.in_(session_ids)) & (turns.c.state == TurnState.FINISHED)
    said = "The client ended the session" if why == "done" else "The session went idle"
    db.execute(
        update(turns)
        .where(open_ends)
        .values(
            state=TurnState.LEFT_OUT,
            reason=SkipReason.NO_NEXT_STATE,
            detail=f"{said} and nothing had followed this answer.",
        )
    )
    return len(session_ids)


def find_session(db: Connection, user: str, key: str) -> int | None:
    found = select(sessions.c.session_id).where(sessions.c.user == user, sessions.c.key == key)
    return db.execute(found).scalar_one_or_none()


def find_by_answer(db: Connection, user: str, spine: str, session_id: int | None) -> AnyRow | None:
    """The newest turn whose conversation, answer included, has this spine; within one session if given.

    One that nothing has followed yet comes first: two conversations may begin alike, and each has its next state.
    `continued` says whether something has followed it.
    """
    continued = exists().where(next_states.c.turn_id == turns.c.turn_id)
    query = select(turns.c.turn_id, turns.c.session_id, continued.label("continued"))
    query = query.where(turns.c.user == user, turns.c.answer_spine == spine)
    if session_id is not None:
        query = query.where(turns.c.session_id == session_id)
    return db.execute(query.order_by(continued, turns.c.turn_id.desc()).limit(1)).first()


def find_by_request(db: Connection, user: str, spine: str, session_id: int | None) -> AnyRow | None:
    """The newest turn whose request has this spine; within one session if given."""
    columns = turns.c.turn_id, turns.c.session_id, turns.c.state, turns.c.reason, turns.c.parent_turn_id
    query = select(*columns).where(turns.c.user == user, turns.c.request_spine == spine)
    if session_id is not None:
        query = query.where(turns.c.session_id == session_id)
    return db.execute(query.order_by(turns.c.turn_id.desc()).limit(1)).first()


def newest_turn(db: Connection, session_id: int) -> AnyRow | None:
    """The newest finished turn of a session, for clients that name the session but rewrite its history."""
    query = select(turns.c.turn_id, turns.c.session_id).where(
        turns.c.session_id == session_id,
        turns.c.finish_reason.in_((FinishReason.STOP, FinishReason.LENGTH)),
        turns.c.kind != "side",
    )
    return db.execute(query.order_by(turns.c.turn_id.desc()).limit(1)).first()


def load_messages(db: Connection, turn_id: int) -> tuple[Message, ...]:
    """The whole conversation of a turn, its answer as the last message when there is one."""
    said = turns.c.answer, turns.c.reasoning, turns.c.tool_calls
    columns = turns.c.parent_turn_id, turns.c.messages_kept, turns.c.messages, *said
    pieces: list[Mapping[str, Any]] = []
    kept: int | None = None
    next_id: int | None = turn_id
    while next_id is not None and kept != 0:
        row = db.execute(select(*columns).where(turns.c.turn_id == next_id)).one()
        here = [*row.messages, *_answer(row)]
        # Of this turn's conversation the child keeps `kept` messages, of which `messages_kept` are further up.
        pieces = here[: None if kept is None else max(0, kept - row.messages_kept)] + pieces
        kept = row.messages_kept if kept is None else min(kept, row.messages_kept)
        next_id = row.parent_turn_id
    return tuple(pieces)


def _answer(row: AnyRow) -> list[Message]:
    """The assistant's message, if there is one yet."""
    if row.answer is None:
        return []
    message: dict[str, Any] = {"role": "assistant", "content": row.answer}
    if row.reasoning:
        message["reasoning_content"] = row.reasoning
    if row.tool_calls:
        message["tool_calls"] = row.tool_calls
    return [message]


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
