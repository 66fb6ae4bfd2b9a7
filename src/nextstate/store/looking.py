"""What a person looks at: sessions, turns, and what became of them.

Everything here is of one owner, newest first, and read in pages: each query is bounded by an index and a limit, however
many turns there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Text, and_, func, or_, select, type_coerce

from nextstate.store.schema import (
    feedback,
    hints,
    next_states,
    policy_versions,
    sessions,
    turns,
    updates,
    verdicts,
    votes,
)
from nextstate.store.store import AnyRow
from nextstate.types import Vote

MAX_PART_OWNERS = 50
"""Names by which one key keeps conversations apart that are listed at most."""

SEARCHED_TURNS = 5000
"""Turns that one search looks through at most; the next one goes on from there."""

FOLLOWED_TURNS = 100
"""Newest turns of a session that are looked at for changes."""


def part_owners(db: Connection, owner: str) -> list[str]:
    """The owners `owner/...`, in order, at most MAX_PART_OWNERS: one look into the index for each."""
    found: list[str] = []
    after, end = f"{owner}/", f"{owner}0"  # '0' is what follows '/'
    while len(found) < MAX_PART_OWNERS:
        bound = sessions.c.user > after
        following = db.execute(select(func.min(sessions.c.user)).where(bound, sessions.c.user < end)).scalar()
        if following is None:
            break
        found.append(following)
        after = following
    return found


def list_sessions(
    db: Connection, owner: str, *, limit: int, before: tuple[float, int] | None = None
) -> Sequence[AnyRow]:
    """Sessions of exactly this owner, the liveliest first, with `turns`, and `first_messages` of the request that each
    began with, side requests apart.

    Args:
        before: (last_at, session_id) of the last one already seen.
    """
    query = select(sessions).where(sessions.c.user == owner)
    if before is not None:
        at, number = before
        earlier = and_(sessions.c.last_at == at, sessions.c.session_id < number)
        query = query.where(sessions.c.last_at <= at, or_(sessions.c.last_at < at, earlier))
    page = query.order_by(sessions.c.last_at.desc(), sessions.c.session_id.desc()).limit(limit).subquery()
    of_session = turns.alias()
    count = select(func.count()).where(of_session.c.session_id == page.c.session_id).correlate(page).scalar_subquery()
    first = (
        select(of_session.c.turn_id)
        .where(of_session.c.session_id == page.c.session_id, of_session.c.kind != "side")
        .order_by(of_session.c.turn_id)
        .limit(1)
        .correlate(page)
        .scalar_subquery()
    )
    shown = select(page, count.label("turns"), turns.c.messages.label("first_messages")).join_from(
        page, turns, turns.c.turn_id == first, isouter=True
    )
    return db.execute(shown.order_by(page.c.last_at.desc(), page.c.session_id.desc())).all()


def show_session(db: Connection, session_id: int) -> AnyRow | None:
    return db.execute(select(sessions).where(sessions.c.session_id == session_id)).first()


_SHOWN = (
    *(turns.c.turn_id, turns.c.session_id, turns.c.user, turns.c.parent_turn_id, turns.c.kind, turns.c.dialect),
    *(turns.c.placed_because, turns.c.state, turns.c.reason, turns.c.detail, turns.c.learn, turns.c.messages_kept),
    *(turns.c.messages, turns.c.answer, turns.c.reasoning, turns.c.tool_calls, turns.c.sampling),
    *(turns.c.prompt_tokens, turns.c.reply_versions, turns.c.reply_tokens, turns.c.finish_reason),
    *(turns.c.created_at, turns.c.finished_at, turns.c.update_id),
    sessions.c.key.label("session"),
    updates.c.version.label("trained_version"),
    policy_versions.c.state.label("trained_version_state"),
)


def list_turns(db: Connection, which: ColumnElement[bool], *, limit: int) -> Sequence[AnyRow]:
    """Turns, newest first, with their session's key, and the version that came of them with its state."""
    query = (
        select(*_SHOWN)
        .join_from(turns, sessions)
        .outerjoin(updates, updates.c.update_id == turns.c.update_id)
        .outerjoin(policy_versions, policy_versions.c.version == updates.c.version)
    )
    return db.execute(query.where(which).order_by(turns.c.turn_id.desc()).limit(limit)).all()


def session_turns(db: Connection, session_id: int, *, limit: int, before: int | None = None) -> Sequence[AnyRow]:
    """The newest turns of a session; `before` pages on."""
    which = turns.c.session_id == session_id
    return list_turns(db, which if before is None else which & (turns.c.turn_id < before), limit=limit)


def turns_in(db: Connection, state: str, reason: str | None, *, limit: int) -> Sequence[AnyRow]:
    """The newest turns in a state, for a reason, whoever's they are."""
    return list_turns(db, and_(turns.c.state == state, turns.c.reason == reason), limit=limit)


def states(db: Connection, session_id: int) -> list[tuple[int, str, str | None]]:
    """(turn, state, reason) of the newest FOLLOWED_TURNS of a session, newest first: all that changes by itself."""
    query = select(turns.c.turn_id, turns.c.state, turns.c.reason).where(turns.c.session_id == session_id)
    newest = query.order_by(turns.c.turn_id.desc()).limit(FOLLOWED_TURNS)
    return [(row.turn_id, row.state, row.reason) for row in db.execute(newest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTurn:
    """A verdict with what it rests on."""

    judge: str
    value: Vote | None
    reason: str
    created_at: float
    votes: tuple[Vote | None, ...]
    hints: tuple[tuple[str, str], ...]
    """Text and source, most trusted first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about how good a turn was."""

    next_state: AnyRow | None
    """source, messages and from_turn_id."""
    feedback: tuple[AnyRow, ...]
    """value, words and created_at, oldest first."""
    verdicts: tuple[JudgedTurn, ...]
    """Oldest first; the newest counts."""


def evidence(db: Connection, turn_ids: Iterable[int]) -> dict[int, Evidence]:
    """Next state, feedback and verdicts of turns, by turn id."""
    ids = list(turn_ids)
    followed = {row.turn_id: row for row in db.execute(select(next_states).where(next_states.c.turn_id.in_(ids)))}
    said: dict[int, list[AnyRow]] = {turn_id: [] for turn_id in ids}
    for row in db.execute(select(feedback).where(feedback.c.turn_id.in_(ids)).order_by(feedback.c.feedback_id)):
        said[row.turn_id].append(row)
    given = db.execute(select(verdicts).where(verdicts.c.turn_id.in_(ids)).order_by(verdicts.c.verdict_id)).all()
    of_verdicts = [row.verdict_id for row in given]
    cast: dict[int, list[Vote | None]] = {number: [] for number in of_verdicts}
    for row in db.execute(select(votes).where(votes.c.verdict_id.in_(of_verdicts)).order_by(votes.c.n)):
        cast[row.verdict_id].append(None if row.value is None else Vote(row.value))
    hinted: dict[int, list[tuple[str, str]]] = {number: [] for number in of_verdicts}
    for row in db.execute(select(hints).where(hints.c.verdict_id.in_(of_verdicts)).order_by(hints.c.n)):
        hinted[row.verdict_id].append((row.text, row.source))
    judged: dict[int, list[JudgedTurn]] = {turn_id: [] for turn_id in ids}
    for row in given:
        judged[row.turn_id].append(
            JudgedTurn(
                judge=row.judge,
                value=None if row.value is None else Vote(row.value),
                reason=row.reason,
                created_at=row.created_at,
                votes=tuple(cast[row.verdict_id]),
                hints=tuple(hinted[row.verdict_id]),
            )
        )
    return {
        turn_id: Evidence(
            next_state=followed.get(turn_id),
            feedback=tuple(said[turn_id]),
            verdicts=tuple(judged[turn_id]),
        )
        for turn_id in ids
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTurn:
    turn_id: int
    session_id: int
    created_at: float
    text: str
    """The answer, else the message, that holds the words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one search has found."""

    turns: tuple[FoundTurn, ...]
    """Newest first."""
    searched_to: int | None
    """Before this turn the next search goes on; None: there is nothing before it."""


def search(db: Connection, owner: str, words: str, *, before: int | None, limit: int) -> Found:
    """Turns of exactly this owner in whose answer or new messages some words occur, among SEARCHED_TURNS turn ids.

    Small and capital letters are the same; beyond ASCII, in messages, only as far as the database's stored form of them
    goes: there the words must be written as they were.
    """
    newest = db.execute(select(func.max(turns.c.turn_id))).scalar() or 0
    last = newest if before is None else min(newest, before - 1)
    first = max(1, last - SEARCHED_TURNS + 1)
    as_stored = json.dumps(words)[1:-1]  # beyond ASCII as \\uXXXX
    in_messages = type_coerce(turns.c.messages, Text).contains(as_stored, autoescape=True)
    query = (
        select(turns.c.turn_id, turns.c.session_id, turns.c.created_at, turns.c.answer, turns.c.messages)
        .where(turns.c.turn_id.between(first, last), turns.c.user == owner)
        .where(or_(turns.c.answer.contains(words, autoescape=True), in_messages))
        .order_by(turns.c.turn_id.desc())
    )
    found: list[FoundTurn] = []
    for row in db.execute(query):
        texts = (row.answer or "", *map(_text, row.messages))
        text = next((text for text in texts if words.casefold() in text.casefold()), None)
        if text is None:
            continue  # the words are only in what surrounds the messages' texts, such as "role"
        found.append(FoundTurn(turn_id=row.turn_id, session_id=row.session_id, created_at=row.created_at, text=text))
        if len(found) == limit:
            return Found(turns=tuple(found), searched_to=row.turn_id)
    return Found(turns=tuple(found), searched_to=first if first > 1 else None)


def _text(message: Mapping[str, object]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
