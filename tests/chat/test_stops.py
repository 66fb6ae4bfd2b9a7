from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nextstate.chat.stops import StopStrings


def run(stops, pieces) -> tuple[list[str], bool]:
    filtered = StopStrings(stops)
    shown = [filtered.add(piece) for piece in pieces]
    return [*shown, filtered.finish()], filtered.stopped


def test_text_that_may_begin_a_stop_string_waits():
    assert run(["END"], ["a E", "N", "x"]) == (["a ", "", "ENx", ""], False)


def test_the_answer_ends_before_the_stop_string_and_nothing_follows():
    assert run(["END"], ["a E", "ND b", "c"]) == (["a ", "", "", ""], True)


def test_what_was_held_back_comes_when_the_answer_ends():
    assert run(["END"], ["a EN"]) == (["a ", "EN"], False)


def test_the_stop_string_that_is_complete_first_counts():
    # "b" is complete at the second character, "abc" only at the third.
    assert "".join(run(["abc", "b"], ["abcd"])[0]) == "a"


def test_of_two_complete_at_once_the_longer_counts():
    assert "".join(run(["bc", "c"], ["abc"])[0]) == "a"


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=8),
)
def test_streamed_and_unstreamed_answers_are_the_same(text: str, stops: list[str], cuts: list[int]):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    streamed, stopped = run(stops, pieces)
    whole, stopped_whole = run(stops, [text])
    assert ("".join(streamed), stopped) == ("".join(whole), stopped_whole)
    assert not any(stop in "".join(whole) for stop in stops)
    assert stopped_whole == any(stop in text for stop in stops)
