from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.people import experiment

RUNNER = CliRunner()


def a_record(folder: Path, method: str, seed: int, met: str) -> None:
    record = {
        "personas": ["teacher"],
        "method": method,
        "seed": seed,
        "round_sessions": 3,
        "first_answers": {"teacher": {"met": met}},
    }
    (folder / f"teacher-{method}-{seed}.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--persona", "pupil"], "there is no persona 'pupil'"),
        (["--method", "magic"], "there is no method 'magic'"),
        (["--joint", "--persona", "teacher"], "--joint is for all personas at once"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_is_loaded(options: list[str], said: str):
    found = RUNNER.invoke(app, ["eval", "people", *options])
    assert found.exit_code == 1
    assert said in found.output


def test_runs_that_have_their_records_are_shown_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a run was made again")

    monkeypatch.setattr(experiment, "run", never)
    a_record(tmp_path, "none", 4, "#.....")
    a_record(tmp_path, "none", 5, "..###.")
    options = ["--persona", "teacher", "--method", "none", "--seeds", "2", "--first-seed", "4", "--sessions", "6"]
    found = RUNNER.invoke(app, ["eval", "people", *options, "--out", str(tmp_path), "--json"])
    assert found.exit_code == 0
    (cell,) = json.loads(found.output)
    assert cell["until"] == [None, 5]
    assert cell["first_round"] == [pytest.approx(1 / 3), pytest.approx(1 / 3)]
    assert cell["at_the_end"] == [0.0, 0.5]  # the last two of six
    shown = RUNNER.invoke(app, ["eval", "people", *options, "--out", str(tmp_path)])
    assert "5.5" in shown.output  # the mean of 6, where it never stuck, and 5
