from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.store.store import Store
from tests.rows import judged_turn


def ask(data: Path, *command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--data", str(data)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_learning_is_paused_and_resumed_and_status_says_so(store: Store, tmp_path: Path):
    judged_turn(store)
    assert "Learning is paused: nothing is trained" in ask(tmp_path, "pause", "learning")
    assert "Learning was paused already" in ask(tmp_path, "pause", "learning")
    assert "learning is paused since" in ask(tmp_path, "status").splitlines()[1]
    assert json.loads(ask(tmp_path, "status", "--json"))["paused_since"] > 0
    assert "Learning goes on; 1 judged turns wait for it." in ask(tmp_path, "resume", "learning")
    assert "was not paused" in ask(tmp_path, "resume", "learning")
    assert json.loads(ask(tmp_path, "status", "--json"))["paused_since"] is None
    assert "paused" not in ask(tmp_path, "status")
