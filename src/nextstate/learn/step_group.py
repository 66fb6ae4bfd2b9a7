"""Advantages of the steps of grouped rollouts: several attempts at one task, measured against each other step by step.

    R = outcome + vote_weight * mean of the step's votes
    A = (R - mean) / (std + 1e-6)        over all steps of the same task with the same index; population std

A pure function that no recipe calls yet; turns without a group have their user's running mean, in baseline.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

_SMALL = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn of one attempt."""

    task: str
    """The group: attempts at one task in one rollout."""
    index: int
    """Which turn of its attempt it is."""
    outcome: float
    """What the attempt came to, the same for all its steps."""
    votes: tuple[int | None, ...]
    """+1 and -1 as cast about this step; None abstained, and is not counted."""

    def value(self, vote_weight: float) -> float:
        """R; a step that nobody voted on has its outcome alone."""
        cast = [vote for vote in self.votes if vote is not None]
        return self.outcome + vote_weight * (fmean(cast) if cast else 0.0)


def step_group(steps: Sequence[Step], *, vote_weight: float = 1.0) -> list[float]:
    """Advantages, one for each step, for all its tokens.

    Steps are compared with those of the same task and index alone. Where there is nothing to compare with, because
    one attempt came that far or all of them did equally well, the advantage is 0 and not the raw value (W11).
    """
    values = [step.value(vote_weight) for step in steps]
    buckets: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        buckets[step.task, step.index].append(i)
    advantages = [0.0] * len(steps)
    for members in buckets.values():
        inside = [values[i] for i in members]
        # Compared and not subtracted: the mean of equal numbers is not always that number.
        if min(inside) == max(inside):
            continue
        mean = fmean(inside)
        std = math.sqrt(fmean((value - mean) ** 2 for value in inside))
        for i in members:
            advantages[i] = (values[i] - mean) / (std + _SMALL)
    return advantages
