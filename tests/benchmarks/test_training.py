from __future__ import annotations

import pytest
from benchmarks.training import LENGTHS, TURNS, made_up_lengths


@pytest.mark.parametrize("lengths", LENGTHS)
def test_both_spreads_of_lengths_hold_the_same_number_of_tokens(lengths: str):
    pairs = made_up_lengths(lengths)
    assert len(pairs) == TURNS
    assert sum(prompt for prompt, _ in pairs) == 3200  # 16 * 200
    assert sum(reply for _, reply in pairs) == 1600  # 16 * 100
