import itertools

import pytest

from nextstate.people import wordings
from nextstate.people.wishes import Fault


def test_there_are_many_ways_to_say_that_a_reply_was_too_long():
    pairs = itertools.product(wordings.COMPLAINTS[Fault.TOO_LONG], wordings.DIRECTIVES[Fault.TOO_LONG])
    assert len({" ".join(pair) for pair in pairs}) >= 60


def test_there_are_many_ways_to_praise():
    assert len(set(wordings.PRAISE)) >= 20


@pytest.mark.parametrize("fault", [Fault.NO_SENTENCE, Fault.TOO_LONG, Fault.BROKEN_OFF])
def test_every_fault_of_the_demos_wish_can_be_complained_about_and_has_a_directive(fault: Fault):
    assert wordings.COMPLAINTS[fault]
    assert wordings.DIRECTIVES[fault]


def test_nobody_gives_a_number_or_a_grade():
    complaints = itertools.chain.from_iterable(wordings.COMPLAINTS.values())
    directives = itertools.chain.from_iterable(wordings.DIRECTIVES.values())
    for words in (*complaints, *directives, *wordings.PRAISE, *wordings.OFF_TOPIC):
        assert not any(sign.isdigit() for sign in words)
        assert not any(grade in words.lower() for grade in ("score", "rating", "points", "percent", "out of"))


def test_praise_and_complaints_have_no_wording_in_common():
    complaints = set(itertools.chain.from_iterable(wordings.COMPLAINTS.values()))
    assert not complaints & set(wordings.PRAISE)
    assert not (complaints | set(wordings.PRAISE)) & set(wordings.OFF_TOPIC)
