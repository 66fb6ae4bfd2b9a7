from __future__ import annotations

from dataclasses import replace

import pytest

from nextstate.store import judging, learning, status
from nextstate.store.store import Store
from nextstate.store.turns import Placement
from nextstate.types import Feedback, Hint, SkipReason, Source, TurnState, VersionState, Vote
from tests.rows import a_verdict, judged_turn, new_turn


def states(store: Store, *turn_ids: int) -> list[tuple[str, str | None]]:
    rows = [store.read_now(status.show_turn, turn_id) for turn_id in turn_ids]
    return [(row.state, row.reason) for row in rows]


def test_an_update_takes_the_oldest_turns_and_no_other_update_gets_them(store: Store):
    ids = [judged_turn(store) for _ in range(3)]
    first = store.read_now(learning.load_update, store.write_now(learning.start_update, limit=2))
    second = store.read_now(learning.load_update, store.write_now(learning.start_update, limit=2))
    assert [s.turn.turn_id for s in first.samples] == ids[:2]
    assert [s.turn.turn_id for s in second.samples] == ids[2:]
    assert (first.version, second.version) == (1, 2)


def test_one_session_does_not_fill_an_update_and_its_other_turns_wait(store: Store):
    long = [judged_turn(store)]
    session = store.read_now(status.show_turn, long[0]).session_id
    same = Placement(session_id=session, session_key=None, parent_turn_id=None, kind="branch", because="a test")
    long += [judged_turn(store, new=new_turn(placement=same)) for _ in range(4)]
    other = judged_turn(store)
    taken = []
    for _ in range(3):
        update_id = store.write_now(learning.start_update, limit=4, session_limit=2)
        taken.append([s.turn.turn_id for s in store.read_now(learning.load_update, update_id).samples])
    assert taken == [[*long[:2], other], long[2:4], long[4:]]


def test_a_turn_that_was_off_policy_is_left_out_with_how_far_and_stays_so(store: Store):
    far, near = judged_turn(store), judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    metrics = {"off_policy": {str(far): -2.345}}
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics=metrics)
    assert states(store, far, near) == [(TurnState.LEFT_OUT, SkipReason.OFF_POLICY), (TurnState.TRAINED, None)]
    assert "2.35 nats less likely" in store.read_now(status.show_turn, far).detail
    store.write_now(learning.reject, 1, "it drifted", {})
    assert [reason for _, reason in states(store, far, near)] == [SkipReason.OFF_POLICY, SkipReason.VERSION_REJECTED]


def test_a_sample_carries_the_reward_the_hint_and_the_request(store: Store):
    judged_turn(store, Vote.BAD)
    judged_turn(store, Vote.GOOD)
    update = store.read_now(learning.load_update, store.write_now(learning.start_update, limit=8))
    assert [(s.reward, s.hints) for s in update.samples] == [(-1, ("be brief, please",)), (1, ())]
    assert update.samples[0].messages == ({"role": "user", "content": "a fox?"},)


def test_a_sample_carries_the_most_trusted_hints_of_the_verdict_that_made_it_and_no_other(store: Store):
    turn_id = judged_turn(store, Vote.BAD)
    store.write_now(judging.add_feedback, turn_id, Feedback(value=Vote.BAD, words="no"))
    texts = ["in one sentence", "shorter than this", "as I asked before", "please, please"]
    hints = tuple(Hint(text=text, source=Source.USER) for text in texts)
    store.write_now(judging.write_verdict, replace(a_verdict(turn_id, Vote.BAD), hints=hints))
    update = store.read_now(learning.load_update, store.write_now(learning.start_update, limit=8))
    assert [s.hints for s in update.samples] == [tuple(texts[: learning.MAX_HINTS])]


def test_an_abandoned_update_gives_its_turns_back_and_its_version_number_is_not_used_again(store: Store):
    turn_id = judged_turn(store)
    store.write_now(learning.abandon_update, store.write_now(learning.start_update, limit=8), "killed")
    assert states(store, turn_id) == [(TurnState.JUDGED, None)]
    again = store.read_now(learning.load_update, store.write_now(learning.start_update, limit=8))
    assert (again.version, [s.turn.turn_id for s in again.samples]) == (2, [turn_id])


def test_a_promoted_version_serves_and_the_one_before_retires(store: Store):
    turn_id = judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={"turns": 1})
    assert store.read_now(learning.serving_version) == 0
    store.write_now(learning.promote, 1, {"divergence": 0.1})
    assert store.read_now(learning.serving_version) == 1
    assert [r.state for r in store.read_now(learning.list_versions)] == [VersionState.RETIRED, VersionState.SERVING]
    assert states(store, turn_id) == [(TurnState.TRAINED, None)]


def test_a_rejected_version_never_serves_and_its_turns_say_so(store: Store):
    turn_id = judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={})
    store.write_now(learning.reject, 1, "it drifted", {"divergence": 9.0})
    assert store.read_now(learning.serving_version) == 0
    assert states(store, turn_id) == [(TurnState.LEFT_OUT, SkipReason.VERSION_REJECTED)]


def serve(store: Store, *versions: int) -> None:
    """Versions that served one after the other."""
    for version in versions:
        judged_turn(store)
        update_id = store.write_now(learning.start_update, limit=8)
        assert store.read_now(learning.load_update, update_id).version == version
        store.write_now(learning.finish_update, update_id, artifact=f"versions/{version}", metrics={})
        store.write_now(learning.promote, version, {})


def test_going_back_makes_the_parent_a_candidate_and_the_next_update_goes_on_from_it(store: Store):
    serve(store, 1, 2)
    assert store.write_now(learning.roll_back, None) == 1
    assert store.read_now(learning.candidate).version == 1
    store.write_now(learning.promote, 1, {})
    assert store.read_now(learning.serving_version) == 1
    assert store.read_now(learning.version_row, 2).state == "retired"
    judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    update = store.read_now(learning.load_update, update_id)
    assert (update.parent_version, update.version) == (1, 3)


@pytest.mark.parametrize(("version", "says"), [(7, "no version 7"), (2, "is serving"), (3, "is rejected")])
def test_only_a_version_that_served_can_be_gone_back_to(store: Store, version: int, says: str):
    serve(store, 1, 2)
    judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/3", metrics={})
    with pytest.raises(LookupError, match="version 3 waits for the gate"):
        store.write_now(learning.roll_back, 1)
    store.write_now(learning.reject, 3, "it drifted", {})
    with pytest.raises(LookupError, match=says):
        store.write_now(learning.roll_back, version)
    assert store.read_now(learning.candidate) is None


def test_before_the_base_there_is_nothing(store: Store):
    with pytest.raises(LookupError, match="the base, serves"):
        store.write_now(learning.roll_back, None)
    serve(store, 1)
    assert store.write_now(learning.roll_back, 0) == 0


def test_of_full_weights_the_newest_that_served_are_kept_and_the_others_are_no_way_back(store: Store):
    serve(store, 1, 2, 3, 4)
    judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/5", metrics={})
    store.write_now(learning.reject, 5, "it drifted", {})
    # 4 serves; of 1, 2, 3 and the base the newest two are kept, and the base in any case.
    assert sorted(store.write_now(learning.retire_for_good, keep=2)) == ["versions/1", "versions/5"]
    assert store.read_now(learning.version_row, 1).state == VersionState.REMOVED
    with pytest.raises(LookupError, match=r"weights of version 1 were removed .*; 0, 2, 3 can be gone back to"):
        store.write_now(learning.roll_back, 1)
    assert store.write_now(learning.retire_for_good, keep=2) == store.write_now(learning.retire_for_good, keep=3)
    assert store.write_now(learning.roll_back, 2) == 2


def test_a_version_gone_back_to_counts_as_new(store: Store):
    serve(store, 1, 2, 3)
    store.write_now(learning.roll_back, 1)
    store.write_now(learning.promote, 1, {})
    serve(store, 4)
    assert store.write_now(learning.retire_for_good, keep=1) == ["versions/2", "versions/3"]


def test_a_watch_that_goes_back_passes_over_versions_without_weights(store: Store):
    serve(store, 1, 2, 3)
    assert store.write_now(learning.retire_for_good, keep=1) == ["versions/1"]
    assert store.write_now(learning.take_back, 2, "worse", {}) == 0


def test_a_damaged_version_falls_back_to_one_that_still_has_weights(store: Store):
    serve(store, 1, 2, 3)
    store.write_now(learning.retire_for_good, keep=1)
    assert store.write_now(learning.fall_back, 3, "cannot be read") == 2
    assert store.write_now(learning.fall_back, 2, "cannot be read") == 0
    assert store.read_now(learning.serving_version) == 0


def fail_once(store: Store, state: str = "failed") -> None:
    store.write_now(learning.abandon_update, store.write_now(learning.start_update, limit=1), "broke", state=state)


def test_a_turn_that_was_in_each_of_the_failed_updates_is_given_up(store: Store):
    turn_id, other = judged_turn(store), judged_turn(store)
    for _ in range(2):
        fail_once(store)
    assert store.write_now(learning.give_up_failing, tries=3) == 0
    fail_once(store)
    assert store.write_now(learning.give_up_failing, tries=3) == 1
    assert states(store, turn_id, other) == [
        (TurnState.LEFT_OUT, SkipReason.UPDATE_FAILED),
        (TurnState.JUDGED, None),
    ]
    fail_once(store)  # the other turn's first try, though the fourth failure in a row
    assert store.write_now(learning.give_up_failing, tries=3) == 0


def test_an_update_that_was_interrupted_is_no_failure_of_its_turns(store: Store):
    judged_turn(store)
    for _ in range(5):
        fail_once(store, state="interrupted")
    assert store.write_now(learning.give_up_failing, tries=3) == 0


def test_staleness_counts_publishes_and_not_numbers(store: Store):
    for _ in range(2):  # versions 1 and 2 are never made
        judged_turn(store)
        fail_once(store)
    for version in (3, 4):
        judged_turn(store)
        update_id = store.write_now(learning.start_update, limit=8)
        store.write_now(learning.finish_update, update_id, artifact=f"versions/{version:06d}", metrics={})
        store.write_now(learning.promote, version, {})
    assert [store.read_now(learning.ancestor, 4, steps=n) for n in range(4)] == [4, 3, 0, 0]
