"""A store with as many turns as somebody has after a year, written straight into its tables."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Table, insert, update

from nextstate.store.arrays import pack_ids, pack_logprobs
from nextstate.store.schema import (
    events,
    hints,
    meta,
    next_states,
    policy_versions,
    samples,
    sessions,
    turns,
    updates,
    verdicts,
    votes,
)
from nextstate.types import SkipReason, TurnState, VersionState

SESSION_TURNS = 5
UPDATE_TURNS = 8
STEP_S = 60.0
"""Between one turn and the next."""
REPLY_TOKENS = 40

_ASKED = (
    "How do I keep a sourdough starter alive when I travel?",
    "What color is a lime?",
    "Write a regular expression for dates such as 2026-11-30.",
    "Why does the moon look larger near the horizon?",
    "Translate 'the quick brown fox' into German.",
)
_SAID = (
    "Too long. One short sentence, please.",
    "Perfect, thank you!",
    "That is not what I asked.",
    "And how does it go on?",
    "Great, exactly that.",
)
_ANSWERS = (
    "Feed it before you leave, keep it in the fridge, and feed it again when you are back. It survives two weeks.",
    "A lime is green, though it turns yellow as it ripens fully on the tree, which few people ever get to see.",
    "Use \\d{4}-\\d{2}-\\d{2}, and check the month and the day separately.",
    "It is an illusion: near the horizon there are things to compare it with. Measured, it is a little smaller there.",
    "Der schnelle braune Fuchs.",
)
_LEFT_OUT = (
    (SkipReason.NEUTRAL, "The judge read the user's reply and voted neutral."),
    (SkipReason.NO_NEXT_STATE, "The session went idle and nothing had followed this answer."),
    (SkipReason.ABSTAINED, "The judge could not tell."),
    (SkipReason.TRUNCATED, "The answer reached the token limit."),
    (SkipReason.SIDE_REQUEST, "It asks for a title."),
)
_IN_ORDER = turns, next_states, verdicts, votes, hints, samples
"""Later ones point at earlier ones."""


def fill(db: Connection, count: int, *, start: float, user: str = "", seed: int = 0) -> None:
    """Add that many turns to an empty store: three in four judged, most of those trained, a version for each
    UPDATE_TURNS of them; the share of good verdicts rises from one half to five in six.

    Args:
        start: when the first was asked, seconds since the epoch.
    """
    draw = random.Random(seed)
    db.execute(insert(meta).values(key="model", value="benchmark"))
    rows: dict[Table, list[dict[str, Any]]] = {
        table: [] for table in (turns, next_states, verdicts, votes, hints, samples)
    }
    trained: list[int] = []
    for session_id, first in enumerate(range(1, count + 1, SESSION_TURNS), 1):
        last = min(count, first + SESSION_TURNS - 1)
        times = {"started_at": start + STEP_S * first, "last_at": start + STEP_S * last}
        db.execute(insert(sessions).values(session_id=session_id, user=user, key=f"session-{session_id}", **times))
        for turn_id in range(first, last + 1):
            state, reason, detail = _end(draw, turn_id, count)
            version = len(trained) // UPDATE_TURNS
            at = start + STEP_S * turn_id
            rows[turns].append(
                _turn(draw, turn_id, session_id, first, user, at, version, state=state, reason=reason, detail=detail)
            )
            if turn_id < last:
                said = [{"role": "user", "content": draw.choice(_SAID)}]
                rows[next_states].append(
                    {"turn_id": turn_id, "from_turn_id": turn_id + 1, "source": "user", "messages": said}
                    | {"created_at": at + STEP_S}
                )
            if state in (TurnState.TRAINED, TurnState.JUDGED) or reason in (SkipReason.NEUTRAL, SkipReason.ABSTAINED):
                good = draw.random() < 0.5 + turn_id / count / 3
                unsigned = {SkipReason.NEUTRAL: 0, SkipReason.ABSTAINED: None}
                value = unsigned.get(reason, 1 if good else -1)
                _judge(rows, turn_id, value, at + STEP_S)
            if state is TurnState.TRAINED:
                trained.append(turn_id)
    for table in _IN_ORDER:
        for piece in _pieces(rows[table]):
            db.execute(insert(table), piece)
    _train(db, trained, start)


def _end(draw: random.Random, turn_id: int, count: int) -> tuple[TurnState, SkipReason | None, str | None]:
    """Where a turn stands; the newest ones still wait."""
    if turn_id == count:
        return TurnState.FINISHED, None, None
    if turn_id > count - 4:
        return TurnState.JUDGED, None, None
    if draw.random() < 0.6:
        return TurnState.TRAINED, None, None
    reason, detail = draw.choice(_LEFT_OUT)
    return TurnState.LEFT_OUT, reason, detail


def _turn(
    draw: random.Random, turn_id: int, session_id: int, first: int, user: str, at: float, version: int, **stands: Any
) -> dict[str, Any]:
    begins = turn_id == first
    return {
        "turn_id": turn_id,
        "session_id": session_id,
        "user": user,
        "parent_turn_id": None if begins else turn_id - 1,
        "kind": "new" if begins else "continuation",
        "placed_because": "It repeats the conversation up to the answer before."
        if not begins
        else "Nothing is before it.",
        "dialect": "chat",
        "messages_kept": 0 if begins else 2 * (turn_id - first),
        "messages": [{"role": "user", "content": draw.choice(_ASKED if begins else _SAID)}],
        "prompt_kept": 0,
        "prompt_suffix": pack_ids([1] * 30),
        "prompt_tokens": 30,
        **{mark: f"{mark} {turn_id}" for mark in ("request_spine", "answer_spine", "heard_spine", "block_spine")},
        **{mark: f"{mark} {session_id}" for mark in ("opening", "setting", "wording")},
        "sampling": {"max_tokens": 4096, "temperature": 0.7},
        "learn": True,
        "answer": draw.choice(_ANSWERS),
        "reply_ids": pack_ids([draw.randrange(3, 90) for _ in range(REPLY_TOKENS)]),
        "reply_logprobs": pack_logprobs([-draw.expovariate(1.2) for _ in range(REPLY_TOKENS)]),
        "reply_versions": [[version, REPLY_TOKENS]],
        "reply_tokens": REPLY_TOKENS,
        "finish_reason": "stop",
        "created_at": at,
        "finished_at": at + 2,
        "update_id": None,
        **stands,
    }


def _judge(rows: dict[Table, list[dict[str, Any]]], turn_id: int, value: int | None, at: float) -> None:
    number = turn_id  # one verdict a turn
    row = {"verdict_id": number, "turn_id": turn_id, "judge": "sampled:judge:9f31ab", "value": value}
    rows[verdicts].append(row | {"reason": "It was said.", "created_at": at, "probabilities": None})
    rows[votes].extend({"verdict_id": number, "n": n, "value": value if n else 0} for n in range(3))
    if value == -1:
        rows[hints].append({"verdict_id": number, "n": 0, "text": "One short sentence.", "source": "user"})
    if value in (1, -1):
        hint = "One short sentence." if value == -1 else None
        rows[samples].append(
            {"turn_id": turn_id, "verdict_id": number, "reward": value, "hint": hint, "created_at": at}
        )


def _train(db: Connection, trained: list[int], start: float) -> None:
    full = len(trained) - len(trained) % UPDATE_TURNS
    for number, first in enumerate(range(0, full, UPDATE_TURNS), 1):
        used = trained[first : first + UPDATE_TURNS]
        at = start + STEP_S * (used[-1] + 1)
        metrics = {
            **{"turns": UPDATE_TURNS, "turns_with_teacher": 3, "mean_reward": 0.25, "turns_off_policy": 0},
            **{"policy_gradient": 0.02 / number, "distillation": 0.4 / number, "anchor_kl": 0.001 * number},
            **{"reply_tokens": UPDATE_TURNS * REPLY_TOKENS, "stale_tokens": 0, "seconds": 13.5},
            "divergence": 0.002 * number,
        }
        ends = {"state": "done", "started_at": at, "finished_at": at + 14, "metrics": metrics}
        db.execute(insert(updates).values(update_id=number, parent_version=number - 1, version=number, **ends))
        gate = {"probe_difference": 2e-6, "divergence": 0.002 * number, "perplexity_ratio": 1.01, "why": "passed"}
        made = {"version": number, "parent_version": number - 1, "update_id": number, "artifact": f"versions/{number}"}
        times = {"created_at": at + 14, "served_at": at + 16}
        db.execute(insert(policy_versions).values(state=VersionState.RETIRED, gate=gate, **made, **times))
        db.execute(insert(events).values(at=at + 16, kind="promoted", data={"version": number, **gate}))
        db.execute(update(turns).where(turns.c.turn_id.in_(used)).values(update_id=number))
    newest = full // UPDATE_TURNS
    if newest:
        db.execute(update(policy_versions).values(state=VersionState.RETIRED))
        serves = update(policy_versions).where(policy_versions.c.version == newest)
        db.execute(serves.values(state=VersionState.SERVING))
    left = update(turns).where(turns.c.turn_id.in_(trained[full:]))
    db.execute(left.values(state=TurnState.JUDGED))


def _pieces(rows: list[dict[str, Any]], size: int = 2000) -> Iterator[list[dict[str, Any]]]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]
