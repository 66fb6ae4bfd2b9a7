from __future__ import annotations

import time

import pytest

from nextstate.store import learning
from nextstate.store.pulse import pulse
from nextstate.store.store import Store, note
from nextstate.types import WaitReason
from tests.rows import finished_turn, judged_turn


def test_an_empty_store_has_no_signs_of_life(store: Store):
    found = store.read_now(pulse)
    assert set(found.waited_s.values()) == {0.0}
    assert (found.turns_since_verdict, found.verdict_at, found.trained_at) == (0, None, None)
    assert (found.events, found.last_update, found.last_gate) == ({}, {}, {})


def test_it_says_how_long_work_has_waited_and_what_came_of_it_last(store: Store, monkeypatch: pytest.MonkeyPatch):
    began = time.time()
    judged_turn(store)  # and the request that brought its next state, which is being answered
    finished_turn(store)
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    found = store.read_now(pulse)
    assert found.waited_s[WaitReason.WAITS_FOR_UPDATE] == pytest.approx(later - began, abs=5)
    assert found.waited_s[WaitReason.WAITS_FOR_JUDGE] == 0
    assert found.turns_since_verdict == 2
    assert found.verdict_at == pytest.approx(began, abs=5)
    update_id = store.write_now(learning.start_update, limit=8)
    metrics = {"distillation": 0.5, "seconds": 3, "hints_read": {"1": [0]}}
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics=metrics)
    store.write_now(learning.promote, 1, {"divergence": 0.25, "why": "passed"})
    store.write_now(note, "loop_failed", loop="judge")
    found = store.read_now(pulse)
    assert found.trained_at == later
    assert found.last_update == {"distillation": 0.5, "seconds": 3.0}
    assert found.last_gate == {"divergence": 0.25}
    assert found.events == {"promoted": 1, "loop_failed": 1}
