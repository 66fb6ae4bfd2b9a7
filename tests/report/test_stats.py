import math

import pytest

from nextstate.report.stats import Rate, improvement_p, mean_interval, quantile


def test_an_interval_is_wilsons():
    # 10 of 20: middle .5, half-width 1.96 / (1 + 3.8415 / 20) * sqrt(.25 / 20 + 3.8415 / 1600) = .2007
    low, high = Rate(hits=10, total=20).interval
    assert (low, high) == pytest.approx((0.2993, 0.7007), abs=1e-4)


def test_no_answer_met_is_not_certainty_that_none_ever_will():
    assert Rate(hits=0, total=10).interval == pytest.approx((0.0, 0.2775), abs=1e-4)  # 3.8415 / 13.8415


def test_nothing_counted_is_not_a_rate_of_zero():
    assert Rate(hits=0, total=0).share is None
    assert str(Rate(hits=0, total=0)) == "nothing to count"


def test_five_better_and_none_worse_happens_by_chance_once_in_thirty_two():
    assert improvement_p([False] * 5 + [True], [True] * 6) == pytest.approx(1 / 32)


def test_as_many_worse_as_better_proves_nothing():
    assert improvement_p([True, False], [False, True]) == pytest.approx(0.75)  # P(X >= 1) of two coins
    assert improvement_p([True], [True]) == 1.0


def test_a_quantile_is_a_value_that_was_measured():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([], 0.5) is None


def test_a_mean_of_three_has_students_interval():
    # mean 4, deviation 2, t of two degrees of freedom 4.303: 4.303 * 2 / sqrt(3) = 4.9687
    assert mean_interval([2, 4, 6]) == pytest.approx((4, -0.9687, 8.9687), abs=1e-4)


def test_one_value_says_nothing_about_its_spread():
    assert mean_interval([5]) == (5, -math.inf, math.inf)
