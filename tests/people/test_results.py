from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from nextstate.errors import ConfigError
from nextstate.people import results
from nextstate.people.experiment import FirstAnswer, Outcome, Run
from nextstate.people.personas import TEACHER
from nextstate.people.wishes import Fault

PLAN = Run(personas=(TEACHER,), method="hybrid", seed=7, sessions=6, round_sessions=3)


def an_outcome(met: str) -> Outcome:
    answers = [
        FirstAnswer(
            fault=None if sign == "#" else Fault.NO_PRAISE,
            version=n // 3,
            finish="length" if n == 1 else "stop",
            text=f"answer {n}",
        )
        for n, sign in enumerate(met)
    ]
    return Outcome(
        first_answers={"teacher": answers},
        verdicts=Counter({(True, "good"): 4, (False, "bad"): 2}),
        turns={"trained": 5, "truncated": 1},
        updates=[],
        settings={"model": "m"},
    )


def test_a_record_holds_a_run():
    record = json.loads(json.dumps(results.as_json(PLAN, an_outcome(".#.###"), cpu_s=1.25)))
    assert record["first_answers"]["teacher"] == {
        "met": ".#.###",
        "cut": ".x....",
        "versions": [0, 0, 0, 1, 1, 1],
        "faults": {"no_praise": 2},
        "first": "answer 0",
        "last": "answer 5",
    }
    assert record["verdicts"] == [
        {"as_wished": False, "verdict": "bad", "count": 2},
        {"as_wished": True, "verdict": "good", "count": 4},
    ]
    assert (record["method"], record["seed"], record["cpu_s"]) == ("hybrid", 7, 1.2)


def test_a_cell_counts_what_never_stuck_as_all_sessions_and_says_so():
    records = [results.as_json(PLAN, an_outcome(met), cpu_s=1.0) for met in (".#.###", "......")]
    found = results.cell(records, "teacher")
    assert found is not None
    assert found.until == (6, None)
    assert found.sessions_until == (6, 6)
    assert found.censored == 1
    assert found.first_round == pytest.approx((1 / 3, 0.0))
    assert found.overall == pytest.approx((4 / 6, 0.0))
    assert found.at_the_end == (1.0, 0.0)  # the last 2 of 6
    assert results.cell(records, "student") is None


def test_agreement_adds_up_over_records():
    records = [results.as_json(PLAN, an_outcome("######"), cpu_s=1.0)] * 2
    assert results.agreement(records) == Counter({(True, "good"): 8, (False, "bad"): 4})


def test_a_run_that_has_its_record_is_not_made_again(tmp_path: Path):
    with results.claimed(tmp_path, PLAN.name) as write:
        assert write is not None
        write({"done": True})
    with results.claimed(tmp_path, PLAN.name) as write:
        assert write is None
    assert results.read(tmp_path) == [{"done": True}]
    assert [file.name for file in tmp_path.iterdir()] == ["teacher-hybrid-7.json"]


def test_of_two_at_once_one_makes_a_run(tmp_path: Path):
    with results.claimed(tmp_path, PLAN.name) as first, results.claimed(tmp_path, PLAN.name) as second:
        assert first is not None
        assert second is None


def test_a_run_that_broke_off_leaves_nothing_and_is_made_again(tmp_path: Path):
    with pytest.raises(RuntimeError), results.claimed(tmp_path, PLAN.name):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with results.claimed(tmp_path, PLAN.name) as write:
        assert write is not None


def test_a_damaged_record_is_named(tmp_path: Path):
    (tmp_path / "teacher-none-0.json").write_text("{")
    with pytest.raises(ConfigError, match="teacher-none-0"):
        results.read(tmp_path)
