from __future__ import annotations

from benchmarks.many_turns import UPDATE_TURNS, fill
from benchmarks.page import measure

from nextstate.store import learning, status
from nextstate.store.store import Store


async def test_a_small_store_is_measured_throughout():
    result = await measure(60)
    assert result["turns"] == 60
    assert len(result["looks"]) == 11
    assert all(look["bytes"] > 0 and look["p50_ms"] <= look["max_ms"] for look in result["looks"].values())
    assert result["report, --html"] > 0


def test_the_store_that_is_measured_is_one_that_could_be(store: Store):
    store.write_now(fill, 200, start=1.8e9)
    found = store.read_now(status.status)
    assert (found.turns, found.sessions, found.accounted_for) == (200, 40, True)
    assert found.trained == UPDATE_TURNS * found.updates["done"]
    assert found.version == store.read_now(learning.done_updates)
