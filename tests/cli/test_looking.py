"""Commands that look: a sentence or a table for people, --json for programs, and no change to anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.store import learning, turns
from nextstate.store.store import Store, note
from nextstate.types import SkipReason, TurnState, Vote
from tests.rows import finished_turn, judged_turn

ANSWER = "use [/bold] and [red] as they are"
"""What a terminal's markup would swallow, or choke on."""


@pytest.fixture
def data(store: Store, tmp_path: Path) -> Path:
    """Turns 1 to 6: a trained one and its follow-up, a judged one and its follow-up, one waiting, one left out.

    The follow-ups of the first two were never answered.
    """
    judged_turn(store, Vote.BAD, answer={"role": "assistant", "content": ANSWER})
    update_id = store.write_now(learning.start_update, limit=8)
    metrics = {"turns": 1, "policy_gradient": 0.25}
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics=metrics)
    store.write_now(learning.promote, 1, {"probe_difference": 2e-6, "divergence": 0.125})
    judged_turn(store, Vote.GOOD)
    finished_turn(store)
    store.write_now(turns.leave_out, [finished_turn(store)], SkipReason.TRUNCATED, "It was too long.")
    return tmp_path


def ask(data: Path, *command: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, [*command, "--data", str(data)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    return result.stdout


def ask_json(data: Path, *command: str) -> Any:
    return json.loads(ask(data, *command, "--json"))


def test_status_counts_every_turn_once(data: Path):
    found = ask_json(data, "status")
    assert found["turns"] == 6
    assert found["trained"] == 1
    assert found["waiting"] == {"being_answered": 2, "nothing_followed_yet": 1, "waits_for_update": 1}
    assert found["left_out"] == {"truncated": 1}
    assert found["verdicts"] == {"bad": 1, "good": 1}
    assert found["updates"] == {"done": 1}
    assert found["accounted_for"] is True
    assert found["rolled_back"] == []
    assert [(one["version"], one["live_good"], one["reference_bad"]) for one in found["watch"]] == [(1, 0, 1)]


def test_status_says_the_same_to_people(data: Path):
    text = ask(data, "status")
    assert "version 1 serves; 6 turns in 4 sessions" in text
    for reason in ("waits_for_update", "truncated", "1 bad", "1 good", "1 done"):
        assert reason in text


def test_turns_are_listed_newest_first_and_can_be_narrowed(data: Path):
    assert [turn["turn_id"] for turn in ask_json(data, "turns", "list")] == [6, 5, 4, 3, 2, 1]
    assert [turn["turn_id"] for turn in ask_json(data, "turns", "list", "--limit", "2", "--before", "4")] == [3, 2]
    assert [turn["turn_id"] for turn in ask_json(data, "turns", "list", "--state", "trained")] == [1]
    left_out = ask_json(data, "turns", "list", "--reason", "truncated")
    assert [(turn["state"], turn["reason"]) for turn in left_out] == [(TurnState.LEFT_OUT, "truncated")]


def test_an_answer_is_shown_as_it_is_and_not_read_as_markup(data: Path):
    assert ANSWER in ask(data, "turns", "list")
    assert ANSWER in ask(data, "turns", "show", "1")


def test_a_turn_is_shown_with_what_followed_and_what_became_of_it(data: Path):
    text = ask(data, "turns", "show", "1")
    assert "user: a fox?" in text
    assert "next, user: too long" in text
    assert "verdict bad by test" in text
    assert "hint: be brief, please" in text
    assert "Turn 1 was trained in update 1, which made version 1." in text
    shown = ask_json(data, "turns", "show", "1")
    assert shown["answer"] == ANSWER
    assert shown["next_state"] == [{"role": "user", "content": "too long"}]
    assert [verdict["value"] for verdict in shown["verdicts"]] == [-1]


@pytest.mark.parametrize(
    ("turn_id", "says"),
    [
        ("1", "was trained in update 1"),
        ("2", "it is being answered right now"),
        ("3", "waits for the next update"),
        ("5", "nothing has followed it yet"),
        ("6", "was left out (truncated): It was too long."),
    ],
)
def test_why_is_one_sentence(data: Path, turn_id: str, says: str):
    assert says in ask(data, "turns", "why", turn_id)


def test_versions_are_listed_with_what_made_them_and_what_the_gate_measured(data: Path):
    base, first = ask_json(data, "versions", "list")
    assert first["watch"]["version"] == 1
    assert base["watch"] is None
    assert (base["version"], base["state"], base["parent_version"]) == (0, "retired", None)
    assert (first["version"], first["state"], first["parent_version"]) == (1, "serving", 0)
    assert first["gate"] == {"probe_difference": 2e-6, "divergence": 0.125}
    text = ask(data, "versions", "list")
    for cell in ("serving", "policy_gradient 0.2500", "0.1250", "2.0e-06", "passed"):
        assert cell in text


def test_a_version_is_shown_with_its_turns_the_gate_the_watch_and_its_history(data: Path):
    text = ask(data, "versions", "show", "1")
    for part in (
        *("version 1: serving, built on version 0", "update 1 (done)", "on 1 turns", "turn 1: bad, trained"),
        *("policy_gradient: 0.25", "probe_difference: 2e-06", "divergence: 0.125"),
        *("watch: 0 of 0 good, 1 of 2 before, e 1", "promoted: version 1"),
    ):
        assert part in text
    shown = ask_json(data, "versions", "show", "1")
    assert shown["turns"] == [{"turn_id": 1, "state": "trained", "reason": None, "reward": -1}]
    assert [event["kind"] for event in shown["history"]] == ["promoted"]
    assert shown["watch"]["e_value"] == 1.0
    assert "version 0: retired, the base" in ask(data, "versions", "show", "0")


def test_a_version_that_the_watch_took_back_says_so_everywhere(data: Path, store: Store):
    evidence = {"live_good": 1, "live_bad": 19, "reference_good": 30, "reference_bad": 3, "e_value": 512.0}
    store.write_now(learning.take_back, 1, "1 of 20 verdicts are good", evidence)
    assert ask_json(data, "status")["rolled_back"] == []  # until the one before it serves
    store.write_now(learning.promote, 0, {})
    assert ask_json(data, "status")["rolled_back"] == [1]
    assert "rolled back by the watch: 1; `nextstate versions show 1` says why" in ask(data, "status")
    assert "1 of 20 good, 30 of 33 before, e 512" in ask(data, "versions", "list")
    text = ask(data, "versions", "show", "1")
    for part in (
        *("version 1: rolled_back", "turn 1: bad, left_out (version_rejected)", "why: 1 of 20 verdicts are good"),
        *("watch: 1 of 20 good", "watch_rolled_back: version 1", "rollback_asked: version 0, from_version 1"),
    ):
        assert part in text


@pytest.mark.parametrize("command", [("turns", "show", "99"), ("turns", "why", "99")])
def test_a_turn_that_does_not_exist_is_an_error_that_says_where_to_look(data: Path, command: tuple[str, ...]):
    result = CliRunner().invoke(app, [*command, "--data", str(data)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "there is no turn 99" in result.stderr
    assert "nextstate turns list" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("turns", "list"),
        ("turns", "show", "1"),
        ("turns", "why", "1"),
        ("versions", "list"),
        ("versions", "show", "1"),
    ],
)
def test_looking_does_not_make_a_data_folder(tmp_path: Path, command: tuple[str, ...]):
    result = CliRunner().invoke(app, [*command, "--data", str(tmp_path / "none")], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "holds no nextstate data" in result.stderr
    assert not (tmp_path / "none").exists()


def test_status_says_why_nothing_is_learned(data: Path, store: Store):
    assert ask_json(data, "status")["not_learning"] is None
    store.write_now(note, "trainer_refused", why="There is no room.")
    assert ask_json(data, "status")["not_learning"] == "There is no room."
    assert "not learning: There is no room." in ask(data, "status")


def test_the_plan_is_shown_with_what_is_other_than_configured(data: Path, tiny_model_path: Path, store: Store):
    step = {"tokens": 64, "seconds": 0.5, "planned_bytes": 2_000_000_000, "measured_bytes": 1_000_000_000}
    store.write_now(note, "stress_step", **step)
    text = ask(data, "learn", "plan", "--model", str(tiny_model_path))
    assert "turns of up to 2048 tokens, micro-batches of 1024" in text  # the model's context
    assert "the last stress step: 64 tokens took 1.00 GB, planned 2.00 GB" in text
    plan = ask_json(data, "learn", "plan", "--model", str(tiny_model_path))
    assert plan["refusal"] is None
    assert plan["last_stress_step"] == step


def test_a_plan_that_does_not_fit_ends_with_what_to_do(
    data: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NEXTSTATE_LEARN__MEMORY_GB", "0.01")
    command = ["learn", "plan", "--model", str(tiny_model_path), "--data", str(data)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "0.01 GB are available to the trainer (learn.memory_gb)" in result.stderr
    asked = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(asked.stdout)["refusal"] is not None
