"""The whole experiment with the tiny model, whose answers mean nothing: who talks, who learns, what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nextstate.judge.judge import EvidenceFirst
from nextstate.people import experiment
from nextstate.people.experiment import LEARNING, MEMORY_CORRECTIONS, METHODS, Outcome, Run, remembered, run, settings
from nextstate.people.personas import PERSONAS, TEACHER
from nextstate.people.tasks import Task
from nextstate.types import TurnToJudge, Verdict, Vote

SETTINGS = """
[engine]
dtype = "float32"
[learn]
batch_turns = 4
rank = 4
alpha = 8
learning_rate = 1e-2
[gate]
hold_out_every = 0
max_divergence = 50
max_perplexity_ratio = 1000
"""


class ByThanks:
    """Takes thanks for good and anything else for bad; the tiny model is no judge."""

    name = "by-thanks"

    async def verdict(self, turn: TurnToJudge) -> Verdict:
        good = "thank" in turn.next_state[-1]["content"].lower()
        value = Vote.GOOD if good else Vote.BAD
        return Verdict(turn_id=turn.turn_id, judge=self.name, value=value, reason="It was said.")


def some_tasks(count: int, *, seed: int, error_share: float = 0.0) -> Sequence[Task]:
    return [Task(problem=f"{seed % 97} + {n}?", steps=f"{seed} + {n}", planted_error=False) for n in range(count)]


@pytest.fixture
def make_run(tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(experiment, "make_judge", lambda *_: EvidenceFirst(ByThanks()))
    file = tmp_path / "settings.toml"
    file.write_text(SETTINGS)

    def make(plan: Run, folder: str = "run") -> Outcome:
        return asyncio.run(run(plan, tmp_path / folder, config_file=file, model=str(tiny_model_path), tasks=some_tasks))

    return make


def plan(**changes: Any) -> Run:
    return Run(**{"personas": (TEACHER,), "method": "hybrid", "seed": 1, "sessions": 4, "round_sessions": 2, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_from_end_to_end(make_run: Any, method: str):
    found = make_run(plan(method=method, answers=2))
    answers = found.first_answers["teacher"]
    assert len(answers) == 4
    versions = [answer.version for answer in answers]
    if method in ("none", "memory"):
        assert versions == [0, 0, 0, 0]
        assert found.updates == []
        assert set(found.turns) - {"trained"} == {"learning_off"}
    else:
        # What the first two sessions said is learned before the next two begin.
        assert versions[:2] == [0, 0]
        assert min(versions[2:]) >= 1
        assert [update["state"] for update in found.updates][-1] == "serving"
        # Nobody praises by chance, so each session has two answers that were complained about.
        assert found.verdicts == {(False, "bad"): 8}
        assert found.turns["trained"] == sum(update["turns"] for update in found.updates)
    assert sum(found.turns.values()) == 12  # of each session two answers, and the request with the last words


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(make_run: Any):
    joint = plan(personas=tuple(PERSONAS.values()), sessions=2, round_sessions=1)
    first, second = make_run(joint, "first"), make_run(joint, "second")
    assert first.first_answers == second.first_answers
    assert {name: len(answers) for name, answers in first.first_answers.items()} == dict.fromkeys(PERSONAS, 2)
    without_time = [[{k: v for k, v in u.items() if k != "seconds"} for u in f.updates] for f in (first, second)]
    assert without_time[0] == without_time[1]


def test_memory_is_the_newest_different_corrections_in_the_order_they_came():
    said = [f"wish {n}" for n in range(MEMORY_CORRECTIONS + 2)] + ["wish 3"]
    lines = (remembered(said) or "").splitlines()[1:]
    assert lines == ["- wish 2", *(f"- wish {n}" for n in range(4, MEMORY_CORRECTIONS + 2)), "- wish 3"]
    assert remembered([]) is None


def test_the_settings_in_the_package_are_valid_and_name_the_method(tmp_path: Path):
    config = settings(plan(method="binary", seed=9), tmp_path, config_file=LEARNING)
    assert (config.learn.objective, config.learn.seed) == ("binary", 9)
    assert config.gate.hold_out_every == 0
    assert settings(plan(method="none"), tmp_path).learn.objective == "hybrid"  # unused: nothing trains


def test_runs_are_named_by_who_how_and_seed():
    assert plan().name == "teacher-hybrid-1"
    assert plan(personas=tuple(PERSONAS.values()), method="none").name == "joint-none-1"
