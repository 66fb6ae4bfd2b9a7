from pathlib import Path

import pytest

from nextstate.types import SkipReason, WaitReason

PAGE = Path(__file__).parents[2] / "docs" / "left-out-turns.md"


@pytest.mark.parametrize("reason", [*SkipReason, *WaitReason])
def test_every_reason_for_not_training_a_turn_is_documented(reason: str):
    assert f"\n### {reason}\n" in PAGE.read_text()


def test_no_reason_is_documented_that_does_not_exist():
    headings = {line.removeprefix("### ") for line in PAGE.read_text().splitlines() if line.startswith("### ")}
    assert headings == {*SkipReason, *WaitReason}
