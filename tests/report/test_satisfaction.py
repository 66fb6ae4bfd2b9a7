from __future__ import annotations

import pytest
from tests.report.accounts import START, signed

from nextstate.report.satisfaction import Mark, marks, satisfaction
from nextstate.report.stats import Rate


def test_verdicts_are_parted_in_the_order_in_which_they_were_given():
    found = satisfaction(signed(*[False] * 8, *[True] * 2, *[True] * 9, False, True))
    # 21 verdicts are two parts, of 10 and 11.
    assert [(one.start, one.end, one.rate) for one in found] == [
        (0, 10, Rate(hits=2, total=10)),
        (10, 21, Rate(hits=10, total=11)),
    ]
    assert (found[1].first_at, found[1].last_at) == (START + 600, START + 1200)


@pytest.mark.parametrize(("verdicts", "parts"), [(0, 0), (1, 1), (19, 1), (20, 2), (399, 39), (400, 40), (5000, 40)])
def test_a_part_has_at_least_ten_verdicts_and_there_are_at_most_forty(verdicts: int, parts: int):
    found = satisfaction(signed(*[True] * verdicts))
    assert len(found) == parts
    assert sum(one.rate.total for one in found) == verdicts
    assert all(one.rate.total >= min(10, verdicts) for one in found)


def test_a_version_is_marked_behind_the_verdicts_before_it():
    turns = signed(True, True, False)  # at 0, 60 and 120 seconds
    served = [(2, START + 90), (1, START), (0, START - 5), (3, START + 500)]
    assert marks(turns, served) == (
        Mark(version=1, after=0),
        Mark(version=2, after=2),
        Mark(version=3, after=3),
    )
    assert marks([], served) == ()
