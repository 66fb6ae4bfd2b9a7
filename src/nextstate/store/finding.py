"""Look-ups of sessions and turns by what `collect` knows of a request. Each is bounded, and served by an index."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, bindparam, exists, select

from nextstate.store.schema import next_states, sessions, turns
from nextstate.store.store import AnyRow
from nextstate.store.turns import OWN_KEY
from nextstate.types import FinishReason, Message


def find_session(db: Connection, user: str, key: str) -> int | None:
    found = select(sessions.c.session_id).where(sessions.c.user == user, sessions.c.key == key)
    return db.execute(found).scalar_one_or_none()


MAX_FOUND = 8
"""Turns that one look-up returns at most: a million conversations may begin with the same words."""


def find_turns(
    db: Connection,
    user: str,
    session_id: int | None,
    setting: str,
    *,
    answer_spine: str | None = None,
    request_spine: str | None = None,
    heard_spine: str | None = None,
    block_spine: str | None = None,
    opening: str | None = None,
    trace: str | None = None,
) -> list[AnyRow]:
    """Turns of a user by one of their marks, within one session if given; the likeliest first, at most MAX_FOUND.

    Of conversations that look the same, one that began in the same setting comes first, then one that nothing has
    followed yet (unless a request is looked for), then the newest. Rows have turn_id, session_id, parent_turn_id, kind,
    state, reason, setting, wording, answer, tool_calls, created_at, finished_at, finish_reason, and `continued`:
    whether it has a next state.
    """
    given = {
        "answer_spine": answer_spine,
        "request_spine": request_spine,
        "heard_spine": heard_spine,
        "block_spine": block_spine,
        "opening": opening,
        "trace": trace,
    }
    ((mark, value),) = [(name, value) for name, value in given.items() if value is not None]
    query = _likeliest(mark, in_session=session_id is not None, by_age=mark == "request_spine")
    of = {} if session_id is None else {"of_session": session_id}
    return list(db.execute(query, {"of_user": user, "value": value, "near": setting, **of}))


@cache
def _likeliest(mark: str, *, in_session: bool, by_age: bool) -> Select[Any]:
    """The query of `find_turns`, built once: to build it takes longer than to run it."""
    query = select(*_FOUND, _CONTINUED).where(turns.c.user == bindparam("of_user"), turns.c[mark] == bindparam("value"))
    if in_session:
        query = query.where(turns.c.session_id == bindparam("of_session"))
    # The newest are enough: an older twin that nobody has continued for so long is no likelier than they are.
    newest = query.order_by(turns.c.turn_id.desc()).limit(_MAX_SEEN).subquery()
    ranked = select(newest).order_by(
        newest.c.setting != bindparam("near"), *(() if by_age else (newest.c.continued,)), newest.c.turn_id.desc()
    )
    return ranked.limit(MAX_FOUND)


_MAX_SEEN = 64
_CONTINUED = exists().where(next_states.c.turn_id == turns.c.turn_id).label("continued")
_FOUND = (
    turns.c.turn_id,
    turns.c.session_id,
    turns.c.parent_turn_id,
    turns.c.kind,
    turns.c.state,
    turns.c.reason,
    turns.c.setting,
    turns.c.wording,
    turns.c.answer,
    turns.c.tool_calls,
    turns.c.created_at,
    turns.c.finished_at,
    turns.c.finish_reason,
)


def find_turn(db: Connection, user: str, turn_id: int) -> AnyRow | None:
    """A turn of this user by its id; the columns of `find_turns`."""
    query = _likeliest("turn_id", in_session=False, by_age=True)
    return db.execute(query, {"of_user": user, "value": turn_id, "near": ""}).first()


def find_by_answer(db: Connection, user: str, spine: str, session_id: int | None) -> AnyRow | None:
    """The likeliest turn whose conversation, answer included, has this spine."""
    found = find_turns(db, user, session_id, "", answer_spine=spine)
    return found[0] if found else None


def newest_turn(db: Connection, session_id: int) -> AnyRow | None:
    """The newest finished turn of a session, for clients that name the session but rewrite its history."""
    query = select(*_FOUND, _CONTINUED).where(
        turns.c.session_id == session_id,
        turns.c.finish_reason.in_((FinishReason.STOP, FinishReason.LENGTH)),
        turns.c.kind != "side",
    )
    return db.execute(query.order_by(turns.c.turn_id.desc()).limit(1)).first()


def recent_turns(db: Connection, user: str, *, side: bool = False) -> list[AnyRow]:
    """The newest turn of each of a user's MAX_FOUND liveliest sessions, liveliest first: the newest side request, or
    the newest that is none.

    Rows have the columns of `find_turns`, and `messages` and `last_at`.
    """
    return list(db.execute(_of_liveliest(side=side), {"of_user": user}))


@cache
def _of_liveliest(*, side: bool) -> Select[Any]:
    """The query of `recent_turns`, built once."""
    liveliest = select(sessions.c.session_id, sessions.c.last_at).where(sessions.c.user == bindparam("of_user"))
    live = liveliest.order_by(sessions.c.last_at.desc()).limit(MAX_FOUND).subquery()
    of_session = turns.alias()
    newest = (
        select(of_session.c.turn_id)
        .where(of_session.c.session_id == live.c.session_id, (of_session.c.kind == "side") == side)
        .order_by(of_session.c.turn_id.desc())
        .limit(1)
        .scalar_subquery()
    )
    query = select(*_FOUND, _CONTINUED, turns.c.messages, live.c.last_at).join_from(
        live, turns, turns.c.turn_id == newest
    )
    return query.order_by(live.c.last_at.desc())


def waiting_turns(db: Connection, session_id: int) -> list[AnyRow]:
    """Of the newest turns of a session those whose tool calls nothing has answered yet, newest first; the columns of
    `find_turns`."""
    query = select(*_FOUND, _CONTINUED).where(turns.c.session_id == session_id, turns.c.kind != "side")
    newest = db.execute(query.order_by(turns.c.turn_id.desc()).limit(_MAX_SEEN))
    return [row for row in newest if row.tool_calls and not row.continued]


def newest_turns(db: Connection, session_id: int) -> list[AnyRow]:
    """The newest MAX_FOUND turns of a session, newest first, without side requests; the columns of `find_turns`."""
    query = select(*_FOUND, _CONTINUED).where(turns.c.session_id == session_id, turns.c.kind != "side")
    return list(db.execute(query.order_by(turns.c.turn_id.desc()).limit(MAX_FOUND)))


def followers(db: Connection, row: AnyRow) -> list[AnyRow] | None:
    """What followed a turn's answer, newest first, without side requests; the columns of `find_turns` and `messages`.

    None when that began further back than is looked: among the newest turns of a session only.
    """
    query = select(*_FOUND, _CONTINUED, turns.c.messages).where(turns.c.session_id == row.session_id)
    newest = list(db.execute(query.order_by(turns.c.turn_id.desc()).limit(_MAX_SEEN)))
    if len(newest) == _MAX_SEEN and newest[-1].turn_id > row.turn_id:
        return None
    return [child for child in newest if child.parent_turn_id == row.turn_id and child.kind != "side"]


def load_next_state(db: Connection, turn_id: int) -> tuple[int, tuple[Message, ...]] | None:
    """The request that brought a turn its next state, and that state; None when it has none."""
    columns = next_states.c.from_turn_id, next_states.c.messages
    row = db.execute(select(*columns).where(next_states.c.turn_id == turn_id)).first()
    return None if row is None else (row.from_turn_id, tuple(row.messages))


def waits_for_its_conversation(db: Connection, session_id: int) -> bool:
    """Whether a session has no name of the client's and nothing but side requests: a title that came first."""
    named = select(sessions.c.session_id).where(
        sessions.c.session_id == session_id, sessions.c.key.not_like(f"{OWN_KEY}%")
    )
    main = select(turns.c.turn_id).where(turns.c.session_id == session_id, turns.c.kind != "side")
    return db.execute(named).first() is None and db.execute(main.limit(1)).first() is None


def first_messages(db: Connection, session_id: int) -> tuple[Message, ...]:
    """The messages of the request that a session began with, side requests apart."""
    query = select(turns.c.messages).where(turns.c.session_id == session_id, turns.c.kind != "side")
    return tuple(db.execute(query.order_by(turns.c.turn_id).limit(1)).scalar_one_or_none() or ())
