"""The watch's promises, by simulation of the arithmetic that it runs on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.watch import RUNS, e_values, simulate

from nextstate.config import WatchConfig
from nextstate.learn.watch import e_value

ALPHA = WatchConfig().alpha


def test_all_runs_at_once_give_what_the_watch_computes_for_one():
    rng = np.random.default_rng(1)
    live, reference = rng.random((3, 60)) < 0.4, rng.random((3, 130)) < 0.7
    together = e_values(live, reference, known=130)
    for run in range(3):
        for t in (1, 17, 60):
            alone = e_value(live[run, :t].tolist(), reference[run].tolist(), known=130)
            assert together[run, t - 1] == pytest.approx(alone)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("known", [40, 300])
def test_a_version_that_is_no_worse_is_rarely_taken_back_however_long_it_is_watched(rate: float, known: int):
    found = simulate(rate, rate, known=known)
    # Three standard errors of a share of alpha in so many runs.
    assert found.alarms <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


@pytest.mark.slow
def test_a_fall_from_seven_in_ten_to_three_is_found_in_95_of_100_within_seventy_verdicts():
    assert simulate(0.7, 0.3, known=300).in_95_percent <= 45
    assert simulate(0.7, 0.3, known=100).in_95_percent <= 70
