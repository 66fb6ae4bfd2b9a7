from __future__ import annotations

import random
import sys

import pytest

from nextstate.errors import ConfigError
from nextstate.people.tasks import MAX_CHARS, make_tasks, with_error

STEPS = "Half of 48 is 48 / 2 = 24 clips.\nTogether she sold 48 + 24 = 72 clips."


def test_an_error_is_planted_in_the_last_result_and_nowhere_else():
    wrong = with_error(STEPS, random.Random(1))
    assert wrong is not None
    assert wrong != STEPS
    assert wrong.startswith("Half of 48 is 48 / 2 = 24 clips.\nTogether she sold 48 + 24 = ")
    assert int(wrong.split()[-2]) in (73, 74, 82)  # 72 and 1, 2 or 10


def test_a_result_in_money_can_be_wrong_too():
    assert with_error("He earned €627 + €1127 = €1754 in all.", random.Random(1)) in {
        f"He earned €627 + €1127 = €{number} in all." for number in (1755, 1756, 1764)
    }


def test_where_no_result_stands_no_error_is_planted():
    assert with_error("It is a matter of taste.", random.Random(1)) is None


def test_without_the_generator_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"nextstate\[people\]"):
        make_tasks(3, seed=0)


def test_tasks_are_short_different_and_the_same_for_the_same_seed():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym, which the extra people brings, is missing")
    tasks = make_tasks(40, seed=3, error_share=0.3)
    assert tasks == make_tasks(40, seed=3, error_share=0.3)
    assert tasks != make_tasks(40, seed=4, error_share=0.3)
    assert len({task.problem for task in tasks}) == 40
    assert max(len(task.problem) + len(task.steps) for task in tasks) <= MAX_CHARS
    # 40 draws at .3: 12 expected, 2.9 standard deviation; fewer where nothing could be made wrong
    assert 3 <= sum(task.planted_error for task in tasks) <= 21
    assert not any("final answer" in task.problem or "####" in task.steps for task in tasks)
