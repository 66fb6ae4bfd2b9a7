"""Leaving alone a judge that is down, and finding out when it is back.

closed ──failures in a row──▶ open ──wait over──▶ trial of one turn ──▶ closed
                               ▲                        │ fails
                               └──── twice the wait ────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Counts failures in a row of one judge. It says how many turns may be tried now; it stops nothing by itself."""

    def __init__(
        self,
        *,
        failures_to_open: int = 3,
        first_wait_s: float = 5.0,
        longest_wait_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            failures_to_open: failures in a row after which the judge is left alone.
            first_wait_s: how long, the first time; each failed trial doubles it.
            longest_wait_s: bound on that.
        """
        self._failures_to_open = failures_to_open
        self._first_wait_s, self._longest_wait_s = first_wait_s, longest_wait_s
        self._clock = clock
        self._failures = 0
        self._wait_s = first_wait_s
        self._until_s: float | None = None

    @property
    def open(self) -> bool:
        """Whether the judge is being left alone, or on trial."""
        return self._until_s is not None

    @property
    def wait_s(self) -> float:
        """Seconds until a turn may be tried; 0 when one may."""
        return 0.0 if self._until_s is None else max(0.0, self._until_s - self._clock())

    def may_try(self, turns: int) -> int:
        """Of so many turns, how many may be tried now: all, one on trial, or none."""
        if self._until_s is None:
            return turns
        return 0 if self.wait_s > 0 else min(1, turns)

    def succeeded(self) -> bool:
        """Note a verdict. True if the judge is back after having been left alone."""
        back = self.open
        self._failures, self._wait_s, self._until_s = 0, self._first_wait_s, None
        return back

    def failed(self) -> float | None:
        """Note a failure. The seconds for which the judge is left alone, if that begins now or anew, else None."""
        self._failures += 1
        if self._failures < self._failures_to_open or self.wait_s > 0:
            return None  # turns under way when the judge was given up are no trials
        wait_s = self._wait_s
        self._until_s = self._clock() + wait_s
        self._wait_s = min(2 * wait_s, self._longest_wait_s)
        return wait_s
