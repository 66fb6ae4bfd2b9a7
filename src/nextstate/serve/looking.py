"""GET /api/...: what the page shows beside the chat, for any other program as well; see docs/page.md.

Texts are the caller's own; another's turn or session is the same 404 as none. Numbers are the server's, as in /metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sqlalchemy import Connection, func, select

from nextstate.report import account, charts
from nextstate.report.outcome import count_votes, outcome
from nextstate.report.reasons import explanations
from nextstate.serve.auth import Caller, caller, owner, owns
from nextstate.serve.errors import ApiError
from nextstate.serve.services import Services
from nextstate.store import learning, looking, status, turns, watching
from nextstate.store.schema import events, updates
from nextstate.store.schema import turns as turns_table
from nextstate.store.store import AnyRow
from nextstate.types import TurnState, Vote

Limit = Annotated[int, Query(ge=1, le=100)]
Number = Annotated[int, Query(ge=0, lt=2**63)]
User = Annotated[str | None, Query(max_length=256)]


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/api")
    read = services.store.read

    @routes.get("/me")
    async def me(request: Request) -> dict[str, Any]:
        """Who asks, and whom they talk to."""
        who = caller(request)
        return {
            "user": who.user,
            "key": who.key_name,
            "learned_from": services.learning and who.learn,
            "model": services.engine.loaded.name,
            "version": await read(learning.serving_version),
            "max_tokens": services.config.serve.max_tokens,
            "users": [found.partition("/")[2] for found in await read(looking.part_owners, owner(who, None))],
        }

    @routes.get("/sessions")
    async def sessions(
        request: Request, user: User = None, before: str | None = None, limit: Limit = 30
    ) -> dict[str, Any]:
        """The caller's sessions, the liveliest first; of one `user` of the key, those of that one."""
        rows = await read(looking.list_sessions, owner(caller(request), user), limit=limit, before=_cursor(before))
        more = f"{rows[-1].last_at!r},{rows[-1].session_id}" if len(rows) == limit else None
        return {"sessions": [_session(row) for row in rows], "before": more}

    @routes.get("/sessions/{session_id}")
    async def session(request: Request, session_id: int, before: Number | None = None, limit: Limit = 50) -> Any:
        """A session's newest turns, oldest of them first, each with what became of it."""
        return await read(_show_session, caller(request), session_id, before, limit)

    @routes.get("/sessions/{session_id}/changes")
    async def changes(request: Request, session_id: int, seen: str | None = None) -> Any:
        """Where a session's newest turns stand; nothing but the cursor if that is what `seen` has seen."""
        return await read(_changes, caller(request), session_id, seen)

    @routes.get("/turns/{turn_id}")
    async def turn(request: Request, turn_id: int) -> dict[str, Any]:
        """One turn with all that is known about it."""
        return await read(_show_turn, caller(request), turn_id)

    @routes.get("/turns/{turn_id}/tokens")
    async def tokens(request: Request, turn_id: int) -> dict[str, Any]:
        """What was sampled, token by token."""
        found = await read(_load_tokens, caller(request), turn_id)
        decode = services.engine.loaded.tokenizer.decode
        sampled = zip(found.reply_ids, found.reply_logprobs, found.reply_versions, strict=True)
        return {
            "turn_id": turn_id,
            "temperature": found.temperature,
            "tokens": [
                {"id": id_, "text": decode([id_]), "logprob": logprob, "version": version}
                for id_, logprob, version in sampled
            ],
        }

    @routes.get("/search")
    async def search(
        request: Request,
        words: Annotated[str, Query(min_length=1, max_length=200)],
        user: User = None,
        before: Number | None = None,
        limit: Limit = 30,
    ) -> dict[str, Any]:
        """The caller's turns that hold some words, newest first, a bounded piece of the store at a time."""
        found = await read(looking.search, owner(caller(request), user), words, before=before, limit=limit)
        return {
            "turns": [
                {
                    "turn_id": one.turn_id,
                    "session_id": one.session_id,
                    "created_at": one.created_at,
                    "text": _around(one.text, words),
                }
                for one in found.turns
            ],
            "before": found.searched_to,
        }

    @routes.get("/learning")
    async def learned(request: Request, seen: str | None = None) -> dict[str, Any]:
        """The account of what was learned, of the newest versions and verdicts; as for changes, with a cursor."""
        who = caller(request)
        cursor = await read(_learning_cursor)
        if cursor == seen:
            return {"cursor": cursor}
        made = await read(account.account, newest=True, whose=lambda user: owns(who, user))
        chart = charts.as_json(charts.satisfaction_chart(made.satisfaction, made.marks))
        return {"cursor": cursor, "chart": chart, **account.as_json(made)}

    @routes.get("/versions/{version}")
    async def show_version(request: Request, version: int) -> dict[str, Any]:
        """One version: how many turns it was trained on, which of them are the caller's, and its history."""
        return await read(_show_version, caller(request), version)

    return routes


def _cursor(before: str | None) -> tuple[float, int] | None:
    if before is None:
        return None
    at, _, number = before.partition(",")
    try:
        return float(at), int(number)
    except ValueError as error:
        raise ApiError(400, "'before' is what an answer gave as 'before'.", param="before") from error


def _no(what: str, number: int) -> ApiError:
    return ApiError(404, f"There is no {what} {number}.", code=f"{what}_not_found")


def _own_session(db: Connection, who: Caller, session_id: int) -> AnyRow:
    row = looking.show_session(db, session_id) if 0 <= session_id < 2**63 else None
    if row is None or not owns(who, row.user):
        raise _no("session", session_id)
    return row


def _own_turn(db: Connection, who: Caller, turn_id: int) -> AnyRow:
    found = looking.list_turns(db, turns_table.c.turn_id == turn_id, limit=1) if 0 <= turn_id < 2**63 else ()
    if not found or not owns(who, found[0].user):
        raise _no("turn", turn_id)
    return found[0]


def _session(row: AnyRow) -> dict[str, Any]:
    said = (m["content"] for m in row.first_messages or () if m["role"] == "user" and m.get("content"))
    return {
        "session_id": row.session_id,
        "key": row.key,
        "title": _short(next(said, "")),
        "turns": row.turns,
        "started_at": row.started_at,
        "last_at": row.last_at,
        "ended_at": row.ended_at,
    }


def _show_session(db: Connection, who: Caller, session_id: int, before: int | None, limit: int) -> dict[str, Any]:
    row = _own_session(db, who, session_id)
    found = looking.session_turns(db, session_id, limit=limit, before=before)
    known = looking.evidence(db, [turn.turn_id for turn in found])
    return {
        "session_id": session_id,
        "key": row.key,
        "ended_at": row.ended_at,
        "turns": [_turn(turn, known[turn.turn_id]) for turn in reversed(found)],
        "before": found[-1].turn_id if len(found) == limit else None,
        "cursor": _digest(looking.states(db, session_id)),
    }


def _changes(db: Connection, who: Caller, session_id: int, seen: str | None) -> dict[str, Any]:
    _own_session(db, who, session_id)
    found = looking.states(db, session_id)
    cursor, version = _digest(found), learning.serving_version(db)
    if cursor == seen:
        return {"cursor": cursor, "version": version, "turns": None}
    standing = [{"turn_id": turn_id, "state": state, "reason": reason} for turn_id, state, reason in found]
    return {"cursor": cursor, "version": version, "turns": standing}


def _digest(found: Sequence[tuple[Any, ...]]) -> str:
    return sha256(repr(found).encode()).hexdigest()[:16]


def _show_turn(db: Connection, who: Caller, turn_id: int) -> dict[str, Any]:
    row = _own_turn(db, who, turn_id)
    return _turn(row, looking.evidence(db, [turn_id])[turn_id]) | {"conversation": turns.load_messages(db, turn_id)}


def _load_tokens(db: Connection, who: Caller, turn_id: int) -> Any:
    _own_turn(db, who, turn_id)
    return turns.load_turn(db, turn_id)


_NAMES = {Vote.GOOD: "good", Vote.NEUTRAL: "neutral", Vote.BAD: "bad", None: "abstained"}


def _turn(row: AnyRow, known: looking.Evidence) -> dict[str, Any]:
    version = row.trained_version if row.state == TurnState.TRAINED else None
    stands = outcome(row.state, row.reason, version=version, version_state=row.trained_version_state)
    names = [
        *("turn_id", "session_id", "parent_turn_id", "kind", "dialect", "placed_because", "state", "reason", "detail"),
        *("learn", "messages_kept", "messages", "answer", "reasoning", "tool_calls", "finish_reason"),
        *("prompt_tokens", "reply_tokens", "reply_versions", "created_at", "finished_at"),
    ]
    followed = known.next_state
    return {
        **{name: getattr(row, name) for name in names},
        "outcome": {
            "tone": stands.tone,
            "headline": stands.headline,
            "reason": stands.reason,
            "explanation": explanations()[stands.reason] if stands.reason else None,
        },
        "version": version,
        "next_state": None
        if followed is None
        else {"source": followed.source, "messages": followed.messages, "turn_id": followed.from_turn_id},
        "feedback": [{"value": _NAMES[Vote(one.value)], "words": one.words} for one in known.feedback],
        "verdicts": [
            {
                "value": _NAMES[one.value],
                "judge": one.judge,
                "reason": one.reason,
                "votes": count_votes(one.votes),
                "hints": [{"text": text, "source": source} for text, source in one.hints],
            }
            for one in known.verdicts
        ],
    }


def _learning_cursor(db: Connection) -> str:
    """Changes with every verdict, update, event and turn."""
    newest = [
        db.execute(select(func.max(column))).scalar()
        for column in (turns_table.c.turn_id, updates.c.update_id, events.c.event_id)
    ]
    return _digest([(*watching.newest_signal(db), *newest)])


def _show_version(db: Connection, who: Caller, version: int) -> dict[str, Any]:
    found = status.show_version(db, version) if 0 <= version < 2**63 else None
    if found is None:
        raise _no("version", version)
    used = [turn.turn_id for turn in found.turns]
    own = [row for row in looking.list_turns(db, turns_table.c.turn_id.in_(used), limit=100) if owns(who, row.user)]
    rewards = {turn.turn_id: turn.reward for turn in found.turns}
    return {
        "version": version,
        "turns": len(used),
        "own_turns": [
            {
                "turn_id": row.turn_id,
                "session_id": row.session_id,
                "state": row.state,
                "reason": row.reason,
                "verdict": {1: "good", -1: "bad", None: None}[rewards[row.turn_id]],
                "asked": account.example(row).asked,
                "answer": account.example(row).answer,
            }
            for row in reversed(own)
        ],
        "history": [{"at": event.at, "kind": event.kind} for event in found.history],
    }


def _short(text: str, most: int = 80) -> str:
    words = " ".join(text[: 4 * most].split())
    return words if len(words) <= most else words[: most - 1] + "…"


def _around(text: str, words: str, letters: int = 60) -> str:
    """The part of a text where some words first stand."""
    at = max(0, text.casefold().find(words.casefold()))
    start, end = max(0, at - letters), at + len(words) + letters
    return f"{'…' if start else ''}{' '.join(text[start:end].split())}{'…' if end < len(text) else ''}"
