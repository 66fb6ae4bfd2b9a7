from __future__ import annotations

import pytest
from benchmarks.latency import Stream, condition, summary

WINDOWS = {"update": [(10.0, 20.0)], "publish": [(20.0, 21.0), (30.0, 31.0)], "judge": [(19.0, 25.0)]}


@pytest.mark.parametrize(
    ("wait", "found"),
    [
        ((1.0, 2.0), "idle"),
        ((9.0, 10.0), "idle"),  # it ended as the update began
        ((9.9, 10.1), "update"),
        ((12.0, 13.0), "update"),
        ((19.5, 19.9), "update"),  # a verdict was being made as well; the update claims more
        ((19.9, 20.1), "publish"),
        ((29.0, 40.0), "publish"),
        ((21.0, 22.0), "judge"),
    ],
)
def test_a_wait_belongs_to_the_strongest_condition_that_it_touches(wait: tuple[float, float], found: str):
    assert condition(wait, WINDOWS) == found


def test_waits_are_summed_up_by_condition_in_milliseconds():
    idle = Stream(sent_at=1.0, arrivals=(1.5, 1.75, 2.75), fingerprints=("v0",) * 3)
    learning = Stream(sent_at=9.0, arrivals=(11.0, 13.0), fingerprints=("v0", "v0"))
    found = summary([idle, learning], WINDOWS)
    assert found["idle"]["first_ms"] == {"count": 1, "p50": 500.0, "p99": 500.0, "max": 500.0}
    assert found["idle"]["gap_ms"] == {"count": 2, "p50": 250.0, "p99": 1000.0, "max": 1000.0}
    assert found["update"]["first_ms"]["p50"] == 2000.0
    assert found["update"]["gap_ms"]["p50"] == 2000.0
    assert found["publish"]["gap_ms"] == {"count": 0, "p50": None, "p99": None, "max": None}


def test_a_stream_knows_the_gap_in_which_its_version_changed():
    stream = Stream(sent_at=0.0, arrivals=(1.0, 2.0, 3.0, 4.0), fingerprints=("v0", "v0", "v1", "v1"))
    assert stream.switches == [(2.0, 3.0)]
    assert Stream(sent_at=0.0, arrivals=(), fingerprints=()).switches == []
