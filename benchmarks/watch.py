"""How often the watch takes a version back that is no worse, and how soon one that is: `python -m benchmarks.watch`.

Simulated: RUNS histories for every row, each with as many verdicts on the versions before, and up to HORIZON verdicts
on the one that is watched, looked at after every single one. The arithmetic is `nextstate.learn.watch.e_value`, for all
runs at once. No verdict comes in on the versions before, as would happen where answers are judged late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nextstate.config import WatchConfig
from nextstate.learn.watch import LONGEST, ODDS_RATIOS, reference_counts

RUNS = 10_000
HORIZON = LONGEST
KNOWN = (40, 100, 300, 1000)
"""Verdicts on the versions before."""
SAME = (0.1, 0.3, 0.5, 0.7, 0.9)
DROPS = ((0.9, 0.7), (0.9, 0.5), (0.7, 0.5), (0.7, 0.3), (0.7, 0.1), (0.5, 0.3), (0.5, 0.1), (0.3, 0.1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    before: float
    """Share of good verdicts."""
    since: float
    known: int
    alarms: float
    """Share of runs in which the version is taken back within the horizon."""
    median: float
    """Verdicts on the version until then; infinite where that has not happened in so many runs."""
    in_95_percent: float


def e_values(live_RT: NDArray[np.bool_], reference_RN: NDArray[np.bool_], *, known: int) -> NDArray[np.float64]:
    """[R, T] the e-value after each live verdict of each run; a used-up reference leaves it as it is."""
    runs, horizon = live_RT.shape
    log_stakes = np.zeros((len(ODDS_RATIOS), runs, horizon))
    used = 0
    for t, count in enumerate(reference_counts(horizon, known=known)):
        if used + count > reference_RN.shape[1]:
            break
        good = live_RT[:, t]
        goods = reference_RN[:, used : used + count].sum(1) + good
        used += count
        for n, ratio in enumerate(ODDS_RATIOS):
            factor = np.where(good, ratio, 1.0) * (count + 1) / (goods * ratio + count + 1 - goods)
            log_stakes[n, :, t] = np.log(factor)
    return np.asarray(np.exp(log_stakes.cumsum(2)).mean(0))


def simulate(
    before: float, since: float, *, known: int, runs: int = RUNS, horizon: int = HORIZON, seed: int = 0
) -> Simulated:
    """Verdicts that are good with one probability before a version and another since."""
    config = WatchConfig()
    rng = np.random.default_rng(seed)
    reference_RN = rng.random((runs, known)) < before
    live_RT = rng.random((runs, horizon)) < since
    decided_RT = e_values(live_RT, reference_RN, known=known) >= 1 / config.alpha
    decided_RT[:, : config.min_turns - 1] = False
    ever = decided_RT.any(1)
    first = np.where(ever, decided_RT.argmax(1) + 1.0, np.inf)
    median, late = np.quantile(first, [0.5, 0.95], method="inverted_cdf")
    return Simulated(
        before=before,
        since=since,
        known=known,
        alarms=float(ever.mean()),
        median=float(median),
        in_95_percent=float(late),
    )


def main() -> None:
    config = WatchConfig()
    print(f"alpha {config.alpha}, {RUNS} runs of {HORIZON} verdicts each, looked at after every verdict")
    print("\nNothing changed: share of versions taken back, by verdicts before")
    print("| good |" + "".join(f" {known} |" for known in KNOWN))
    print("| --- |" + " --- |" * len(KNOWN))
    for rate in SAME:
        cells = (f" {simulate(rate, rate, known=known).alarms:.2%} |" for known in KNOWN)
        print(f"| {rate:.0%} |" + "".join(cells))
    print(f"\nA worse version: verdicts until it is taken back, half of all / 95 % (share within {HORIZON})")
    print("| good |" + "".join(f" {known} |" for known in KNOWN))
    print("| --- |" + " --- |" * len(KNOWN))
    for before, since in DROPS:
        rows = [simulate(before, since, known=known) for known in KNOWN]
        cells = (f" {row.median:.0f} / {row.in_95_percent:.0f} ({row.alarms:.0%}) |" for row in rows)
        print(f"| {before:.0%} to {since:.0%} |" + "".join(cells))


if __name__ == "__main__":
    main()
