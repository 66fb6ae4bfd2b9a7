"""A running mean reward for each user, subtracted from rewards.

Without one, a stretch of bad verdicts only pushes probabilities down, and a user who always praises teaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def advantages(rewards: Sequence[tuple[str, int]], baselines: Mapping[str, float]) -> list[float]:
    """reward - baseline of its user, for (user, reward) pairs; a user seen for the first time has baseline 0."""
    return [reward - baselines.get(user, 0.0) for user, reward in rewards]


def updated(baselines: Mapping[str, float], rewards: Sequence[tuple[str, int]], *, rate: float) -> dict[str, float]:
    """The baselines after these rewards, in order: b += rate * (reward - b)."""
    after = dict(baselines)
    for user, reward in rewards:
        before = after.get(user, 0.0)
        after[user] = before + rate * (reward - before)
    return after
