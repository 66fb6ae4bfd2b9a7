"""Each case of the table in `place`, over a real store."""

from __future__ import annotations

import pytest

from nextstate.store.store import Store
from nextstate.types import FinishReason, Source
from tests.collect.talk import Talk, says

HI = {"role": "user", "content": "Hi"}
MORE = {"role": "user", "content": "More"}


@pytest.fixture
def talk(store: Store) -> Talk:
    return Talk(store)


def test_a_request_without_history_opens_a_session(talk: Talk):
    placed = talk.place([HI])
    assert (placed.kind, placed.session_id, placed.parent_turn_id) == ("new", None, None)


def test_a_request_that_repeats_an_answer_continues_its_session_and_brings_its_next_state(talk: Talk):
    first = talk.ask([HI], "Hello")
    placed = talk.place([{"role": "system", "content": "It is late."}, HI, says(" Hello\n"), MORE])
    assert (placed.kind, placed.parent_turn_id, placed.session_id) == (
        "continuation",
        first,
        talk.row(first).session_id,
    )
    assert (placed.next_state, placed.source) == ((MORE,), Source.USER)


@pytest.mark.parametrize(
    ("after", "source"),
    [
        ([{"role": "tool", "content": "42"}], Source.TOOL),
        ([{"role": "tool", "content": "42"}, MORE], Source.USER),
        ([{"role": "system", "content": "exit status 1"}], Source.ENVIRONMENT),
        ([], None),
    ],
)
def test_a_next_state_is_all_that_follows_and_is_as_trusted_as_its_best_speaker(talk: Talk, after, source):
    talk.ask([HI], "Hello")
    placed = talk.place([HI, says("Hello"), *after])
    assert (placed.kind, placed.next_state, placed.source) == ("continuation", tuple(after), source)


def test_behind_an_answer_that_is_not_ours_nothing_counts(talk: Talk):
    first = talk.ask([HI], "Hello")
    placed = talk.place([HI, says("Hello"), MORE, says("of somebody else"), HI])
    assert (placed.parent_turn_id, placed.next_state) == (first, (MORE,))


def test_a_shortened_history_is_not_taken_for_another_conversation(talk: Talk):
    first = talk.ask([HI], "Hello")
    talk.ask([HI, says("Hello"), MORE], "World")
    assert talk.place([HI, says("Hello"), MORE, says("World"), HI]).parent_turn_id == first + 1
    assert talk.place([says("World"), HI]).kind == "new"


def test_users_never_meet(talk: Talk):
    talk.ask([HI], "Hello", user="ann")
    talk.ask([HI], user="ann", key="k")
    assert talk.place([HI, says("Hello"), MORE], user="bob").kind == "new"
    assert talk.place([HI], user="bob", key="k").session_id is None


def test_the_same_opening_twice_makes_two_sessions(talk: Talk):
    one, two = talk.ask([HI], "Hello"), talk.ask([HI], "Hello")
    assert talk.row(one).session_id != talk.row(two).session_id


def test_two_openings_at_the_same_moment_make_two_sessions(talk: Talk):
    one, two = talk.ask([HI]), talk.ask([HI])
    assert talk.row(one).session_id != talk.row(two).session_id


def test_of_two_conversations_that_begin_alike_each_gets_its_next_state(talk: Talk):
    one, two = talk.ask([HI], "Hello"), talk.ask([HI], "Hello")
    talk.ask([HI, says("Hello"), MORE], "A")
    talk.ask([HI, says("Hello"), MORE], "B")
    assert [talk.row(turn).state for turn in (one, two)] == ["continued", "continued"]


def test_a_request_that_was_not_answered_to_its_end_is_retried_in_its_session(talk: Talk):
    first = talk.ask([HI], "Hel", finish=FinishReason.ABORTED)
    placed = talk.place([HI])
    assert (placed.kind, placed.session_id, placed.parent_turn_id) == ("retry", talk.row(first).session_id, None)


def test_a_request_that_the_engine_failed_is_retried_under_the_same_parent(talk: Talk):
    parent = talk.ask([HI], "Hello")
    failed = talk.ask([HI, says("Hello"), MORE])
    talk.fail(failed)
    placed = talk.place([HI, says("Hello"), MORE])
    assert (placed.kind, placed.parent_turn_id, placed.next_state) == ("retry", parent, ())


def test_a_request_that_the_client_calls_a_retry_is_one_even_if_it_was_answered(talk: Talk):
    first = talk.ask([HI], "Hello")
    placed = talk.place([HI], retries=1)
    assert (placed.kind, placed.session_id) == ("retry", talk.row(first).session_id)


def test_asking_again_with_history_is_a_regeneration_beside_the_first(talk: Talk):
    parent = talk.ask([HI], "Hello")
    talk.ask([HI, says("Hello"), MORE], "A")
    again = talk.ask([HI, says("Hello"), MORE], "B")
    row = talk.row(again)
    assert (row.kind, row.parent_turn_id) == ("regeneration", parent)
    # The user goes on with the second answer, and the first has no next state.
    talk.ask([HI, says("Hello"), MORE, says("B"), HI])
    assert talk.row(again).next_state == [HI]
    assert talk.row(again - 1).next_state is None


def test_an_edited_message_is_a_branch_and_leaves_the_first_next_state_as_it_was(talk: Talk):
    parent = talk.ask([HI], "Hello")
    talk.ask([HI, says("Hello"), MORE], "A")
    edited = talk.ask([HI, says("Hello"), HI], "B")
    assert (talk.row(edited).kind, talk.row(edited).parent_turn_id) == ("branch", parent)
    assert talk.row(parent).next_state == [MORE]


def test_a_key_decides_and_only_its_session_is_looked_at(talk: Talk):
    talk.ask([HI], "Hello")
    keyed = talk.ask([HI], "Hello", key="mine")
    placed = talk.place([HI, says("Hello"), MORE], key="mine")
    assert (placed.kind, placed.parent_turn_id) == ("continuation", keyed)
    assert talk.place([HI, says("Hello"), MORE], key="other").kind == "new"


def test_a_known_key_with_a_rewritten_history_continues_its_newest_answer(talk: Talk):
    talk.ask([HI], "Hello", key="mine")
    newest = talk.ask([HI, says("Hello"), MORE], "World", key="mine")
    talk.ask([HI, says("Hello"), MORE, says("World"), HI], "par", finish=FinishReason.ABORTED, key="mine")
    rewritten = [{"role": "user", "content": "summary"}, says("edited"), MORE, says("edited, too"), HI]
    placed = talk.place(rewritten, key="mine")
    assert (placed.kind, placed.parent_turn_id, placed.next_state) == ("continuation", newest, (HI,))


KNOWN = says("The river Rhine rises in the Alps and ends in the North Sea.")
BASEL = {"role": "user", "content": "And Basel?"}


@pytest.mark.parametrize(
    ("history", "how"),
    [
        ([MORE, says("x"), HI, says("The river Rhine rises in the Alps, and ends in the sea.")], {}),
        ([HI, says("x"), MORE, says("y")], {}),
        ([MORE, says("x"), BASEL, says("y")], {}),
        ([MORE, says("x")], {"headers": {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}}),
    ],
    ids=["its answer, nearly", "its opening, and more answers", "its last message", "its trace"],
)
def test_a_rewritten_history_is_known_by_something_of_the_newest_turn(talk: Talk, history, how):
    talk.ask([HI, says("a greeting"), BASEL], KNOWN, key="mine", **how)
    placed = talk.place([*history, {"role": "user", "content": "Go on."}], key="mine", **how)
    assert (placed.kind, placed.parent_turn_id) == ("continuation", 1)


@pytest.mark.parametrize(
    "history",
    [
        [HI, says("a greeting")],
        [HI, says("another example")],
        [{"role": "user", "content": "Translate: dog"}, says("Hund")],
        [{"role": "user", "content": "1"}, says("2"), {"role": "user", "content": "3"}, says("4")],
    ],
    ids=["the same made-up history", "the same opening", "another", "a longer one"],
)
def test_one_name_over_many_made_up_histories_makes_no_evidence_of_the_next_question(talk: Talk, history):
    first = talk.ask([HI, says("a greeting"), BASEL], KNOWN, key="batch")
    placed = talk.place([*history, {"role": "user", "content": "Translate: cat"}], key="batch")
    assert (placed.kind, placed.session_id) == ("new", talk.session(first))
    assert (placed.parent_turn_id, placed.next_state) == (None, ())


def test_a_lost_answer_is_looked_for_where_what_was_said_behind_it_is_known(talk: Talk):
    long, why = {"role": "user", "content": "Too long!"}, {"role": "user", "content": "Why?"}
    talk.ask([HI], "A long answer.")
    second = talk.ask([HI, says("A long answer."), long], "Short.")
    talk.ask([HI], "Of somebody else.")
    # The client has dropped both answers.
    placed = talk.place([HI, long, why])
    assert (placed.kind, placed.parent_turn_id, placed.session_id) == ("continuation", second, talk.session(second))
    assert placed.next_state == (why,)


def test_a_lost_answer_before_others_that_are_still_there_is_found_too(talk: Talk):
    a, b, c = ({"role": "user", "content": text} for text in "abc")
    talk.ask([HI], "Hello")
    talk.ask([HI, says("Hello"), a], "one")
    third = talk.ask([HI, says("Hello"), a, says("one"), b], "two")
    placed = talk.place([HI, says("Hello"), a, b, c])
    assert (placed.kind, placed.parent_turn_id, placed.next_state) == ("continuation", third, (c,))
    # Of another conversation, in which the same was said and something else was answered.
    assert talk.place([HI, says("Not ours"), a, b, c]).kind == "new"


@pytest.mark.parametrize("between", ["", " ", "\n", "\n\n"])
@pytest.mark.parametrize(
    "answers", [("Tides come from the moon.", "And from the sun, too."), ("Yes.", "No."), tuple("abc")]
)
def test_answers_that_the_client_joins_are_the_last_of_them(talk: Talk, between: str, answers):
    history = [HI]
    for said in answers:
        last = talk.ask(history, said)
        history += [says(said), {"role": "user", "content": "continue"}]
    placed = talk.place([HI, says(between.join(answers)), MORE])
    assert (placed.kind, placed.parent_turn_id, placed.next_state) == ("continuation", last, (MORE,))


def test_what_only_begins_like_an_answer_of_ours_is_none(talk: Talk):
    talk.ask([HI], "Yes.")
    assert talk.place([HI, says("Yes. But I am another model, and I say something else."), MORE]).kind == "new"


def test_a_window_that_keeps_nothing_but_the_last_answer_is_known_by_it(talk: Talk):
    talk.ask([HI], "Hello")
    last = talk.ask([HI, says("Hello"), MORE], KNOWN)
    talk.ask([HI], "Of somebody else, and quite as long as the other.")
    talk.ask([HI, says("Hello"), BASEL], "An edit, which is newer.")
    placed = talk.place([KNOWN, BASEL])
    assert (placed.kind, placed.parent_turn_id, placed.next_state) == ("continuation", last, (BASEL,))
    assert talk.place([KNOWN, BASEL], user="bob").kind == "new"
    talk.ask([HI, says("Hello"), MORE], KNOWN)
    talk.ask([BASEL], KNOWN)
    assert talk.place([KNOWN, BASEL]).kind == "new"  # two sessions have given this answer


def test_a_window_of_one_exchange_is_known_by_both_halves(talk: Talk):
    asked = {"role": "user", "content": "Shorter, please!"}
    talk.ask([HI], "Hello")
    last = talk.ask([HI, says("Hello"), asked], "From moon, sun.")
    placed = talk.place([asked, says("From moon, sun."), MORE])
    assert (placed.kind, placed.parent_turn_id, placed.next_state) == ("continuation", last, (MORE,))
    # What was said long before makes a short exchange no more telling.
    talk.ask([HI, says("Hello"), {"role": "user", "content": "ok?"}], "Yes.")
    foreign = [{"role": "user", "content": "Of something else, at length."}, says("Not ours.")]
    assert talk.place([*foreign, {"role": "user", "content": "ok?"}, says("Yes."), MORE]).kind == "new"


def test_the_same_opening_again_is_another_conversation_unless_the_session_is_named(talk: Talk):
    first = talk.ask([HI], "Hello")
    again = talk.ask([HI], "Good day")
    assert (talk.row(again).kind, talk.session(again) == talk.session(first)) == ("new", False)
    # Neither answer loses what follows it.
    talk.ask([HI, says("Good day"), MORE])
    assert (talk.row(again).next_state, talk.row(first).next_state) == ([MORE], None)


def test_a_known_key_without_history_adds_to_its_session_and_says_nothing_about_it(talk: Talk):
    first = talk.ask([HI], "Hello", key="mine")
    placed = talk.place([MORE], key="mine")
    assert (placed.kind, placed.parent_turn_id) == ("new", None)
    assert placed.session_id == talk.row(first).session_id


def test_the_same_opening_under_a_key_is_a_regeneration(talk: Talk):
    talk.ask([HI], "Hello", key="mine")
    assert talk.place([HI], key="mine").kind == "regeneration"


@pytest.mark.parametrize("key", [None, "mine"])
def test_a_side_request_joins_the_session_and_is_no_next_state(talk: Talk, key):
    first = talk.ask([HI], "Hello", key=key)
    side = talk.ask([HI, says("Hello"), {"role": "user", "content": "Make a title"}], "T", key=key, side=True)
    row = talk.row(side)
    assert (row.kind, row.session_id, row.parent_turn_id) == ("side", talk.row(first).session_id, None)
    assert (row.state, row.reason) == ("left_out", "side_request")
    assert talk.row(first).state == "finished"


def test_every_placement_says_why(talk: Talk):
    talk.ask([HI], "Hello", key="mine")
    for how in ({}, {"key": "mine"}, {"key": "new"}, {"side": True}, {"retries": 1}):
        assert talk.place([HI], **how).because.endswith(".")
