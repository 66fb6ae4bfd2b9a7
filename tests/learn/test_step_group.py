from __future__ import annotations

from typing import Any

import pytest

from nextstate.learn.step_group import Step, step_group


def a_step(**changes: Any) -> Step:
    return Step(**{"task": "t", "index": 0, "outcome": 0.0, "votes": (), **changes})


def test_the_oracle_of_a_bucket_is_met():
    # T8: R = (1 + 1/3, -1 + 1/3, 0); mean 2/9, population std sqrt(.6914) = .8315
    steps = [a_step(outcome=1, votes=(1, 1, -1)), a_step(outcome=-1, votes=(1, 1, -1)), a_step()]
    assert step_group(steps) == pytest.approx([1.3363, -1.0690, -0.2673], abs=1e-4)


def test_steps_are_compared_with_the_same_step_of_the_same_task_alone():
    # Each bucket holds two values, which stand one standard deviation from their mean whatever they are.
    steps = [
        a_step(index=0, outcome=1),
        a_step(index=1, outcome=50),
        a_step(index=0, outcome=-1),
        a_step(index=1, outcome=60),
        a_step(task="other", index=0, outcome=1000),
        a_step(task="other", index=0, outcome=900),
    ]
    assert step_group(steps) == pytest.approx([1, -1, -1, 1, 1, -1], abs=1e-5)


def test_a_bucket_of_one_gives_zero_and_not_its_raw_value():
    assert step_group([a_step(outcome=2), a_step(index=1, outcome=-1)]) == [0.0, 0.0]


def test_a_bucket_of_equal_values_gives_exactly_zero():
    # 0.1 three times has the mean 0.10000000000000002 when summed plainly.
    assert step_group([a_step(outcome=0.1)] * 3) == [0.0, 0.0, 0.0]


def test_an_abstention_is_not_a_vote_of_zero():
    # (1, None) has mean 1, not 1/2; nobody's vote leaves the outcome: R = 1, 0, -1, std sqrt(2/3)
    steps = [a_step(votes=(1, None)), a_step(votes=(None, None)), a_step(votes=(-1,))]
    assert step_group(steps) == pytest.approx([1.224745, 0.0, -1.224745], abs=1e-5)


def test_votes_weigh_as_much_as_is_asked():
    # R = 1 - 1/2 and 0 at half weight, 1 - 2 and 0 at double
    steps = [a_step(outcome=1, votes=(-1,)), a_step(outcome=0)]
    assert step_group(steps, vote_weight=0.5) == pytest.approx([1, -1], abs=1e-4)
    assert step_group(steps, vote_weight=2.0) == pytest.approx([-1, 1], abs=1e-4)


def test_nothing_gives_nothing():
    assert step_group([]) == []
