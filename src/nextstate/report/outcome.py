"""What happened to a turn, as people read it beside its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nextstate.store.status import WAITS
from nextstate.types import TurnState, VersionState, WaitReason

Tone = Literal["waiting", "trained", "left_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    tone: Tone
    headline: str
    """A few words."""
    reason: str | None
    """The WaitReason or SkipReason; None for a trained turn."""


_WAITING = {
    WaitReason.BEING_ANSWERED: "being answered",
    WaitReason.NOTHING_FOLLOWED_YET: "waiting for what comes next",
    WaitReason.WAITS_FOR_JUDGE: "waiting for the judge",
    WaitReason.WAITS_FOR_UPDATE: "waiting for an update",
    WaitReason.IN_UPDATE: "being trained",
}
_VERSIONS = {
    VersionState.CANDIDATE: ", which is being examined",
    VersionState.RETIRED: "",
    VersionState.SERVING: ", which serves",
}


def outcome(state: str, reason: str | None, *, version: int | None, version_state: str | None) -> Outcome:
    """Where a turn stands.

    Args:
        version: what came of the update that it was in, with its state; None where nothing has yet.
    """
    if state == TurnState.TRAINED:
        more = _VERSIONS.get(VersionState(version_state), "") if version_state is not None else ""
        return Outcome(tone="trained", headline=f"trained in version {version}{more}", reason=None)
    if state == TurnState.LEFT_OUT:
        return Outcome(tone="left_out", headline=f"not trained: {(reason or '').replace('_', ' ')}", reason=reason)
    waits = WAITS[state]
    return Outcome(tone="waiting", headline=_WAITING[waits], reason=waits)


def count_votes(votes: Sequence[int | None]) -> str:
    """'2 good, 1 abstained'; nothing where evidence decided without a vote."""
    names = {1: "good", 0: "neutral", -1: "bad", None: "abstained"}
    counted = {name: sum(vote == value for vote in votes) for value, name in names.items()}
    return ", ".join(f"{count} {name}" for name, count in counted.items() if count)
