import pytest

from nextstate.judge.votes import majority, vote_of
from nextstate.types import Vote

GOOD, NEUTRAL, BAD = Vote.GOOD, Vote.NEUTRAL, Vote.BAD


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        ([GOOD, GOOD, BAD], GOOD),  # oracle T1: [1, 1, -1] -> 1
        ([GOOD, BAD], NEUTRAL),  # [1, -1] -> 0
        ([GOOD, BAD, NEUTRAL], NEUTRAL),  # [1, -1, 0] -> 0
        ([None, None, BAD], BAD),  # [none, none, -1] -> -1
        ([], None),  # T1 has 0 here, which would be a verdict that nobody gave
        ([None, None], None),
    ],
)
def test_the_majority_of_votes_is_that_of_the_oracle_except_that_nobody_voting_is_none(votes, value):
    assert majority(votes) is value


def test_two_neutral_votes_outvote_one_bad_one():
    assert majority([NEUTRAL, BAD, NEUTRAL]) is NEUTRAL


def test_a_label_just_below_its_threshold_is_an_abstention_and_not_neutral():
    shares = {GOOD: 0.49, NEUTRAL: 0.21, BAD: 0.30}
    assert vote_of(shares, sign_at=0.5, neutral_at=0.4) is None
    assert vote_of(shares, sign_at=0.49, neutral_at=0.4) is GOOD


def test_a_neutral_vote_has_a_threshold_of_its_own():
    shares = {GOOD: 0.30, NEUTRAL: 0.42, BAD: 0.28}
    assert vote_of(shares, sign_at=0.5, neutral_at=0.4) is NEUTRAL
    assert vote_of(shares, sign_at=0.5, neutral_at=0.45) is None
