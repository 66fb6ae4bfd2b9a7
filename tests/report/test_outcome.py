from __future__ import annotations

import pytest

from nextstate.report.outcome import count_votes, outcome
from nextstate.report.reasons import explanations
from nextstate.types import SkipReason, TurnState, VersionState, WaitReason


@pytest.mark.parametrize("state", TurnState)
def test_every_state_has_words(state: TurnState):
    reason = SkipReason.NEUTRAL if state is TurnState.LEFT_OUT else None
    found = outcome(state, reason, version=3, version_state=VersionState.SERVING)
    assert found.headline
    assert (found.reason is None) == (found.tone == "trained") == (state is TurnState.TRAINED)


@pytest.mark.parametrize("state", VersionState)
def test_a_trained_turn_names_its_version_whatever_became_of_that(state: VersionState):
    assert outcome(TurnState.TRAINED, None, version=3, version_state=state).headline.startswith("trained in version 3")


@pytest.mark.parametrize("reason", [*SkipReason, *WaitReason])
def test_every_reason_is_explained_in_plain_sentences(reason: str):
    text = explanations()[reason]
    assert text.endswith(".")
    assert not any(mark in text for mark in ("`", "](", "#", "\n"))


def test_votes_are_counted_by_what_was_voted_and_an_abstention_is_not_a_neutral_vote():
    assert count_votes([1, -1, None, -1]) == "1 good, 2 bad, 1 abstained"
    assert count_votes([0]) == "1 neutral"
    assert count_votes([]) == ""
