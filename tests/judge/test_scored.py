from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nextstate.errors import EngineFault
from nextstate.judge.cues import WORDING_COUNT
from nextstate.judge.errors import JudgeUnavailable
from nextstate.judge.head import Head, read, save
from nextstate.judge.prompts import LABEL, PROMPTS, prompts_hash
from nextstate.judge.scored import ScoredJudge, layers_of
from nextstate.types import BASE, TokenScores, Vote

from .rows import a_turn, tool, user

STATES = 2 * len(PROMPTS)
"""Of a head that reads one layer of a model with two numbers a state."""


def a_head(good: float, neutral: float, bad: float, *, layers: tuple[int, ...] = (1,)) -> Head:
    """Gives these probabilities, whatever it sees."""
    features = WORDING_COUNT + (STATES if layers else 0)
    return Head(
        model="tiny",
        prompts_hash=prompts_hash(),
        fingerprint=(0.0,) * 6,
        layers=layers,
        rows=1000,
        centre=torch.zeros(features),
        scale=torch.ones(features),
        weights=torch.zeros(features, 3),
        bias=torch.tensor([good, neutral, bad]).log(),
    )


class LetterTokenizer:
    """One token a character; the labels are one token each."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens=True, **_):
        labels = {" good": 1, " none": 2, " bad": 3}
        return [labels[text]] if text in labels else [ord(letter) + 10 for letter in text]


class FixedEngine:
    """Finds all labels equally probable, and is always in the same state."""

    version = 0

    def __init__(self, state: tuple[float, float] = (0.5, -0.5), fault: str | None = None):
        self.state = state
        self.fault = fault
        self.asked = []

    async def score(self, sequences, policy):
        assert policy == BASE
        if self.fault:
            raise EngineFault(self.fault)
        self.asked.extend(sequences)
        return [
            TokenScores(
                logprobs=(),
                choice_logprobs=tuple(math.log(1 / 3) for _ in request.choices),
                states=tuple(self.state for _ in request.layers),
                version=0,
            )
            for request in sequences
        ]


def a_judge(engine, head: Head | None = None, **settings):
    return ScoredJudge(engine, LetterTokenizer(), model="tiny", head=head, **settings)


async def test_the_heads_probabilities_become_the_vote():
    verdict = await a_judge(FixedEngine(), a_head(0.2, 0.1, 0.7)).verdict(a_turn(user("shorter")))
    assert (verdict.value, verdict.votes) == (Vote.BAD, (Vote.BAD,))
    assert verdict.probabilities == pytest.approx({"good": 0.2, "neutral": 0.1, "bad": 0.7})
    assert "bad 70%" in verdict.reason


async def test_a_judge_that_is_unsure_abstains_and_says_so():
    verdict = await a_judge(FixedEngine(), a_head(0.4, 0.3, 0.3), sign_at=0.5).verdict(a_turn(user("hm")))
    assert (verdict.value, verdict.votes) == (None, (None,))
    assert "too unsure" in verdict.reason


async def test_constant_text_comes_first_and_a_vote_costs_one_prefill_a_prompt():
    engine = FixedEngine()
    judge = a_judge(engine, a_head(0.2, 0.1, 0.7))
    await judge.verdict(a_turn(user("shorter")))
    assert len(engine.asked) == len(PROMPTS) == 2
    assert [request.layers for request in engine.asked] == [(1,), (1,)]
    assert all(request.start == len(request.ids) for request in engine.asked)
    assert len(judge.prefixes[0]) == len(LABEL.constant)
    assert all(r.ids[: len(p)] == p for r, p in zip(engine.asked, judge.prefixes, strict=True))
    read_tokens = sum(len(r.ids) - len(p) for r, p in zip(engine.asked, judge.prefixes, strict=True))
    assert (judge.asked.votes, judge.asked.tokens) == (1, read_tokens)


async def test_features_are_the_states_prompt_by_prompt_and_then_the_wording():
    (features,) = await a_judge(FixedEngine((7.0, 8.0))).features([a_turn(user("thanks"))], (1,))
    assert features[:STATES].tolist() == [7.0, 8.0, 7.0, 8.0]
    assert len(features) == STATES + WORDING_COUNT


async def test_without_words_of_a_user_nobody_is_asked():
    engine = FixedEngine()
    for next_state in ([tool("37")], []):
        verdict = await a_judge(engine, a_head(1.0, 1e-9, 1e-9)).verdict(a_turn(*next_state))
        assert (verdict.value, verdict.votes) == (None, ())
    assert engine.asked == []


async def test_a_model_without_a_head_is_judged_by_the_wording_and_says_so(caplog):
    engine = FixedEngine()
    engine_says_good = FixedEngine.score

    async def score(sequences, policy):
        scores = await engine_says_good(engine, sequences, policy)
        return [TokenScores(logprobs=(), choice_logprobs=(0.0, -9.0, -9.0), version=0) for _ in scores]

    engine.score = score
    judge = a_judge(engine)
    verdict = await judge.verdict(a_turn(user("Thank you so much, it works perfectly now!")))
    assert verdict.value is Vote.GOOD
    assert "wording alone" in verdict.reason
    assert "nextstate judge fit" in caplog.text


async def test_a_head_that_was_fitted_here_is_found_by_its_fingerprint(tmp_path: Path):
    save(a_head(0.1, 0.2, 0.7), tmp_path / "tiny.safetensors")  # three equal labels, centred, are 0
    verdict = await a_judge(FixedEngine(), heads=tmp_path).verdict(a_turn(user("Thank you!")))
    assert verdict.value is Vote.BAD


async def test_a_fault_of_the_engine_leaves_the_turn_waiting():
    with pytest.raises(JudgeUnavailable, match="out of memory"):
        await a_judge(FixedEngine(fault="out of memory"), a_head(1, 1, 1)).verdict(a_turn(user("shorter")))


async def test_explicit_feedback_moves_the_head_a_little_is_kept_and_is_not_counted_twice(tmp_path: Path):
    save(a_head(0.2, 0.2, 0.6), tmp_path / "tiny.safetensors")
    kept = tmp_path / "learned" / "judge-head.safetensors"
    judge = a_judge(FixedEngine(), heads=tmp_path, learned=kept)
    turns = [a_turn(user(f"that will do nicely, number {n}")) for n in range(10)]
    before = (await judge.verdict(turns[0])).probabilities["good"]
    once = await judge.learn(turns, [Vote.GOOD] * 10)
    after = (await judge.verdict(turns[0])).probabilities["good"]
    assert before == pytest.approx(0.2, abs=1e-3)
    assert before < after < 0.9
    twice = await judge.learn(turns, [Vote.GOOD] * 10)
    assert torch.equal(once.weights, twice.weights)
    again = a_judge(FixedEngine(), heads=tmp_path, learned=kept)
    assert (await again.head()).feedback == 10
    assert (await again.verdict(turns[0])).probabilities["good"] == pytest.approx(after, abs=0.01)


async def test_feedback_learned_on_another_head_is_left_aside(tmp_path: Path):
    save(a_head(0.2, 0.2, 0.6), tmp_path / "tiny.safetensors")
    other = tmp_path / "learned" / "judge-head.safetensors"
    save(a_head(0.9, 0.05, 0.05, layers=()), other)
    assert read(other) is not None
    verdict = await a_judge(FixedEngine(), heads=tmp_path, learned=other).verdict(a_turn(user("hello")))
    assert verdict.value is Vote.BAD


def test_the_layers_are_at_six_and_seven_tenths_of_the_depth():
    assert (layers_of(30), layers_of(24), layers_of(2)) == ((18, 21), (14, 17), (1,))


def test_the_name_says_model_and_prompts():
    assert a_judge(FixedEngine()).name.startswith("scored:tiny:")
