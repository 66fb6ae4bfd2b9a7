import math

import pytest
from nextstate.judge.calibration import content_free

from nextstate.errors import EngineFault
from nextstate.judge.errors import JudgeUnavailable
from nextstate.judge.prompts import LABEL
from nextstate.judge.scored import ScoredJudge
from nextstate.types import BASE, TokenScores, Vote

from .rows import a_turn, tool, user

EVEN = content_free("tiny", "", (0.0,) * 6)


class LetterTokenizer:
    """One token a character; the labels are one token each."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens=True, **_):
        labels = {" good": 1, " none": 2, " bad": 3}
        return [labels[text]] if text in labels else [ord(letter) + 10 for letter in text]


class FixedEngine:
    """Gives the labels these probabilities, and every reply the same log-prob in all lists."""

    version = 0

    def __init__(self, good: float = 1 / 3, none: float = 1 / 3, bad: float = 1 / 3, fault: str | None = None):
        self.choices = tuple(math.log(share) for share in (good, none, bad))
        self.fault = fault
        self.asked = []

    async def score(self, sequences, policy):
        assert policy == BASE
        if self.fault:
            raise EngineFault(self.fault)
        self.asked.extend(sequences)
        return [
            TokenScores(
                logprobs=(-2.0,) * (len(request.ids) - request.start),
                choice_logprobs=self.choices if request.choices else (),
                version=0,
            )
            for request in sequences
        ]


def a_judge(engine, **settings):
    return ScoredJudge(engine, LetterTokenizer(), model="tiny", calibration=EVEN, **settings)


async def test_the_label_probabilities_become_the_vote():
    verdict = await a_judge(FixedEngine(good=0.2, none=0.1, bad=0.7)).verdict(a_turn(user("shorter")))
    assert (verdict.value, verdict.votes) == (Vote.BAD, (Vote.BAD,))
    assert verdict.probabilities == pytest.approx({"good": 0.2, "neutral": 0.1, "bad": 0.7})
    assert "bad 70%" in verdict.reason


async def test_a_judge_that_is_unsure_abstains_and_says_so():
    verdict = await a_judge(FixedEngine(good=0.4, none=0.3, bad=0.3), sign_at=0.5).verdict(a_turn(user("hm")))
    assert (verdict.value, verdict.votes) == (None, (None,))
    assert "too unsure" in verdict.reason


async def test_constant_text_comes_first_and_the_turn_last():
    engine = FixedEngine()
    judge = a_judge(engine)
    await judge.verdict(a_turn(user("shorter")))
    label, *lists = engine.asked
    assert label.choices == (1, 2, 3)
    assert label.start == len(label.ids)
    assert len(judge.prefixes[0]) == len(LABEL.constant)
    assert label.ids[: len(LABEL.constant)] == judge.prefixes[0]
    assert [request.start for request in lists] == [len(prefix) for prefix in judge.prefixes[1:]]
    assert all(len(request.ids) - request.start == len(" shorter\n") for request in lists)


async def test_without_words_of_a_user_nobody_is_asked():
    engine = FixedEngine()
    for next_state in ([tool("37")], []):
        verdict = await a_judge(engine).verdict(a_turn(*next_state))
        assert (verdict.value, verdict.votes) == (None, ())
    assert engine.asked == []


async def test_a_model_without_fitted_values_is_calibrated_on_empty_replies():
    engine = FixedEngine(good=0.8, none=0.1, bad=0.1)  # says good whatever it reads
    judge = ScoredJudge(engine, LetterTokenizer(), model="tiny")
    assert judge.calibration is None
    verdict = await judge.verdict(a_turn(user("shorter")))
    assert judge.calibration is not None
    assert judge.calibration.kind == "content-free"
    assert verdict.probabilities == pytest.approx({"good": 1 / 3, "neutral": 1 / 3, "bad": 1 / 3})
    assert verdict.value is None


async def test_a_fault_of_the_engine_leaves_the_turn_waiting():
    with pytest.raises(JudgeUnavailable, match="out of memory"):
        await a_judge(FixedEngine(fault="out of memory")).verdict(a_turn(user("shorter")))


def test_the_name_says_model_and_prompts():
    assert a_judge(FixedEngine()).name.startswith("scored:tiny:")
