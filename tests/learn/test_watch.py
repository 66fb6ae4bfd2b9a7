"""The watch's arithmetic, and the watch on a store; the real server is in tests/recipes/test_watch.py."""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from nextstate.config import GateConfig, WatchConfig
from nextstate.learn import publish, watch
from nextstate.learn.gate import GateResult
from nextstate.learn.watch import Comparison, compare, comparisons, e_value, reference_counts, watch_loop
from nextstate.store import judging, learning, status, watching
from nextstate.store.store import Store
from nextstate.store.watching import LineVersion, SignedTurn
from nextstate.types import Feedback, FinishReason, SkipReason, TurnState, VersionState, Vote
from tests.rows import finished_turn, judged_turn

GOOD, BAD = True, False


def test_one_pair_by_hand():
    # A pair in which only the reference is good: s = 1, f = 1, so the stakes become 2 / (r + 1).
    assert e_value([BAD], [GOOD], known=1) == pytest.approx((2 / 1.5 + 2 / 1.2 + 2 / 1.05) / 3)
    # The other way round: 2 r / (r + 1).
    assert e_value([GOOD], [BAD], known=1) == pytest.approx((1 / 1.5 + 0.4 / 1.2 + 0.1 / 1.05) / 3)
    # What both have in common says nothing.
    assert e_value([GOOD, BAD], [GOOD, BAD], known=2) == 1.0


def test_a_group_of_more_references_by_hand(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "_SHARE", 2)
    # Of 6 known references the first verdict takes 3, of which 2 are good: it is bad, so s = 2, f = 2, of 4.
    assert reference_counts(2, known=6) == [3, 1]
    assert e_value([BAD], [GOOD, GOOD, BAD], known=6) == pytest.approx((4 / 3 + 4 / 2.4 + 4 / 2.1) / 3)


def test_no_verdict_is_no_evidence_and_a_used_up_reference_waits():
    assert e_value([], [], known=0) == 1.0
    assert e_value([BAD] * 50, [], known=0) == 1.0
    assert e_value([BAD] * 50, [GOOD] * 2, known=2) == e_value([BAD] * 2, [GOOD] * 2, known=2) > 1


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("known", [0, 3, 6])
def test_its_expectation_is_one_where_nothing_has_changed(rate: float, known: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "_SHARE", 2)
    total = 0.0
    for outcomes in itertools.product((GOOD, BAD), repeat=9):
        probability = math.prod(rate if good else 1 - rate for good in outcomes)
        total += probability * e_value(outcomes[:3], outcomes[3:], known=known)
    assert total == pytest.approx(1.0)


def test_its_expectation_is_below_one_for_a_better_version_and_above_for_a_worse_one():
    def expectation(live_rate: float) -> float:
        total = 0.0
        for live, reference in itertools.product((GOOD, BAD), repeat=2):
            probability = (live_rate if live else 1 - live_rate) * (0.6 if reference else 0.4)
            total += probability * e_value([live], [reference], known=1)
        return total

    assert expectation(0.8) < 1 < expectation(0.3)


def test_what_comes_later_does_not_change_what_was_bet():
    first = reference_counts(30, known=100)
    assert reference_counts(60, known=100)[:30] == first
    assert first[0] == 2
    assert reference_counts(1, known=10_000) == [watch.MOST_REFERENCES]


def turn(version: int, good: bool, at: float) -> SignedTurn:
    return SignedTurn(turn_id=int(at * 10), version=version, good=good, at=at)


def test_a_version_is_compared_with_the_whole_line_before_it_and_answers_for_what_was_built_on_it():
    line = [LineVersion(version=v, created_at=10.0 * v) for v in (3, 1, 0)]
    turns = [
        turn(0, GOOD, 1),
        turn(0, GOOD, 2),
        turn(1, BAD, 11),
        turn(2, GOOD, 21),
        turn(3, BAD, 31),
        turn(3, GOOD, 32),
    ]
    newest, first = compare(line, line[:-1], turns)
    assert (newest.version, newest.live_good, newest.live_bad) == (3, 1, 1)
    assert (newest.reference_good, newest.reference_bad) == (2, 1)
    # Version 2 is not on the line: somebody went back from it.
    assert (first.version, first.live_good, first.live_bad) == (1, 1, 2)
    assert (first.reference_good, first.reference_bad) == (2, 0)


def test_the_reference_is_read_from_the_newest_back_and_late_ones_come_behind():
    line = [LineVersion(version=1, created_at=10.0), LineVersion(version=0, created_at=0.0)]
    early = [turn(0, BAD, 1), turn(0, GOOD, 2)]
    live = [turn(1, BAD, 11)]
    [found] = compare(line, line[:-1], [*early, *live])
    assert found.e_value == e_value([BAD], [GOOD], known=2)
    [with_late] = compare(line, line[:-1], [*early, *live, turn(0, BAD, 12)])
    assert with_late.e_value == found.e_value
    assert with_late.reference_bad == 2


@pytest.mark.parametrize(
    ("live", "reference", "evidence", "decided"),
    [(10, 10, 100.0, True), (9, 99, 1e6, False), (99, 9, 1e6, False), (10, 10, 99.0, False)],
)
def test_it_decides_by_evidence_and_never_on_few_verdicts(live: int, reference: int, evidence: float, decided: bool):
    found = Comparison(
        version=1, live_good=0, live_bad=live, reference_good=reference, reference_bad=0, e_value=evidence
    )
    assert found.decides(WatchConfig()) is decided


# -- on a store -------------------------------------------------------------------------------------------------------


def answered(store: Store, version: int, vote: Vote | None, **changes: Any) -> int:
    return judged_turn(store, vote, **{"reply_versions": (version, version), **changes})  # type: ignore[arg-type]


def make_version(store: Store, *, promote: bool = True) -> int:
    """A version that was trained on one turn and serves."""
    answered(store, store.read_now(learning.serving_version), Vote.GOOD)
    update_id = store.write_now(learning.start_update, limit=100)
    version = store.read_now(learning.load_update, update_id).version
    store.write_now(learning.finish_update, update_id, artifact=f"versions/{version}", metrics={})
    if promote:
        store.write_now(learning.promote, version, {"divergence": 0.1})
    return version


def state(store: Store, version: int) -> str:
    return str(store.read_now(learning.version_row, version).state)


def test_only_signed_turns_of_one_version_count(store: Store):
    good, bad = answered(store, 0, Vote.GOOD), answered(store, 1, Vote.BAD)
    answered(store, 0, Vote.NEUTRAL)
    answered(store, 0, None)
    answered(store, 0, Vote.BAD, reply_versions=(0, 1))
    found = store.read_now(watching.signed_turns)
    assert [(one.turn_id, one.version, one.good) for one in found] == [(good, 0, True), (bad, 1, False)]


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ABORTED])
def test_a_broken_answer_counts_for_nobody_whatever_is_said_about_it(store: Store, finish: FinishReason):
    turn_id = finished_turn(store, finish_reason=finish)
    store.write_now(judging.add_feedback, turn_id, Feedback(value=Vote.BAD))
    assert store.read_now(watching.signed_turns) == []


def test_feedback_counts_and_overrules_the_judge_in_the_same_place(store: Store):
    first, second = answered(store, 0, Vote.GOOD), answered(store, 0, Vote.GOOD)
    before = store.read_now(watching.newest_signal)
    store.write_now(judging.add_feedback, first, Feedback(value=Vote.BAD))
    found = store.read_now(watching.signed_turns)
    assert [(one.turn_id, one.good) for one in found] == [(first, False), (second, True)]
    assert store.read_now(watching.newest_signal) != before


class FakeEngine:
    """Loads and serves without weights."""

    version = 0

    def serve_version(self, version: int) -> None:
        self.version = version


async def loops_until(store: Store, engine: FakeEngine, done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real publisher and the real watch, with a gate that lets everything pass."""

    async def passes(*_: Any, **__: Any) -> GateResult:
        return GateResult(passed=True, why="passed", measured={})

    monkeypatch.setattr(publish, "examine", passes)
    monkeypatch.setattr(watch, "_POLL_S", 0.01)
    tasks = [
        asyncio.create_task(watch_loop(store, WatchConfig())),
        asyncio.create_task(publish.publish_loop(store, engine, Path(), GateConfig(), exact=True)),  # type: ignore[arg-type]
    ]
    try:
        async with asyncio.timeout(20):
            while not done():
                for task in tasks:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.02)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_bad_version_and_what_was_built_on_it_go_and_the_one_before_serves(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    for _ in range(30):
        answered(store, 0, Vote.GOOD)
    trained_good = make_version(store)
    bad = make_version(store)
    for _ in range(8):
        answered(store, bad, Vote.BAD)
    child = make_version(store)
    for _ in range(8):
        answered(store, child, Vote.BAD)
    last = max(one.turn_id for one in store.read_now(watching.signed_turns))
    engine = FakeEngine()
    await loops_until(store, engine, lambda: store.read_now(learning.serving_version) == trained_good, monkeypatch)
    assert engine.version == trained_good
    assert [state(store, version) for version in (bad, child)] == [VersionState.ROLLED_BACK] * 2
    gate = store.read_now(learning.version_row, bad).gate
    assert gate["watch"]["version"] == bad
    assert gate["watch"]["e_value"] >= 100
    assert "verdicts are good since version 2" in gate["why"]
    with pytest.raises(LookupError, match="the watch took version 2 back"):
        store.write_now(learning.roll_back, bad)
    found = store.read_now(status.status)
    assert found.accounted_for
    assert SkipReason.VERSION_REJECTED in found.left_out
    assert store.read_now(status.show_turn, last).state == TurnState.JUDGED  # not trained yet, and not lost
    # What was said since is no evidence against the version that serves again.
    assert all(one.version == trained_good and one.e_value < 100 for one in store.read_now(comparisons))


async def test_an_update_that_ends_after_its_parent_has_gone_gives_its_turns_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    for _ in range(30):
        answered(store, 0, Vote.GOOD)
    bad = make_version(store)
    turn_id = answered(store, bad, Vote.BAD)
    update_id = store.write_now(learning.start_update, limit=100)
    for _ in range(15):
        answered(store, bad, Vote.BAD)
    engine = FakeEngine()
    await loops_until(store, engine, lambda: store.read_now(learning.serving_version) == 0, monkeypatch)
    store.write_now(learning.finish_update, update_id, artifact="versions/2", metrics={})
    await loops_until(store, engine, lambda: store.read_now(learning.candidate) is None, monkeypatch)
    assert (engine.version, state(store, 2)) == (0, VersionState.REJECTED)
    assert store.read_now(status.show_turn, turn_id).state == TurnState.JUDGED
    assert store.read_now(status.status).updates == {"done": 1, "superseded": 1}


def test_a_version_whose_first_verdicts_are_out_of_sight_is_watched_no_longer(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    answered(store, 0, Vote.GOOD)
    version = make_version(store)
    monkeypatch.setattr(watching, "MAX_VERDICTS", 3)
    answered(store, version, Vote.BAD)
    assert [one.version for one in store.read_now(comparisons)] == [version]
    for _ in range(2):
        answered(store, version, Vote.BAD)
    assert store.read_now(comparisons) == []


def test_nothing_is_taken_back_while_another_version_waits_for_the_gate(store: Store):
    bad = make_version(store)
    make_version(store, promote=False)
    with pytest.raises(LookupError, match="version 2 waits"):
        store.write_now(learning.take_back, bad, "worse", {})
    assert not store.read_now(learning.goes_back)


def test_where_the_version_before_is_damaged_the_one_before_that_is_asked(store: Store):
    _, parent, bad = (make_version(store) for _ in range(3))
    assert store.write_now(learning.take_back, bad, "worse", {"e_value": 1e3}) == parent
    assert store.write_now(learning.go_back) is None  # it has been asked
    store.write_now(learning.reject, parent, "its files are damaged", {})
    assert store.read_now(learning.goes_back)
    assert store.write_now(learning.go_back) == 1
    store.write_now(learning.promote, 1, {})
    assert not store.read_now(learning.goes_back)
