from pathlib import Path

import pytest

from nextstate.export.rows import Kind, NotExported

PAGE = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text()


@pytest.mark.parametrize("reason", NotExported)
def test_every_reason_for_not_exporting_a_turn_is_documented(reason: NotExported):
    assert f"| `{reason}` |" in PAGE


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_export_is_documented(kind: Kind):
    assert f"nextstate export {kind}" in PAGE
