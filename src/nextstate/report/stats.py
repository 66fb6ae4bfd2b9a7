"""How sure a rate is, and whether a difference is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_Z95 = 1.959963985


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A share with its 95 % Wilson interval."""

    hits: int
    total: int

    @property
    def share(self) -> float | None:
        """None when there is nothing to count, which is not 0."""
        return self.hits / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval: the shares p with |hits/total - p| <= 1.96 sqrt(p (1 - p) / total)."""
        if not self.total:
            return 0.0, 1.0
        n, p, z = self.total, self.hits / self.total, _Z95
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_json(self) -> dict[str, Any]:
        return {"hits": self.hits, "total": self.total, "share": self.share, "interval_95": self.interval}

    def __str__(self) -> str:
        if not self.total:
            return "nothing to count"
        low, high = self.interval
        return f"{self.hits} of {self.total}, {self.hits / self.total:.0%} ({low:.0%} to {high:.0%})"


def improvement_p(before: Sequence[bool], after: Sequence[bool]) -> float:
    """How likely so many pairs would change for the better by chance: the one-sided exact sign test on paired answers.

    Only pairs that differ count: with b better and w worse, p = P(X >= b) for X ~ Binomial(b + w, 1/2).
    """
    better = sum(b < a for b, a in zip(before, after, strict=True))
    worse = sum(b > a for b, a in zip(before, after, strict=True))
    n = better + worse
    return float(sum(math.comb(n, k) for k in range(better, n + 1)) / 2**n)


def quantile(values: Sequence[float], q: float) -> float | None:
    """The value at rank ceil(q n); None when there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1 to 9 degrees of freedom; beyond, the last one is a little wide."""


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval: mean ± t s / sqrt(n), with s the sample deviation and t of n - 1 degrees.

    Few values give wide intervals; that of one value is the whole line.
    """
    n, mean = len(values), sum(values) / len(values)
    if n == 1:
        return mean, -math.inf, math.inf
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = _T975[min(n - 1, len(_T975)) - 1] * deviation / math.sqrt(n)
    return mean, mean - half, mean + half
