from __future__ import annotations

import pytest

from nextstate.store import judging, learning, status
from nextstate.store.store import Store
from nextstate.types import Feedback, SkipReason, TurnState, Vote
from tests.rows import a_verdict, continued_turn, finished_turn, judged_turn


def reason_of(store: Store, turn_id: int) -> str | None:
    return store.read_now(status.show_turn, turn_id).reason


def test_a_claimed_turn_is_not_given_out_again_until_its_lease_ends(store: Store):
    turn_id = continued_turn(store)
    first = store.write_now(judging.claim_unjudged, limit=5, lease_s=1000)
    assert [(t.turn_id, t.answer, t.next_state[0]["content"]) for t in first] == [(turn_id, "the fox", "too long")]
    assert store.write_now(judging.claim_unjudged, limit=5, lease_s=1000) == []


def test_a_turn_whose_judge_died_is_claimed_again(store: Store):
    turn_id = continued_turn(store)
    store.write_now(judging.claim_unjudged, limit=5, lease_s=-1)
    assert [t.turn_id for t in store.write_now(judging.claim_unjudged, limit=5, lease_s=1000)] == [turn_id]


def test_a_second_verdict_on_the_same_turn_changes_nothing(store: Store):
    turn_id = judged_turn(store, Vote.BAD)
    assert not store.write_now(judging.write_verdict, a_verdict(turn_id, Vote.GOOD))
    assert [v.value for v in store.read_now(judging.list_verdicts, turn_id)] == [Vote.BAD]


@pytest.mark.parametrize(("value", "reason"), [(None, SkipReason.ABSTAINED), (Vote.NEUTRAL, SkipReason.NEUTRAL)])
def test_no_evidence_is_no_sample(store: Store, value: Vote | None, reason: SkipReason):
    turn_id = continued_turn(store)
    store.write_now(judging.write_verdict, a_verdict(turn_id, value))
    assert reason_of(store, turn_id) == reason
    assert store.read_now(learning.waiting_samples) == (0, None)


def test_a_judge_that_fails_costs_the_turn_nothing_until_the_limit(store: Store):
    turn_id = continued_turn(store)
    for attempt in range(3):
        assert reason_of(store, turn_id) is None, attempt
        store.write_now(judging.judge_failed, turn_id, "no answer", max_attempts=3, retry_s=0)
    assert reason_of(store, turn_id) == SkipReason.JUDGE_GAVE_UP


def test_feedback_on_a_turn_without_next_state_has_it_judged(store: Store):
    turn_id = finished_turn(store)
    said = Feedback(value=Vote.BAD, words="shorter, please")
    assert store.write_now(judging.add_feedback, turn_id, said) == "will_be_judged"
    (claimed,) = store.write_now(judging.claim_unjudged, limit=5, lease_s=1000)
    assert claimed.feedback == said
    assert claimed.next_state == ()


def test_feedback_overrules_a_verdict_that_has_not_been_trained(store: Store):
    turn_id = judged_turn(store, Vote.BAD)
    store.write_now(judging.add_feedback, turn_id, Feedback(value=Vote.GOOD))
    assert store.read_now(learning.waiting_samples)[0] == 0
    store.write_now(judging.write_verdict, a_verdict(turn_id, Vote.GOOD))
    update = store.read_now(learning.load_update, store.write_now(learning.start_update, limit=8))
    assert [(s.turn.turn_id, s.reward) for s in update.samples] == [(turn_id, 1)]
    assert [v.value for v in store.read_now(judging.list_verdicts, turn_id)] == [Vote.BAD, Vote.GOOD]


def test_feedback_on_a_trained_turn_is_kept_and_trains_nothing_twice(store: Store):
    turn_id = judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={})
    assert store.write_now(judging.add_feedback, turn_id, Feedback(value=Vote.GOOD)) == "already_trained"
    assert store.read_now(status.show_turn, turn_id).state == TurnState.TRAINED


def test_feedback_on_an_unknown_turn_says_so(store: Store):
    with pytest.raises(LookupError, match="no turn 99"):
        store.write_now(judging.add_feedback, 99, Feedback(value=Vote.GOOD))


def test_what_a_server_that_died_had_claimed_is_free_at_the_next_start(store: Store):
    turn_id = continued_turn(store)
    store.write_now(judging.claim_unjudged, limit=8, lease_s=60)
    assert store.write_now(judging.claim_unjudged, limit=8, lease_s=60) == []
    store.write_now(judging.release_claims)
    assert [turn.turn_id for turn in store.write_now(judging.claim_unjudged, limit=8, lease_s=60)] == [turn_id]
