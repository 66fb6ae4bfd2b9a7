"""Updates and policy versions: written by the trainer, decided by the publisher.

An update takes its turns and its version number in one transaction, and gives both their end in another. Between the
two stands one atomic rename on disk, so that after a crash the folder's presence says which way to go.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from nextstate.store.schema import events, hints, policy_versions, samples, turns, updates
from nextstate.store.store import AnyRow, note
from nextstate.store.turns import leave_out, load_messages, load_tools, load_turn
from nextstate.types import SkipReason, Turn, TurnState, VersionState

MAX_HINTS = 3
"""Candidates for one turn; the published method's number. Choosing by overlap reads every one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A turn made trainable."""

    turn: Turn
    user: str
    reward: int
    """+1 or -1."""
    hints: tuple[str, ...]
    """Candidates for what the teacher reads, most trusted first, each once; none: no teacher for this turn."""
    messages: tuple[Mapping[str, Any], ...]
    """The request's messages, into which the hint goes."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Those that the prompt names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningUpdate:
    update_id: int
    parent_version: int
    version: int
    samples: tuple[Sample, ...]


class UpdateStopped(Exception):
    """An update whose turns were taken from it while it ran."""


def waiting_samples(db: Connection) -> tuple[int, float | None]:
    """How many samples wait for an update, and since when the oldest does (seconds since the epoch)."""
    query = select(func.count(), func.min(samples.c.created_at)).join(turns).where(turns.c.state == TurnState.JUDGED)
    count, oldest = db.execute(query).one()
    return count, oldest


def hold_out(db: Connection, *, every: int) -> int:
    """Keep one signed turn in `every` out of training: of those that wait, the oldest. Returns how many it was now.

    Counted over all there ever were, so that a crash or another trainer changes nothing.
    """
    signed = db.execute(select(func.count()).select_from(samples)).scalar_one()
    held = db.execute(select(func.count()).where(turns.c.reason == SkipReason.HELD_OUT)).scalar_one()
    due = max(0, signed // every - held)
    waiting = select(turns.c.turn_id).where(turns.c.state == TurnState.JUDGED).order_by(turns.c.turn_id).limit(due)
    ids = list(db.execute(waiting).scalars())
    leave_out(db, ids, SkipReason.HELD_OUT, "It is kept to measure new versions by.")
    return len(ids)


def held_out_turns(db: Connection, *, limit: int, max_tokens: int) -> list[tuple[Turn, int]]:
    """The newest turns kept out of training, each with its reward.

    Args:
        max_tokens: longer ones are passed over.
    """
    tokens = turns.c.prompt_tokens + turns.c.reply_tokens
    query = select(turns.c.turn_id, samples.c.reward).join(samples)
    query = query.where(turns.c.reason == SkipReason.HELD_OUT, tokens <= max_tokens)
    rows = db.execute(query.order_by(turns.c.turn_id.desc()).limit(limit))
    return [(load_turn(db, row.turn_id), int(row.reward)) for row in rows]


def start_update(db: Connection, *, limit: int, session_limit: int | None = None, key_limit: int | None = None) -> int:
    """Take up to `limit` waiting samples, oldest first, into a new update on the serving version. Returns its id.

    Args:
        session_limit: most of them that may be of one session; its others wait. One that goes round in circles would
            fill a batch otherwise (W8). None: no such limit.
        key_limit: most of them that may be of one key's user, however many sessions it opens, where those of others
            wait too. None: no such limit.
    """
    parent = serving_version(db)
    highest = db.execute(select(func.max(policy_versions.c.version))).scalar_one()
    used = db.execute(select(func.max(updates.c.version))).scalar() or 0
    values = {"parent_version": parent, "version": max(highest, used) + 1, "state": "running"}
    made = insert(updates).values(started_at=time.time(), **values).returning(updates.c.update_id)
    update_id = int(db.execute(made).scalar_one())
    chosen = _shared_out(db, limit=limit, session_limit=session_limit, key_limit=key_limit)
    take = update(turns).where(turns.c.turn_id.in_(chosen))
    db.execute(take.values(state=TurnState.TRAINING, update_id=update_id))
    return update_id


def _shared_out(db: Connection, *, limit: int, session_limit: int | None, key_limit: int | None) -> list[int]:
    columns = turns.c.turn_id, turns.c.session_id, turns.c.user
    waiting = db.execute(select(*columns).where(turns.c.state == TurnState.JUDGED).order_by(turns.c.turn_id)).all()
    if len({_key_user(row.user) for row in waiting}) == 1:
        key_limit = None
    chosen: list[int] = []
    of_session, of_key = Counter[int](), Counter[str]()
    for row in waiting:
        key = _key_user(row.user)
        full = (session_limit is not None and of_session[row.session_id] >= session_limit) or (
            key_limit is not None and of_key[key] >= key_limit
        )
        if not full and len(chosen) < limit:
            chosen.append(row.turn_id)
            of_session[row.session_id] += 1
            of_key[key] += 1
    return chosen


def _key_user(owner: str) -> str:
    """Whose key asked, of an owner that may have the request's own user behind a slash; see `serve.auth.owner`."""
    return owner.partition("/")[0]


def load_update(db: Connection, update_id: int) -> RunningUpdate:
    """A running update with its samples, in turn order."""
    row = update_row(db, update_id)
    query = (
        select(turns.c.turn_id, turns.c.user, turns.c.dialect, turns.c.tool_set, samples.c.reward, samples.c.verdict_id)
        .join(samples)
        .where(turns.c.update_id == update_id, turns.c.state == TurnState.TRAINING)
        .order_by(turns.c.turn_id)
    )
    found = tuple(
        Sample(
            turn=load_turn(db, r.turn_id),
            user=r.user,
            reward=r.reward,
            # A raw prompt was not made of messages, so no hint can be put into it.
            hints=() if r.dialect in ("completions", "generate") else _hints(db, r.verdict_id),
            messages=load_messages(db, r.turn_id)[:-1],
            tools=load_tools(db, r.tool_set),
        )
        for r in db.execute(query)
    )
    return RunningUpdate(update_id=update_id, parent_version=row.parent_version, version=row.version, samples=found)


def _hints(db: Connection, verdict_id: int) -> tuple[str, ...]:
    """A verdict's hints, most trusted first, at most MAX_HINTS."""
    query = select(hints.c.text).where(hints.c.verdict_id == verdict_id).order_by(hints.c.n).limit(MAX_HINTS)
    return tuple(db.execute(query).scalars())


def finish_update(db: Connection, update_id: int, *, artifact: str, metrics: Mapping[str, Any]) -> None:
    """The artifact is on disk: its turns are trained, and its version is a candidate.

    Args:
        metrics: of `Trainer.update`; the turns that it names as off policy took no part, and are left out.

    Raises:
        UpdateStopped: it no longer runs. Nothing has changed, and its artifact must go.
    """
    now = time.time()
    leave_out_off_policy(db, metrics.get("off_policy", {}))
    done = update(updates).where(updates.c.update_id == update_id, updates.c.state == "running")
    row = db.execute(
        done.values(state="done", finished_at=now, metrics=dict(metrics)).returning(
            updates.c.version, updates.c.parent_version
        )
    ).first()
    if row is None:
        raise UpdateStopped(f"update {update_id} was stopped: a turn of it was forgotten")
    db.execute(
        update(turns)
        .where(turns.c.update_id == update_id, turns.c.state == TurnState.TRAINING)
        .values(state=TurnState.TRAINED)
    )
    values = {"version": row.version, "parent_version": row.parent_version, "update_id": update_id}
    made = insert(policy_versions).values(artifact=artifact, state=VersionState.CANDIDATE, created_at=now, **values)
    db.execute(made)


def leave_out_off_policy(db: Connection, log_ratios: Mapping[str, float]) -> None:
    """Close turns that an update kept out.

    Args:
        log_ratios: by turn id, mean nats a token that the version in training gives more than the sampler's gave.
    """
    for turn_id, ratio in log_ratios.items():
        than = f"{abs(ratio):.2f} nats {'more' if ratio > 0 else 'less'} likely"
        why = f"To the version in training its tokens are on average {than} than when they were sampled."
        leave_out(db, [int(turn_id)], SkipReason.OFF_POLICY, why)


def abandon_update(db: Connection, update_id: int, error: str, *, state: str = "failed") -> None:
    """Nothing came of an update: its turns wait for the next one.

    Args:
        state: 'failed'; 'interrupted' when it was stopped from outside, which says nothing about its turns; 'empty'
            when none of them could be trained; 'stopped' when one of them was forgotten.
    """
    over = update(updates).where(updates.c.update_id == update_id, updates.c.state == "running")
    db.execute(over.values(state=state, finished_at=time.time(), error=error))
    ids = list(db.execute(select(turns.c.turn_id).where(turns.c.update_id == update_id)).scalars())
    db.execute(update(updates).where(updates.c.update_id == update_id).values(turn_ids=ids))
    back = update(turns).where(turns.c.update_id == update_id, turns.c.state == TurnState.TRAINING)
    db.execute(back.values(state=TurnState.JUDGED, update_id=None))
    note(db, f"update_{state}", update_id=update_id, error=error)


def update_row(db: Connection, update_id: int) -> AnyRow:
    return db.execute(select(updates).where(updates.c.update_id == update_id)).one()


def stopped_versions(db: Connection) -> list[int]:
    """What updates that were stopped would have made: none of it may be on disk."""
    return list(db.execute(select(updates.c.version).where(updates.c.state == "stopped")).scalars())


def running_updates(db: Connection) -> list[AnyRow]:
    """Updates that a trainer began and did not end."""
    return list(db.execute(select(updates).where(updates.c.state == "running").order_by(updates.c.update_id)))


def server_started_since(db: Connection, at: float) -> bool:
    """Whether a server has started after that moment: what ran then was stopped with the server before."""
    starts = select(events.c.event_id).where(events.c.kind == "server_started", events.c.at > at)
    return db.execute(starts.limit(1)).first() is not None


def done_updates(db: Connection) -> int:
    return int(db.execute(select(func.count()).where(updates.c.state == "done")).scalar_one())


def serving_version(db: Connection) -> int:
    query = select(policy_versions.c.version).where(policy_versions.c.state == VersionState.SERVING)
    return int(db.execute(query).scalar_one())


def candidate(db: Connection) -> AnyRow | None:
    """The version that waits for the gate, if any."""
    query = select(policy_versions).where(policy_versions.c.state == VersionState.CANDIDATE)
    return db.execute(query.order_by(policy_versions.c.version).limit(1)).first()


def ancestor(db: Connection, version: int, *, steps: int) -> int:
    """The version that served `steps` publishes before; the base where there are not so many.

    Numbers do not say that: updates that came to nothing and versions that were rejected have numbers too.
    """
    for _ in range(steps):
        parent = db.execute(
            select(policy_versions.c.parent_version).where(policy_versions.c.version == version)
        ).scalar()
        if parent is None:
            break
        version = parent
    return version


def version_row(db: Connection, version: int) -> AnyRow:
    return db.execute(select(policy_versions).where(policy_versions.c.version == version)).one()


def promote(db: Connection, version: int, gate: Mapping[str, Any]) -> None:
    """A candidate serves; the one before it retires, or is rolled back if the watch took it back."""
    state = VersionState.ROLLED_BACK if goes_back(db) else VersionState.RETIRED
    serving = update(policy_versions).where(policy_versions.c.state == VersionState.SERVING)
    db.execute(serving.values(state=state))
    chosen = update(policy_versions).where(policy_versions.c.version == version)
    db.execute(chosen.values(state=VersionState.SERVING, served_at=time.time(), gate=dict(gate)))
    note(db, "promoted", version=version, **gate)


def roll_back(db: Connection, version: int | None) -> int:
    """Ask for an earlier version to serve again: it becomes the candidate, and passes the gate like any other.

    The next update then goes on from it. What was trained since stays trained, and no longer serves.

    Args:
        version: None for the parent of the one that serves.

    Returns the version asked for.

    Raises:
        LookupError: there is no such version, or it never served, or another waits for the gate; nothing has changed.
    """
    serving = version_row(db, serving_version(db))
    if version is None and serving.parent_version is None:
        raise LookupError("version 0, the base, serves: nothing is before it")
    wanted = serving.parent_version if version is None else version
    if (waiting := candidate(db)) is not None:
        raise LookupError(f"version {waiting.version} waits for the gate; try again when it has been decided about")
    row = db.execute(select(policy_versions).where(policy_versions.c.version == wanted)).first()
    if row is None:
        raise LookupError(f"there is no version {wanted}")
    if row.state == VersionState.ROLLED_BACK:
        by = "the watch took version {} back" if "watch" in row.gate else "version {} was taken back"
        raise LookupError(f"{by.format(wanted)}: {row.gate['why']}")
    if row.state == VersionState.REMOVED:
        kept = ", ".join(str(one.version) for one in list_versions(db) if one.state == VersionState.RETIRED)
        raise LookupError(
            f"the weights of version {wanted} were removed from disk, which keeps those of the newest "
            f"(learn.keep_versions); {kept} can be gone back to"
        )
    if row.state != VersionState.RETIRED:
        raise LookupError(f"version {wanted} is {row.state}; only one that has served before can be gone back to")
    asked = update(policy_versions).where(policy_versions.c.version == wanted)
    db.execute(asked.values(state=VersionState.CANDIDATE))
    note(db, "rollback_asked", version=wanted, from_version=serving.version)
    return int(wanted)


def take_back(db: Connection, version: int, why: str, evidence: Mapping[str, Any]) -> int:
    """The watch's decision: a version on the serving line, and all that was built on it there, never serves again.

    Their turns are left out with that reason, and the version before them is asked to serve. Until it does, the bad one
    goes on.

    Returns the version asked for.

    Raises:
        LookupError: another version waits for the gate; nothing has changed.
    """
    if (waiting := candidate(db)) is not None:
        raise LookupError(f"version {waiting.version} waits for the gate")
    bad: list[AnyRow] = []
    while not bad or bad[-1].version != version:
        bad.append(version_row(db, bad[-1].parent_version if bad else serving_version(db)))
    for row in bad:
        # The one that serves has to stay that until another can; `promote` then changes its state.
        state = row.state if row.state == VersionState.SERVING else VersionState.ROLLED_BACK
        values = {"state": state, "gate": {**(row.gate or {}), "why": why, "watch": dict(evidence)}}
        db.execute(update(policy_versions).where(policy_versions.c.version == row.version).values(values))
        _leave_out_trained(db, row.update_id, f"Version {row.version}, trained on it, was rolled back: {why}.")
    numbers = sorted(row.version for row in bad)
    note(db, "watch_rolled_back", version=version, versions=numbers, why=why, evidence=dict(evidence))
    back_to = go_back(db)
    assert back_to is not None, "there is no candidate"
    return back_to


def fall_back(db: Connection, version: int, why: str) -> int:
    """The version that serves turned out to be damaged: the newest whole one before it serves. Returns that."""
    row = version_row(db, version_row(db, version).parent_version)
    while row.state == VersionState.REMOVED:
        row = version_row(db, row.parent_version)
    reject(db, version, why, {})
    promote(db, row.version, {})
    return int(row.version)


def retire_for_good(db: Connection, *, keep: int) -> list[str]:
    """Give up going back to any but the `keep` versions that served last, and to the base.

    Returns the folders of all versions that cannot be gone back to: of these, of rejected and of rolled back ones.
    """
    retired = select(policy_versions.c.version).where(
        policy_versions.c.state == VersionState.RETIRED, policy_versions.c.artifact.is_not(None)
    )
    old = list(db.execute(retired.order_by(policy_versions.c.served_at.desc()).offset(keep)).scalars())
    chosen = update(policy_versions).where(policy_versions.c.version.in_(old))
    db.execute(chosen.values(state=VersionState.REMOVED))
    if old:
        note(db, "versions_removed", versions=sorted(old))
    never_again = (VersionState.REMOVED, VersionState.REJECTED, VersionState.ROLLED_BACK)
    gone = select(policy_versions.c.artifact).where(policy_versions.c.state.in_(never_again))
    return list(db.execute(gone.where(policy_versions.c.artifact.is_not(None))).scalars())


def goes_back(db: Connection) -> bool:
    """Whether the version that serves was taken back, and only serves until another can: by the watch, or because turns
    that it was trained on were forgotten."""
    serving = select(policy_versions.c.gate).where(policy_versions.c.state == VersionState.SERVING)
    return not {"watch", "forgotten"}.isdisjoint(db.execute(serving).scalar() or {})


def go_back(db: Connection) -> int | None:
    """Ask the newest version before those taken back to serve, unless one does or waits for the gate. Returns it.

    Asked again when the gate finds that one damaged: then it is the one before.
    """
    if not goes_back(db) or candidate(db) is not None:
        return None
    row = version_row(db, serving_version(db))
    while row.state != VersionState.RETIRED:
        row = version_row(db, row.parent_version)
    return roll_back(db, row.version)


def give_back(db: Connection, version: int, why: str) -> None:
    """A candidate that may not serve, for nothing that it did itself: its turns wait for another update."""
    chosen = update(policy_versions).where(policy_versions.c.version == version)
    row = db.execute(
        chosen.values(state=VersionState.REJECTED, gate={"why": why}).returning(policy_versions.c.update_id)
    ).one()
    ids = list(db.execute(select(turns.c.turn_id).where(turns.c.update_id == row.update_id)).scalars())
    over = update(updates).where(updates.c.update_id == row.update_id)
    db.execute(over.values(state="superseded", error=why, turn_ids=ids))
    back = update(turns).where(turns.c.update_id == row.update_id, turns.c.state == TurnState.TRAINED)
    db.execute(back.values(state=TurnState.JUDGED, update_id=None))
    note(db, "rejected", version=version, why=why)


def reject(db: Connection, version: int, why: str, gate: Mapping[str, Any]) -> None:
    """A candidate never serves; its turns are left out with that reason."""
    chosen = update(policy_versions).where(policy_versions.c.version == version)
    row = db.execute(
        chosen.values(state=VersionState.REJECTED, gate={**gate, "why": why}).returning(policy_versions.c.update_id)
    ).one()
    _leave_out_trained(db, row.update_id, f"Version {version}, trained on it, was rejected: {why}")
    note(db, "rejected", version=version, why=why, **gate)


def _leave_out_trained(db: Connection, update_id: int, detail: str) -> None:
    """What an update trained comes to nothing; a turn that it left out keeps its own reason."""
    trained = select(turns.c.turn_id).where(turns.c.update_id == update_id, turns.c.state == TurnState.TRAINED)
    leave_out(db, list(db.execute(trained).scalars()), SkipReason.VERSION_REJECTED, detail)


def list_versions(db: Connection, *, newest: int | None = None) -> list[AnyRow]:
    """All versions, or so many of the newest, with the updates that made them, oldest first."""
    query = select(policy_versions, updates.c.metrics, updates.c.started_at, updates.c.finished_at).outerjoin(
        updates, policy_versions.c.update_id == updates.c.update_id
    )
    return list(db.execute(query.order_by(policy_versions.c.version.desc()).limit(newest)))[::-1]


def give_up_failing(db: Connection, *, tries: int) -> int:
    """Leave out the turns that were in each of the newest `tries` updates, when all of those failed. Returns how many.

    A turn that has not been tried that often is kept: a full disk fails every update, whatever is in it.
    """
    ended = select(updates.c.state, updates.c.turn_ids).where(updates.c.state.in_(("done", "failed")))
    newest = db.execute(ended.order_by(updates.c.update_id.desc()).limit(tries)).all()
    if len(newest) < tries or any(row.state == "done" for row in newest):
        return 0
    always = set.intersection(*(set(row.turn_ids or ()) for row in newest))
    waiting = select(turns.c.turn_id).where(turns.c.turn_id.in_(always), turns.c.state == TurnState.JUDGED)
    left = list(db.execute(waiting).scalars())
    why = f"{tries} updates in a row failed, and this turn was in each of them."
    leave_out(db, left, SkipReason.UPDATE_FAILED, why)
    return len(left)
