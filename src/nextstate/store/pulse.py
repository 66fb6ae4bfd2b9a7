"""Signs of life of the loops: how long work has waited, when something last came of it, what went wrong how often."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from nextstate.store.schema import events, policy_versions, turns, updates, verdicts
from nextstate.store.status import WAITS
from nextstate.types import TurnState


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    waited_s: dict[str, float]
    """By WaitReason: seconds since the oldest turn that waits so was asked; 0 where none waits."""
    turns_since_verdict: int
    """Turns asked after the newest one that has a verdict."""
    verdict_at: float | None
    """When the newest verdict was given, seconds since the epoch; None before the first."""
    trained_at: float | None
    """When the newest update was done."""
    events: dict[str, int]
    """By kind."""
    last_update: dict[str, float]
    """The numbers that the newest update that was done measured: loss terms, tokens, seconds, divergence."""
    last_gate: dict[str, float]
    """The numbers that the gate measured of the newest version that it has decided about."""


def pulse(db: Connection) -> Pulse:
    now = time.time()
    # One look-up by index for each state: the oldest turn of a state is its first.
    oldest = {
        state: db.execute(
            select(turns.c.created_at).where(turns.c.state == state).order_by(turns.c.turn_id).limit(1)
        ).scalar()
        for state in WAITS
    }
    judged = db.execute(select(func.max(verdicts.c.turn_id))).scalar() or 0
    newest_verdict = select(verdicts.c.created_at).order_by(verdicts.c.verdict_id.desc()).limit(1)
    done = select(updates.c.finished_at, updates.c.metrics).where(updates.c.state == "done")
    update = db.execute(done.order_by(updates.c.update_id.desc()).limit(1)).first()
    decided = select(policy_versions.c.gate).where(policy_versions.c.gate.is_not(None))
    gate = db.execute(decided.order_by(policy_versions.c.version.desc()).limit(1)).scalar()
    return Pulse(
        waited_s={WAITS[TurnState(state)]: 0.0 if at is None else max(0.0, now - at) for state, at in oldest.items()},
        turns_since_verdict=db.execute(
            select(func.count()).select_from(turns).where(turns.c.turn_id > judged)
        ).scalar_one(),
        verdict_at=db.execute(newest_verdict).scalar(),
        trained_at=None if update is None else update.finished_at,
        events={row[0]: row[1] for row in db.execute(select(events.c.kind, func.count()).group_by(events.c.kind))},
        last_update=_numbers(update.metrics) if update is not None else {},
        last_gate=_numbers(gate),
    )


def _numbers(measured: dict[str, Any] | None) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in (measured or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
