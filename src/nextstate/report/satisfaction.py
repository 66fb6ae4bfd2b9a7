"""How content people were: the share of good verdicts among the good and bad ones, as time goes on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nextstate.report.stats import Rate
from nextstate.store.watching import SignedTurn

_FEWEST, _MOST_BINS = 10, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Verdicts that were given one after another."""

    start: int
    """Verdicts before it."""
    end: int
    first_at: float
    """Of its first verdict, seconds since the epoch."""
    last_at: float
    rate: Rate
    """Good ones among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A version began to serve."""

    version: int
    after: int
    """Verdicts given before that."""


def satisfaction(turns: Sequence[SignedTurn]) -> tuple[Bin, ...]:
    """Verdicts in the order in which they were given, in parts of equal size: at least ten each where there are so
    many, and at most forty parts."""
    if not turns:
        return ()
    parts = min(_MOST_BINS, max(1, len(turns) // _FEWEST))
    bounds = [part * len(turns) // parts for part in range(parts + 1)]
    return tuple(
        Bin(
            start=start,
            end=end,
            first_at=turns[start].at,
            last_at=turns[end - 1].at,
            rate=Rate(hits=sum(turn.good for turn in turns[start:end]), total=end - start),
        )
        for start, end in pairwise(bounds)
    )


def marks(turns: Sequence[SignedTurn], served: Iterable[tuple[int, float]]) -> tuple[Mark, ...]:
    """Where versions began to serve among the verdicts; those from before the first one have no place there.

    Args:
        served: version and since when, seconds since the epoch.
    """
    if not turns:
        return ()
    began = sorted((at, version) for version, at in served if at >= turns[0].at)
    times = [turn.at for turn in turns]
    return tuple(Mark(version=version, after=bisect_left(times, at)) for at, version in began)
