from __future__ import annotations

import json
from pathlib import Path

import pytest

from nextstate.judge.labelled import LabelledDataError, read_labelled
from nextstate.types import Vote

ROW = {
    "request": "Name a fruit.",
    "response": "Stone.",
    "next_state": [{"role": "user", "content": "That is no fruit."}],
    "label": -1,
    "directive": False,
    "kind": "correction",
    "group": "g1",
}


def written(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_row_becomes_a_turn_and_a_label(tmp_path: Path):
    (found,) = read_labelled(written(tmp_path / "x.jsonl", ROW, ""), first_id=40)
    assert (found.turn.turn_id, found.turn.answer, found.label) == (40, "Stone.", Vote.BAD)
    assert found.turn.history == ({"role": "user", "content": "Name a fruit."},)
    assert found.turn.next_state[0]["content"] == "That is no fruit."
    assert (found.kind, found.directive, found.group) == ("correction", False, "g1")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2: this is not JSON"),
        ("[1]", "line 2: there is a list"),
        ({**ROW, "label": 2}, "line 2: 'label' is 2"),
        ({**ROW, "label": "good"}, "line 2: 'label' is str"),
        ({**ROW, "label": True}, "line 2: 'label' is bool"),
        ({k: v for k, v in ROW.items() if k != "response"}, "line 2: the field 'response' is missing"),
        ({**ROW, "next_state": "no"}, "line 2: 'next_state' is str; it should be a list"),
        ({**ROW, "next_state": [{"role": "user"}]}, r"line 2: 'next_state\[0\]' is no message"),
        ({**ROW, "next_state": [ROW["next_state"][0], {"role": "boss", "content": "x"}]}, r"'next_state\[1\]'"),
        ({**ROW, "directive": "yes"}, "line 2: 'directive' is 'yes'"),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(tmp_path: Path, bad: object, says: str):
    with pytest.raises(LabelledDataError, match=says):
        read_labelled(written(tmp_path / "x.jsonl", ROW, bad))


def test_a_file_that_is_missing_empty_or_no_text_is_an_error(tmp_path: Path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, says in (
        (tmp_path / "missing.jsonl", "cannot be read"),
        (written(tmp_path / "empty.jsonl", "\n"), "has no rows"),
        (tmp_path / "binary", "cannot be read"),
    ):
        with pytest.raises(LabelledDataError, match=says):
            read_labelled(path)
