import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextstate.people.questions import training_questions
from nextstate.people.simulated import Habits, SimulatedUser
from nextstate.people.wishes import SHORT, Fault
from nextstate.people.wordings import COMPLAINTS, DIRECTIVES, OFF_TOPIC, PRAISE

LONG = "word and more of it, " * 20 + "and then some."
GOOD = "Snow is white."
BROKEN = "Snow is as white as"
TEXTS = {question.text for question in training_questions()}


def a_user(seed: int = 1, **habits: object) -> SimulatedUser:
    return SimulatedUser(training_questions(), seed=seed, habits=Habits(**habits))  # type: ignore[arg-type]


def starts_with(message: str, wordings: tuple[str, ...]) -> bool:
    return any(message.startswith(words) for words in wordings)


def first_reactions(user: SimulatedUser, reply: str, *, sessions: int) -> Iterator[str | None]:
    for _ in range(sessions):
        user.open()
        yield user.react(reply)


def test_the_same_seed_and_replies_give_the_same_words():
    def words(seed: int) -> list[str | None]:
        user, replies = a_user(seed), itertools.cycle([LONG, GOOD, BROKEN])
        said: list[str | None] = []
        for _ in range(20):
            said.append(user.open())
            while said[-1] is not None:
                said.append(user.react(next(replies)))
        return said

    assert words(7) == words(7)
    assert words(7) != words(8)


def test_a_session_opens_with_a_bare_question():
    user = a_user()
    assert all(user.open() in TEXTS for _ in range(50))


def test_no_question_comes_twice_before_all_were_asked():
    user = a_user()
    assert {user.open() for _ in range(len(TEXTS))} == TEXTS


@given(seed=st.integers(0, 2**32), reply=st.text(max_size=300) | st.sampled_from([LONG, GOOD, BROKEN, "", "Yes."]))
def test_feedback_never_contradicts_the_wish(seed: int, reply: str):
    user = a_user(seed)
    user.open()
    message = user.react(reply)
    if message is None:
        return
    fault = SHORT.fault(reply)
    assert not (starts_with(message, PRAISE) and fault is not None)
    for other, complaints in COMPLAINTS.items():
        if other is not fault:
            assert not starts_with(message, complaints)


def test_reactions_to_a_miss_come_as_often_as_the_habits_say():
    said = Counter[str]()
    for message in first_reactions(a_user(), LONG, sessions=4000):
        if message is None:
            said["left"] += 1
        elif starts_with(message, COMPLAINTS[Fault.TOO_LONG]):
            said["complained"] += 1
            said["directed"] += any(words in message for words in DIRECTIVES[Fault.TOO_LONG])
        else:
            said["off topic" if starts_with(message, OFF_TOPIC) else "asked on"] += 1
    assert said["complained"] / 4000 == pytest.approx(0.80, abs=0.03)
    assert said["directed"] / said["complained"] == pytest.approx(0.80, abs=0.03)
    assert said["asked on"] / 4000 == pytest.approx(0.10, abs=0.02)
    assert said["off topic"] / 4000 == pytest.approx(0.05, abs=0.02)
    assert said["left"] / 4000 == pytest.approx(0.05, abs=0.02)


def test_reactions_to_a_reply_as_wished_come_as_often_as_the_habits_say():
    said = Counter[str]()
    for message in first_reactions(a_user(), GOOD, sessions=4000):
        said["left" if message is None else "praised" if starts_with(message, PRAISE) else "asked on"] += 1
    assert said["praised"] / 4000 == pytest.approx(0.45, abs=0.03)
    assert said["asked on"] / 4000 == pytest.approx(0.45, abs=0.03)
    assert said["left"] / 4000 == pytest.approx(0.10, abs=0.02)


def test_complaints_about_length_come_in_more_than_sixty_wordings():
    user = a_user(complain=1.0, ask_on_after_miss=0.0, off_topic=0.0, complain_and_repeat=0.0, complain_and_ask_on=0.0)
    assert len(set(first_reactions(user, LONG, sessions=500))) > 60


def test_a_repeat_ends_with_the_question_that_was_asked():
    user = a_user(complain=1.0, ask_on_after_miss=0.0, off_topic=0.0, complain_and_repeat=1.0, complain_and_ask_on=0.0)
    for _ in range(20):
        question = user.open()
        assert (user.react(LONG) or "").endswith(question)


def test_sessions_of_a_patient_user_have_two_to_four_replies():
    user = a_user(complain=1.0, ask_on_after_miss=0.0, off_topic=0.0)
    lengths = Counter[int]()
    for _ in range(2000):
        user.open()
        lengths[next(count for count in itertools.count(1) if user.react(LONG) is None)] += 1
    assert set(lengths) == {2, 3, 4}
    assert lengths[2] / 2000 == pytest.approx(0.5, abs=0.04)
    assert lengths[4] / 2000 == pytest.approx(0.2, abs=0.04)


def test_praise_without_a_question_is_a_goodbye():
    user = a_user(praise=1.0, ask_on_after_hit=0.0, praise_alone=1.0)
    user.open()
    assert user.react(GOOD) in PRAISE
    assert user.react(GOOD) is None


def test_a_reply_that_breaks_off_is_not_called_long():
    user = a_user(complain=1.0, ask_on_after_miss=0.0, off_topic=0.0)
    for message in first_reactions(user, BROKEN, sessions=50):
        assert message is not None
        assert starts_with(message, COMPLAINTS[Fault.BROKEN_OFF])


def test_a_user_who_left_reacts_to_nothing_more():
    user = a_user(complain=0.0, ask_on_after_miss=0.0, off_topic=0.0)
    user.open()
    assert user.react(LONG) is None
    with pytest.raises(RuntimeError, match="no session is open"):
        user.react(LONG)


def test_shares_above_one_are_refused():
    with pytest.raises(ValueError, match="not between 0 and 1"):
        Habits(complain=0.8, ask_on_after_miss=0.3)


def test_a_user_leaves_global_randomness_alone():
    random.seed(3)
    expected = random.random()
    random.seed(3)
    user = a_user()
    user.open()
    user.react(LONG)
    assert random.random() == expected
