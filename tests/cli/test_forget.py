from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.store import learning, status
from nextstate.store.store import Store
from tests.rows import judged_turn


@pytest.fixture
def data(store: Store, tmp_path: Path) -> Path:
    """Turns 1 and 2 of one session, made version 1; turns 3 and 4 of another, made version 2, which serves."""
    for version in (1, 2):
        judged_turn(store)
        update_id = store.write_now(learning.start_update, limit=8)
        store.write_now(learning.finish_update, update_id, artifact=f"versions/{version}", metrics={})
        store.write_now(learning.promote, version, {})
    return tmp_path


def run(data: Path, *command: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [*command, "--data", str(data)], input=answer, env={"COLUMNS": "200"})


def test_it_asks_first_and_no_means_no(data: Path, store: Store):
    result = run(data, "forget", "--turn", "1", answer="n\n")
    assert result.exit_code == 1
    assert "2 turns will be forgotten, for good; of these, 1 were trained." in result.stdout
    assert "Versions that go back to them: 1, 2." in result.stdout
    assert "Nothing was forgotten." in result.stdout
    assert store.read_now(status.status).left_out == {}


def test_a_turn_is_forgotten_and_status_says_what_still_goes_back_to_it(data: Path):
    result = run(data, "forget", "--turn", "3", answer="y\n")
    assert result.exit_code == 0, result.stderr
    assert "2 turns forgotten; their texts and tokens are removed." in result.stdout
    assert "Versions that go back to them: 2." in result.stdout
    assert "version 2 goes back to turns that were forgotten since" in run(data, "status").stdout
    assert "goes back to turns that were forgotten since" in run(data, "versions", "show", "2").stdout
    assert "goes back to" not in run(data, "versions", "show", "1").stdout
    assert "turn 3: no verdict, left_out (forgotten)" in run(data, "versions", "show", "2").stdout
    assert "was left out (forgotten)" in run(data, "turns", "why", "3").stdout
    assert "the fox" not in run(data, "turns", "show", "3").stdout


def test_with_retrain_the_newest_clean_version_is_asked_to_serve(data: Path, store: Store):
    result = run(data, "forget", "--turn", "3", "--retrain", "--yes")
    assert result.exit_code == 0, result.stderr
    assert "Version 1 serves as soon as it has passed the gate" in result.stdout
    assert store.read_now(learning.candidate).version == 1
    assert "is being replaced already" in run(data, "forget", "--retrain").stdout


def test_programs_get_the_same(data: Path):
    found = json.loads(run(data, "forget", "--turn", "1", "--retrain", "--yes", "--json").stdout)
    retraining = {"version": 0, "retired": [1, 2], "turns": 1}
    assert found == {
        **{"turns": 2, "trained": 1, "without_evidence": 0, "stopped_updates": [], "versions": [1, 2]},
        **{"scrubbed": True, "retraining": retraining},
    }
    assert json.loads(run(data, "status", "--json").stdout)["marked"] == [1, 2]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ((), "nothing was named"),
        (("--turn", "1", "--user", "ann"), "--turn names one turn"),
        (("--turn", "1", "--json"), "it needs --yes"),
        (("--turn", "99"), "there is no turn 99"),
        (("--session", "none"), "there is no session 'none'"),
        (("--user", "nobody"), "there is no turn of a user 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_forgotten(
    data: Path, store: Store, command: tuple[str, ...], says: str
):
    result = run(data, "forget", *command)
    assert result.exit_code == 1
    assert says in result.stderr
    assert store.read_now(status.status).left_out == {}
