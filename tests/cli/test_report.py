from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nextstate.cli.main import app
from nextstate.store import learning
from nextstate.store.store import Store
from nextstate.types import Vote
from tests.rows import judged_turn


@pytest.fixture
def data(store: Store, tmp_path: Path) -> Path:
    """A version from one bad turn, and a good one that waits."""
    judged_turn(store, Vote.BAD)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={"turns": 1})
    store.write_now(learning.promote, 1, {})
    judged_turn(store, Vote.GOOD)
    return tmp_path


def run(data: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["report", "--data", str(data), *options], env={"COLUMNS": "200"})


def test_a_report_is_for_people_for_programs_and_for_a_browser(data: Path):
    assert "version 1 serves" in run(data).stdout
    assert run(data, "--text").stdout == run(data).stdout
    assert json.loads(run(data, "--json").stdout)["said"]["total"] == 2
    assert run(data, "--html").stdout.startswith("<!doctype html>")


@pytest.mark.parametrize(("form", "begins"), [("--html", "<!doctype html>"), ("--json", "{"), ("--text", "")])
def test_a_report_is_written_to_one_file(data: Path, tmp_path: Path, form: str, begins: str):
    file = tmp_path / "report"
    result = run(data, form, "--out", str(file))
    assert (result.exit_code, result.stdout) == (0, "")
    assert str(file) in result.stderr.replace("\n", "")
    assert file.read_text().startswith(begins)
    assert "a fox?" in file.read_text() or form == "--text"


def test_examples_can_be_left_out(data: Path):
    assert "a fox?" in run(data, "--json").stdout
    assert "a fox?" not in run(data, "--json", "--no-examples").stdout


def test_a_report_is_of_one_version_or_since_a_day(data: Path):
    assert [line["version"] for line in json.loads(run(data, "--json", "--version", "1").stdout)["versions"]] == [1]
    assert json.loads(run(data, "--json", "--since", "2001-01-01").stdout)["counts"]["turns"] == 4
    assert json.loads(run(data, "--json", "--since", "2999-01-01").stdout)["counts"]["turns"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--html", "--json"), "exclude one another"),
        (("--version", "1", "--since", "2026-11-01"), "exclude one another"),
        (("--version", "9"), "there is no version 9. `nextstate versions list` shows"),
        (("--json", "--out", "/nowhere/at/all"), "cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_an_error_that_says_what_to_do(data: Path, options: tuple[str, ...], says: str):
    result = run(data, *options)
    assert result.exit_code == 1
    assert says in result.stderr
