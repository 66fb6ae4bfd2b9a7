"""What the watch reads: signed verdicts by the version that made the turn, and the line of versions that serves."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from nextstate.store.learning import serving_version
from nextstate.store.schema import feedback, policy_versions, turns, verdicts
from nextstate.types import FinishReason, Vote

MAX_VERDICTS = 5000
"""Newest signed verdicts that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedTurn:
    """A turn that was found good or bad, and that one version made alone."""

    turn_id: int
    version: int
    good: bool
    at: float
    """When it was first found either, seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineVersion:
    version: int
    created_at: float


def serving_line(db: Connection) -> list[LineVersion]:
    """The version that serves, its parent, and so on to the base."""
    columns = policy_versions.c.version, policy_versions.c.parent_version, policy_versions.c.created_at
    rows = {row.version: row for row in db.execute(select(*columns))}  # at once: there may be thousands in the line
    line = []
    version: int | None = serving_version(db)
    while version is not None:
        row = rows[version]
        line.append(LineVersion(version=row.version, created_at=row.created_at))
        version = row.parent_version
    return line


def newest_signal(db: Connection) -> tuple[int, int, int]:
    """Changes whenever `signed_turns` or the line may have changed."""
    verdict = db.execute(select(func.max(verdicts.c.verdict_id))).scalar() or 0
    said = db.execute(select(func.max(feedback.c.feedback_id))).scalar() or 0
    return int(verdict), int(said), serving_version(db)


def window_start(db: Connection) -> float:
    """When the oldest of the MAX_VERDICTS newest signed verdicts was given; 0 where there are not so many."""
    signed = select(verdicts.c.created_at).where(verdicts.c.value.in_((Vote.GOOD, Vote.BAD)))
    oldest = db.execute(signed.order_by(verdicts.c.verdict_id.desc()).limit(1).offset(MAX_VERDICTS - 1)).scalar()
    return float(oldest or 0.0)


def signed_turns(db: Connection, *, since: float = 0.0) -> list[SignedTurn]:
    """Turns with a good or a bad verdict or feedback, in the order in which they first had one.

    A turn counts once: with its newest feedback if there is any, else with its newest signed verdict. Truncated and
    aborted answers, answers of more than one version, neutral ones and those nobody could judge are none of them.

    Args:
        since: what was said before is not looked at; seconds since the epoch.
    """
    found: dict[int, SignedTurn] = {}
    for table, number in ((verdicts, verdicts.c.verdict_id), (feedback, feedback.c.feedback_id)):
        query = (
            select(turns.c.turn_id, turns.c.reply_versions, table.c.value, table.c.created_at)
            .join(table, table.c.turn_id == turns.c.turn_id)
            .where(table.c.value.in_((Vote.GOOD, Vote.BAD)), table.c.created_at >= since)
            .where(turns.c.finish_reason == FinishReason.STOP, turns.c.learn)
            .order_by(number)
        )
        for row in db.execute(query):
            if len(row.reply_versions or ()) != 1:
                continue
            earlier = found.get(row.turn_id)
            found[row.turn_id] = SignedTurn(
                turn_id=row.turn_id,
                version=row.reply_versions[0][0],
                good=row.value == Vote.GOOD,
                at=row.created_at if earlier is None else min(earlier.at, row.created_at),
            )
    return sorted(found.values(), key=lambda turn: (turn.at, turn.turn_id))
