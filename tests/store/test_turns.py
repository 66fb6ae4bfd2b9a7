from __future__ import annotations

from dataclasses import replace

import pytest

from nextstate.store import finding, status, turns
from nextstate.store.store import Store
from nextstate.store.turns import Placement
from nextstate.types import FinishReason, Sampling, SkipReason, TurnState
from tests.rows import QUESTION, continued_turn, finished_turn, new_turn


def state_of(store: Store, turn_id: int) -> tuple[str, str | None]:
    row = store.read_now(status.show_turn, turn_id)
    assert row is not None
    return row.state, row.reason


def test_what_was_sampled_comes_back_to_the_bit(store: Store):
    logprobs = (-0.10000000149011612, -2.5)  # the first is exact in float32
    turn_id = finished_turn(store, reply_logprobs=logprobs, reply_versions=(3, 4))
    turn = store.read_now(turns.load_turn, turn_id)
    assert turn.prompt_ids == (5, 6, 7)
    assert (turn.reply_ids, turn.reply_logprobs, turn.reply_versions) == ((60, 61), logprobs, (3, 4))


def test_a_session_stores_each_token_and_message_once(store: Store):
    session = 1
    parent, prompt, messages = finished_turn(store), (5, 6, 7), QUESTION
    for n in range(5):
        prompt = (*prompt, 60, 61, 100 + n)
        messages = (*messages, {"role": "assistant", "content": "the fox"}, {"role": "user", "content": str(n)})
        place = Placement(
            session_id=session, session_key=None, parent_turn_id=parent, kind="continuation", because="a test"
        )
        parent = finished_turn(store, new=new_turn(placement=place, prompt_ids=prompt, messages=messages))
    row = store.read_now(status.show_turn, parent)
    assert (row.prompt_kept, len(row.prompt_suffix)) == (len(prompt) - 1, 4)  # one int32 token is new
    assert row.messages == [{"role": "user", "content": "4"}]
    assert store.read_now(turns.load_turn, parent).prompt_ids == prompt
    assert store.read_now(turns.load_messages, parent)[:-1] == messages


def test_a_rewritten_history_is_stored_from_where_it_differs(store: Store):
    first = finished_turn(store)
    place = Placement(session_id=1, session_key=None, parent_turn_id=first, kind="continuation", because="a test")
    second = finished_turn(store, new=new_turn(placement=place, prompt_ids=(5, 6, 7, 60, 61, 8)))
    rewritten = ({"role": "user", "content": "another fox?"}, {"role": "user", "content": "well?"})
    third = finished_turn(
        store,
        new=new_turn(
            placement=replace(place, parent_turn_id=second), prompt_ids=(5, 6, 99, 60, 61), messages=rewritten
        ),
    )
    assert store.read_now(turns.load_turn, third).prompt_ids == (5, 6, 99, 60, 61)
    assert store.read_now(turns.load_messages, third)[:-1] == rewritten


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": FinishReason.LENGTH}, SkipReason.TRUNCATED),
        ({"finish_reason": FinishReason.ABORTED}, SkipReason.ABORTED),
        ({"new": new_turn(learn=False)}, SkipReason.LEARNING_OFF),
        ({"new": new_turn(sampling=Sampling(max_tokens=8, temperature=0))}, SkipReason.SAMPLING_NOT_REPRODUCIBLE),
        ({"new": new_turn(sampling=Sampling(max_tokens=8, top_p=0.9))}, SkipReason.SAMPLING_NOT_REPRODUCIBLE),
        ({"new": new_turn(placement=replace(new_turn().placement, kind="side"))}, SkipReason.SIDE_REQUEST),
        ({"counted_tokens": 3}, SkipReason.QUARANTINED),
        ({"reply_logprobs": (-1.0,)}, SkipReason.QUARANTINED),
    ],
)
def test_what_cannot_be_learned_from_is_left_out_with_its_reason(store: Store, changes: dict, reason: SkipReason):
    assert state_of(store, finished_turn(store, **changes)) == (TurnState.LEFT_OUT, reason)


def test_a_turn_that_was_being_answered_when_the_server_died_says_so(store: Store):
    turn_id, _, _ = store.write_now(turns.open_turn, new_turn())
    assert store.write_now(turns.close_interrupted) == 1
    assert state_of(store, turn_id) == (TurnState.LEFT_OUT, SkipReason.SERVER_STOPPED)


def test_the_first_continuation_is_the_next_state_and_a_later_branch_changes_nothing(store: Store):
    turn_id = continued_turn(store, said="too long")
    place = Placement(
        session_id=1,
        session_key=None,
        parent_turn_id=turn_id,
        kind="continuation",
        because="an edit",
        next_state=({"role": "user", "content": "perfect"},),
        source="user",
    )
    store.write_now(turns.open_turn, new_turn(placement=place))
    row = store.read_now(status.show_turn, turn_id)
    assert row.next_state == [{"role": "user", "content": "too long"}]


def test_an_idle_session_ends_and_its_last_turn_says_why_it_was_not_judged(store: Store):
    turn_id = finished_turn(store)
    assert store.write_now(turns.end_sessions, idle_before=0) == 0
    assert store.write_now(turns.end_sessions, idle_before=1e12) == 1
    assert state_of(store, turn_id) == (TurnState.LEFT_OUT, SkipReason.NO_NEXT_STATE)


def test_a_session_that_comes_back_after_its_end_is_judged_after_all(store: Store):
    turn_id = finished_turn(store)
    store.write_now(turns.end_sessions, idle_before=1e12)
    row = store.read_now(lambda db: finding.find_by_answer(db, "local", f"answer {turn_id}", None))
    place = Placement(
        session_id=row.session_id,
        session_key=None,
        parent_turn_id=turn_id,
        kind="continuation",
        because="a test",
        next_state=({"role": "user", "content": "thanks"},),
        source="user",
    )
    store.write_now(turns.open_turn, new_turn(placement=place))
    assert state_of(store, turn_id) == (TurnState.CONTINUED, None)


def test_every_turn_is_counted_exactly_once(store: Store):
    finished_turn(store)
    continued_turn(store)
    finished_turn(store, finish_reason=FinishReason.LENGTH)
    found = store.read_now(status.status)
    assert found.turns == 4  # the continuation's own request is one
    assert found.waiting == {"nothing_followed_yet": 1, "waits_for_judge": 1, "being_answered": 1}
    assert found.left_out == {"truncated": 1}
    assert found.accounted_for
