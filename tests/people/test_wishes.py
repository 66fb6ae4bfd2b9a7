import pytest

from nextstate.people.wishes import SHORT, Fault, count_words, ends_properly, is_degenerate


def test_twenty_five_words_are_short_and_twenty_six_are_not():
    reply = " ".join(f"w{number}" for number in range(25))
    assert SHORT.met(reply + ".")
    assert SHORT.fault("one " + reply + ".") is Fault.TOO_LONG


@pytest.mark.parametrize(
    "reply", ["", "   \n", "Paris.", "It is", "...", "12 34 56 78.", "🌳 🌳 🌳 🌳.", "Milk, milk milk. Milk!"]
)
def test_what_cannot_be_read_as_a_sentence_meets_no_wish(reply: str):
    assert is_degenerate(reply)
    assert SHORT.fault(reply) is Fault.NO_SENTENCE


def test_a_long_string_of_signs_is_unreadable_rather_than_long():
    assert SHORT.fault("🌳 " * 100) is Fault.NO_SENTENCE


def test_three_words_make_a_sentence():
    assert SHORT.met("It is white.")


@pytest.mark.parametrize("reply", ["Penguins live in", "Penguins live in the south,", "It rhymes with: hat, bat"])
def test_a_short_reply_without_an_end_is_broken_off(reply: str):
    assert SHORT.fault(reply) is Fault.BROKEN_OFF


@pytest.mark.parametrize(
    "reply", ['He calls it "a calf."', "(It is a calf.)", "**It is a calf.**", "A calf it is!  \n"]
)
def test_signs_after_the_full_stop_do_not_matter(reply: str):
    assert ends_properly(reply)


def test_a_dash_by_itself_is_no_word():
    assert count_words("A calf - that is all") == 5  # A, calf, that, is, all


def test_one_description_and_one_name_say_what_the_wish_is():
    assert (SHORT.name, SHORT.description) == ("short", "at most 25 words, in sentences that end")
