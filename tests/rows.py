"""Valid rows for tests; a test spells out only what it is about."""

from __future__ import annotations

from typing import Any

from nextstate.store import finding, judging, turns
from nextstate.store.store import Store
from nextstate.store.turns import NewTurn, Placement
from nextstate.types import FinishReason, Hint, Message, Sampling, Source, Verdict, Vote

QUESTION: tuple[Message, ...] = ({"role": "user", "content": "a fox?"},)


def new_turn(**changes: Any) -> NewTurn:
    place = Placement(session_id=None, session_key=None, parent_turn_id=None, kind="new", because="a test")
    fields = {
        "user": "local",
        "placement": place,
        "messages": QUESTION,
        "dialect": "chat",
        "tools": (),
        "prompt_ids": (5, 6, 7),
        "request_spine": "request",
        "sampling": Sampling(max_tokens=8),
        "learn": True,
    }
    return NewTurn(**{**fields, **changes})


def finished_turn(store: Store, *, new: NewTurn | None = None, **changes: Any) -> int:
    """A turn that was answered; its id."""
    turn_id, _, _ = store.write_now(turns.open_turn, new or new_turn())
    reply = changes.pop("reply_ids", (60, 61))
    fields = {
        "answer": {"role": "assistant", "content": "the fox"},
        "malformed_calls": 0,
        "answer_spine": f"answer {turn_id}",
        "reply_ids": reply,
        # About what the random tiny model gives any of its 379 tokens: -ln 379.
        "reply_logprobs": (-5.9,) * len(reply),
        "reply_versions": (0,) * len(reply),
        "finish_reason": FinishReason.STOP,
        "counted_tokens": len(reply),
    }
    store.write_now(turns.finish_turn, turn_id, **{**fields, **changes})
    return turn_id


def continued_turn(store: Store, *, said: str = "too long", **changes: Any) -> int:
    """A turn with a next state; its id. The request that brought it stays open."""
    user = changes.get("new", new_turn()).user
    turn_id = finished_turn(store, **changes)
    row = store.read_now(lambda db: finding.find_by_answer(db, user, f"answer {turn_id}", None))
    assert row is not None
    place = Placement(
        session_id=row.session_id,
        session_key=None,
        parent_turn_id=turn_id,
        kind="continuation",
        because="a test",
        next_state=({"role": "user", "content": said},),
        source=Source.USER,
    )
    messages = (*QUESTION, {"role": "assistant", "content": "the fox"}, {"role": "user", "content": said})
    follows = new_turn(user=user, placement=place, messages=messages, prompt_ids=(5, 6, 7, 60, 61, 9))
    store.write_now(turns.open_turn, follows)
    return turn_id


def a_verdict(turn_id: int, value: Vote | None = Vote.BAD, hint: str | None = "be brief, please") -> Verdict:
    hints = (Hint(text=hint, source=Source.USER),) if hint and value is Vote.BAD else ()
    return Verdict(turn_id=turn_id, judge="test", value=value, votes=(value,), reason="It was said.", hints=hints)


def judged_turn(store: Store, value: Vote = Vote.BAD, **changes: Any) -> int:
    """A turn that waits for an update; its id."""
    turn_id = continued_turn(store, **changes)
    assert store.write_now(judging.write_verdict, a_verdict(turn_id, value))
    return turn_id
