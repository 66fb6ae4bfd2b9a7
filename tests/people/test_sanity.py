import pytest

from nextstate.people.questions import Question
from nextstate.people.sanity import (
    Sanity,
    distinct_reply_share,
    distinct_word_share,
    mean_words,
    measure,
    on_subject_share,
    repeated_trigram_share,
    words,
)


def a_question(subject: str) -> Question:
    return Question(text=f"What color is {subject}?", topic="colors", subject=subject)


def test_words_are_lower_case_and_keep_their_apostrophes():
    assert words("It's RED, isn't it? 7 -- _ok_") == ["it's", "red", "isn't", "it", "7", "ok"]


def test_an_empty_reply_counts_with_no_words():
    assert mean_words(["One two three four.", ""]) == 2.0  # (4 + 0) / 2


def test_distinct_words_are_counted_in_windows_of_equal_length():
    # windows of 3 in "a b a b c": aba 2/3, bab 2/3, abc 3/3; mean 7/9. "a b" is shorter than a window and left out.
    assert distinct_word_share(["a b a b c", "a b"], window=3) == pytest.approx(7 / 9)


def test_a_text_twice_as_long_has_the_same_share_of_distinct_words():
    once = "a b c d a b c d"
    assert distinct_word_share([once], window=4) == distinct_word_share([f"{once} {once}"], window=4) == 1.0


def test_repeated_trigrams_are_counted_within_each_reply():
    # "a b c a b c": abc bca cab abc, 3 different of 4, so 1/4 is repeated; "x y z" repeats nothing; mean 1/8.
    assert repeated_trigram_share(["a b c a b c", "x y z", "x y"]) == pytest.approx(1 / 8)


def test_one_answer_to_every_question_shows_as_one_part_in_four():
    assert distinct_reply_share(["It is a thing.", "it is a thing", "It is a thing!", "It is a thing."]) == 1 / 4


def test_a_reply_names_its_subject_by_any_long_enough_word():
    questions = [a_question("a ripe banana"), a_question("the owls"), a_question("milk"), a_question("an ox")]
    replies = ["Bananas are yellow.", "An owl is brown.", "It is white.", "An ox is brown."]
    # banana(s), owl(s); "It is white." does not name milk; "ox" is too short to count: 2 of 4
    assert on_subject_share(questions, replies) == 0.5


def test_nothing_to_measure_is_none_and_not_zero():
    assert measure([], []) == Sanity(
        replies=0,
        mean_words=None,
        distinct_word_share=None,
        repeated_trigram_share=None,
        distinct_reply_share=None,
        on_subject_share=None,
    )
    assert distinct_word_share(["Too short."]) is None
    assert repeated_trigram_share(["Too short."]) is None


def test_measure_gives_all_measures_of_one_set():
    found = measure([a_question("coal"), a_question("snow")], ["Coal is black.", "Snow is white."])
    assert (found.replies, found.mean_words, found.distinct_reply_share, found.on_subject_share) == (2, 3.0, 1.0, 1.0)


def test_a_reply_is_missing_from_no_question():
    with pytest.raises(ValueError, match="shorter"):
        on_subject_share([a_question("coal"), a_question("snow")], ["Coal is black."])
