from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.store.keys import add_key
from nextstate.store.store import Store
from tests.rows import judged_turn


def test_rows_go_to_standard_output_and_the_count_beside(store: Store, tmp_path: Path):
    key = store.write_now(add_key, "laptop", "ann", learn=True)
    judged_turn(store)
    result = CliRunner().invoke(app, ["export", "turns", "--data", str(tmp_path)])
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["label"] is False
    assert result.stderr == "1 rows; left out: 1 unfinished.\n"
    assert key[:11] not in result.output


def test_a_file_is_there_whole_or_not_at_all(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    judged_turn(store)

    def breaks(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nextstate.export.files.write_jsonl", breaks)
    file = tmp_path / "out" / "rows.jsonl"
    file.parent.mkdir()
    result = CliRunner().invoke(app, ["export", "turns", "--data", str(tmp_path), "--out", str(file)])
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "parquet"], "a Parquet file cannot go to standard output"),
        (["--json"], "cannot hold both the rows and --json"),
        (["--out", "/none/rows"], "/none/rows cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_said(store: Store, tmp_path: Path, options: list[str], says: str):
    result = CliRunner().invoke(app, ["export", "turns", "--data", str(tmp_path), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert says in result.stderr


@pytest.mark.parametrize("kind", ["turns", "preferences", "distillation"])
def test_exporting_does_not_make_a_data_folder(tmp_path: Path, kind: str):
    result = CliRunner().invoke(app, ["export", kind, "--data", str(tmp_path / "none")], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "holds no nextstate data" in result.stderr
    assert not (tmp_path / "none").exists()
