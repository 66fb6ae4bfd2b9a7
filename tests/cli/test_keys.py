"""`nextstate keys`: the key is shown once, and everything but the key ever after."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from nextstate.cli.main import app


def keys(data: Path, *command: str) -> Result:
    return CliRunner().invoke(app, ["keys", *command, "--data", str(data)], env={"COLUMNS": "200"})


def listed(data: Path) -> list[dict[str, object]]:
    return json.loads(keys(data, "list", "--json").stdout)


def test_the_first_key_can_be_made_before_the_first_start(tmp_path: Path):
    made = keys(tmp_path / "data", "add", "laptop")
    assert made.exit_code == 0, made.stderr
    assert re.fullmatch(r"ns-[\w-]{43}\n", made.stdout)  # alone, so that a script can take it
    assert "user 'laptop'" in made.stderr
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_keys_are_listed_without_what_they_open(tmp_path: Path):
    made = [keys(tmp_path, "add", "laptop", "--user", "ann").stdout.strip()]
    made.append(json.loads(keys(tmp_path, "add", "[red]", "--no-learn", "--json").stdout)["key"])
    keys(tmp_path, "revoke", "laptop")
    first, second = listed(tmp_path)
    assert (first["name"], first["user"], first["learn"]) == ("laptop", "ann", True)
    assert (second["name"], second["user"], second["learn"]) == ("[red]", "[red]", False)
    assert (first["revoked_at"] is None, second["revoked_at"] is None) == (False, True)
    table = keys(tmp_path, "list").stdout
    assert "[red]" in table
    for text in (table, keys(tmp_path, "list", "--json").stdout):
        assert "digest" not in text
        assert not any(key[11:] in text for key in made)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("add", "laptop"), "there is a key 'laptop' already"),
        (("add", "phone", "--user", ""), "No key was made"),
        (("revoke", "phone"), "no key 'phone'"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(tmp_path: Path, command: tuple[str, ...], says: str):
    keys(tmp_path, "add", "laptop")
    result = keys(tmp_path, *command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert says in " ".join(result.stderr.split())
    assert len(listed(tmp_path)) == 1


def test_looking_makes_no_folder(tmp_path: Path):
    for command in (("list",), ("revoke", "laptop")):
        assert keys(tmp_path / "none", *command).exit_code == 1
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "cannot be used" in keys(tmp_path / "file", "add", "laptop").stderr
