"""What a person asks first: how many turns, where they stand, and why the rest were not trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, Connection, Select, func, or_, select

from nextstate.store.forgetting import NOBODY, marked_versions
from nextstate.store.judging import judge_against_feedback, judge_left_alone
from nextstate.store.learning import serving_version
from nextstate.store.schema import (
    events,
    next_states,
    policy_versions,
    samples,
    sessions,
    turns,
    updates,
    verdicts,
)
from nextstate.store.steering import paused_since
from nextstate.store.store import AnyRow
from nextstate.types import SkipReason, TurnState, VersionState, WaitReason

WAITS: dict[str, WaitReason] = {
    TurnState.GENERATING: WaitReason.BEING_ANSWERED,
    TurnState.FINISHED: WaitReason.NOTHING_FOLLOWED_YET,
    TurnState.CONTINUED: WaitReason.WAITS_FOR_JUDGE,
    TurnState.JUDGED: WaitReason.WAITS_FOR_UPDATE,
    TurnState.TRAINING: WaitReason.IN_UPDATE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    version: int
    sessions: int
    turns: int
    trained: int
    waiting: dict[str, int]
    """By WaitReason: they may still be trained."""
    left_out: dict[str, int]
    """By SkipReason: they will not be."""
    verdicts: dict[str, int]
    """good, neutral, bad, abstained."""
    updates: dict[str, int]
    """By state."""
    rolled_back: tuple[int, ...]
    """Versions that the watch took back."""
    marked: tuple[int, ...]
    """Versions made with turns that were forgotten since, or built on such ones."""
    paused_since: float | None
    """Since when nothing is trained or published, seconds since the epoch; None: learning is not paused."""
    not_learning: str | None = None
    """Why the trainer does not run, where it fits into no memory; None: that is not so."""
    judge_left_alone_since: float | None = None
    """Seconds since the epoch, where the judge failed so often that it is only tried now and then; None: it is not."""
    judge_against_feedback: dict[str, int] = field(default_factory=dict)
    """Turns on which people gave feedback and the judge had given a verdict of its own: 'right', 'wrong', 'opposite'
    (among the wrong), 'abstained'."""

    @property
    def accounted_for(self) -> bool:
        """Whether every turn is trained, waiting or left out, each counted once."""
        return self.trained + sum(self.waiting.values()) + sum(self.left_out.values()) == self.turns


def status(db: Connection, *, since: float | None = None) -> Status:
    """Args:
    since: count only what began then or later, seconds since the epoch; None: everything.
    """

    def counted(query: Select[Any], began: Column[Any]) -> Select[Any]:
        return query if since is None else query.where(began >= since)

    waiting: dict[str, int] = {}
    left_out: dict[str, int] = {}
    trained = 0
    states = select(turns.c.state, turns.c.reason, func.count()).group_by(turns.c.state, turns.c.reason)
    for state, reason, count in db.execute(counted(states, turns.c.created_at)):
        if state == TurnState.TRAINED:
            trained = count
        elif state == TurnState.LEFT_OUT:
            left_out[reason] = count
        else:
            waiting[WAITS[state]] = count
    names = {1: "good", 0: "neutral", -1: "bad", None: "abstained"}
    values = select(verdicts.c.value, func.count()).group_by(verdicts.c.value)
    by_state = select(updates.c.state, func.count()).group_by(updates.c.state)
    gone = select(policy_versions.c.version, policy_versions.c.gate)
    gone = gone.where(policy_versions.c.state == VersionState.ROLLED_BACK).order_by(policy_versions.c.version)
    all_turns = select(func.count()).select_from(turns)
    all_sessions = select(func.count()).where(sessions.c.user != NOBODY)
    return Status(
        version=serving_version(db),
        sessions=db.execute(counted(all_sessions, sessions.c.last_at)).scalar_one(),
        turns=db.execute(counted(all_turns, turns.c.created_at)).scalar_one(),
        trained=trained,
        waiting=waiting,
        left_out=left_out,
        verdicts={names[value]: count for value, count in db.execute(counted(values, verdicts.c.created_at))},
        updates=dict(db.execute(counted(by_state, updates.c.started_at)).all()),
        paused_since=paused_since(db),
        rolled_back=tuple(
            row.version for row in db.execute(counted(gone, policy_versions.c.created_at)) if "watch" in row.gate
        ),
        marked=marked_versions(db),
        not_learning=why_not_learning(db),
        judge_left_alone_since=judge_left_alone(db),
        judge_against_feedback=judge_against_feedback(db),
    )


def why_not_learning(db: Connection) -> str | None:
    """Why the trainer refused to start when it was last tried; None where it has started, or was not tried yet."""
    tries = select(events.c.kind, events.c.data).where(events.c.kind.in_(("trainer_started", "trainer_refused")))
    newest = db.execute(tries.order_by(events.c.event_id.desc()).limit(1)).first()
    return str(newest.data["why"]) if newest is not None and newest.kind == "trainer_refused" else None


def last_event(db: Connection, kind: str) -> dict[str, Any] | None:
    """What was written with the newest event of a kind; None where there is none."""
    query = select(events.c.data).where(events.c.kind == kind)
    data: dict[str, Any] | None = db.execute(query.order_by(events.c.event_id.desc()).limit(1)).scalar()
    return data


def list_turns(
    db: Connection, *, limit: int = 20, state: str | None = None, reason: str | None = None, before: int | None = None
) -> Sequence[AnyRow]:
    """Turns, newest first, with their session's key; `before` pages on."""
    query = select(turns, sessions.c.key.label("session")).join(sessions)
    if state is not None:
        query = query.where(turns.c.state == state)
    if reason is not None:
        query = query.where(turns.c.reason == reason)
    if before is not None:
        query = query.where(turns.c.turn_id < before)
    return db.execute(query.order_by(turns.c.turn_id.desc()).limit(limit)).all()


def show_turn(db: Connection, turn_id: int) -> AnyRow | None:
    """One turn with its session's key, its next state and the version that its update made."""
    query = (
        select(
            turns,
            sessions.c.key.label("session"),
            next_states.c.messages.label("next_state"),
            next_states.c.source.label("next_state_source"),
            updates.c.version.label("trained_version"),
        )
        .join(sessions)
        .outerjoin(next_states, next_states.c.turn_id == turns.c.turn_id)
        .outerjoin(updates, updates.c.update_id == turns.c.update_id)
        .where(turns.c.turn_id == turn_id)
    )
    return db.execute(query).first()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVersion:
    row: AnyRow
    """The version with its update: state, metrics, start and end."""
    turns: Sequence[AnyRow]
    """What it was trained on, or was to be: turn_id, state, reason, reward."""
    history: Sequence[AnyRow]
    """Events about it, oldest first."""


def show_version(db: Connection, version: int) -> ShownVersion | None:
    """One version with all that the store knows about it; None where there is none."""
    query = (
        select(
            policy_versions,
            updates.c.state.label("update_state"),
            *(updates.c.metrics, updates.c.started_at, updates.c.finished_at, updates.c.turn_ids),
        )
        .outerjoin(updates, policy_versions.c.update_id == updates.c.update_id)
        .where(policy_versions.c.version == version)
    )
    row = db.execute(query).first()
    if row is None:
        return None
    of_update = or_(turns.c.update_id == row.update_id, turns.c.turn_id.in_(row.turn_ids or ()))
    used = select(turns.c.turn_id, turns.c.state, turns.c.reason, samples.c.reward).outerjoin(samples).where(of_update)
    about = select(events).where(
        events.c.kind.in_(("promoted", "rejected", "rollback_asked", "watch_rolled_back", "forgotten", "retraining"))
    )
    return ShownVersion(
        row=row,
        turns=db.execute(used.order_by(turns.c.turn_id)).all() if row.update_id is not None else (),
        history=[
            event
            for event in db.execute(about.order_by(events.c.event_id))
            if version in (event.data.get("version"), event.data.get("from_version"), *event.data.get("versions", ()))
        ],
    )


_WHY_WAITING = {
    WaitReason.BEING_ANSWERED: "it is being answered right now",
    WaitReason.NOTHING_FOLLOWED_YET: "nothing has followed it yet, so there is no verdict. "
    "It is judged when the session goes on",
    WaitReason.WAITS_FOR_JUDGE: "it waits for the judge",
    WaitReason.WAITS_FOR_UPDATE: "it is judged and waits for the next update",
    WaitReason.IN_UPDATE: "an update is training on it right now",
}


def why(row: AnyRow) -> str:
    """One sentence about what happened to a turn, and why."""
    if row.state == TurnState.TRAINED:
        return f"Turn {row.turn_id} was trained in update {row.update_id}, which made version {row.trained_version}."
    if row.state == TurnState.LEFT_OUT:
        reason = SkipReason(row.reason)
        return f"Turn {row.turn_id} was left out ({reason}): {row.detail} See docs/left-out-turns.md#{reason}."
    return f"Turn {row.turn_id} has not been trained yet: {_WHY_WAITING[WAITS[row.state]]}."
