from pathlib import Path

import pytest

from nextstate.config import LearnConfig
from nextstate.engines import adapters, full
from nextstate.learn import checkpoint
from nextstate.learn.plan import SHORT_TURN

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_the_numbers_that_decide_are_those_of_the_code():
    assert f"`learn.keep_versions` ({LearnConfig().keep_versions})" in PAGE
    assert f"a turn of {SHORT_TURN} tokens" in PAGE
    assert f"versions that the engine holds beside the base | {adapters.SLOTS} | {full.SLOTS} |" in PAGE


@pytest.mark.parametrize("name", [checkpoint.OPTIMIZER_FILE, checkpoint.AVERAGE_FILE, checkpoint.PROBE_FILE])
def test_every_file_of_a_version_is_explained(name: str):
    assert f"\n  {name} " in PAGE
