"""What the gate measures in the trainer, and what it decides; loading and the probe are in test_process.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nextstate.config import GateConfig
from nextstate.learn import gate
from nextstate.learn.gate import examine, measure_held_out, measure_perplexity, preference_shift
from nextstate.learn.passages import PASSAGES
from nextstate.store import judging, learning, status
from nextstate.store.store import Store
from nextstate.types import Feedback, SkipReason, TokenScores, TurnState, Vote
from tests.learn.conftest import TrainerFactory, a_sample, shake
from tests.rows import judged_turn


def test_an_untrained_policy_finds_plain_texts_as_likely_as_the_base_and_a_trained_one_does_not(
    make_trainer: TrainerFactory,
):
    trainer = make_trainer()
    assert measure_perplexity(trainer) == pytest.approx(1.0)
    shake(trainer)
    by_hand = 0.0
    tokens = 0
    for text in PASSAGES:
        ids = trainer.loaded.tokenizer.encode(text, add_special_tokens=False)
        rows, targets = range(len(ids) - 1), torch.tensor(ids[1:])[:, None]
        with torch.no_grad():
            policy = trainer.logits([ids], rows).log_softmax(-1).gather(1, targets)
            base = trainer.logits([ids], rows, base=True).log_softmax(-1).gather(1, targets)
        by_hand += float((base - policy).sum())
        tokens += len(ids) - 1
    assert measure_perplexity(trainer) == pytest.approx(math.exp(by_hand / tokens), rel=1e-4)
    assert measure_perplexity(trainer) != pytest.approx(1.0, abs=1e-3)


def test_held_out_turns_are_scored_token_for_token_whatever_shares_their_pass(make_trainer: TrainerFactory):
    trainer = make_trainer()
    shake(trainer)
    turns = [
        a_sample(trainer, turn_id=n, reply=reply).turn for n, reply in ((3, (60, 61, 62)), (4, (70,)), (5, (8, 9)))
    ]
    expected = {str(turn.turn_id): sum(turn.reply_logprobs) / len(turn.reply_ids) for turn in turns}
    assert measure_held_out(trainer, turns) == pytest.approx(expected, abs=1e-4)
    assert measure_held_out(trainer, []) == {}


REWARDS = {"1": 1, "2": 1, "3": -1, "4": -1}


def test_the_shift_by_hand():
    before = {"1": -1.0, "2": -2.0, "3": -1.0, "9": 0.0}
    after = {"1": -1.5, "2": -2.1, "3": -0.5, "4": -7.0}
    # Good ones moved by -0.5 and -0.1, the bad one by +0.5; the parent never scored 4.
    assert preference_shift(REWARDS, after, before, fewest=3) == pytest.approx(-0.3 - 0.5)


@pytest.mark.parametrize(
    "before",
    [{}, {"1": 0.0, "3": 0.0}, {"1": 0.0, "2": 0.0, "9": 0.0}],
    ids=["none", "too few", "no bad one"],
)
def test_few_turns_or_turns_of_one_kind_are_no_measurement(before: dict[str, float]):
    fewest = 3 if len(before) < 3 else 2
    assert preference_shift(REWARDS, dict.fromkeys(REWARDS, 0.0), before, fewest=fewest) is None


class Agrees:
    """An engine that computes what the trainer did."""

    def __init__(self, probe: dict[str, Any]) -> None:
        self._probe = probe

    async def publish(self, *_: Any) -> None:
        pass

    async def score(self, *_: Any) -> list[TokenScores]:
        return [TokenScores(logprobs=tuple(self._probe["logprobs"]), choice_logprobs=(), version=1)]


HEALTHY = {"sequences": [[1, 2, 3]], "starts": [1], "logprobs": [-1.0, -2.0], "divergence": 0.1}
HEALTHY |= {"perplexity_ratio": 1.2, "preference_shift": 0.05, "held_out": {}}


@pytest.mark.parametrize(
    ("changed", "passed", "says"),
    [
        ({}, True, "passed"),
        ({"perplexity_ratio": 1.6}, False, "1.60 times the base's"),
        ({"perplexity_ratio": math.nan}, False, "times the base's"),
        ({"preference_shift": -0.6}, False, "moved by -0.600 nats"),
        ({"preference_shift": math.nan}, False, "judged bad"),
        ({"preference_shift": -0.4}, True, "passed"),
        ({"preference_shift": None}, True, "no preference measured: 0 held-out turns"),
        ({"perplexity_ratio": None}, True, "passed"),
    ],
)
async def test_each_bound_is_held(tmp_path: Path, changed: dict[str, Any], passed: bool, says: str):
    probe = {**HEALTHY, **changed}
    (tmp_path / gate.PROBE_FILE).write_text(json.dumps(probe))
    result = await examine(Agrees(probe), 1, tmp_path, GateConfig(), exact=True)  # type: ignore[arg-type]
    assert (result.passed, says in result.why) == (passed, True), result.why
    for name in ("perplexity_ratio", "preference_shift"):
        assert passed is False or result.measured.get(name) == probe[name]


# -- turns kept out of training ---------------------------------------------------------------------------------------


def test_every_tenth_signed_turn_is_kept_out_and_no_earlier_one(store: Store):
    ids = [judged_turn(store, Vote.GOOD) for _ in range(9)]
    assert store.write_now(learning.hold_out, every=10) == 0
    ids.append(judged_turn(store, Vote.BAD))
    assert store.write_now(learning.hold_out, every=10) == 1
    assert store.write_now(learning.hold_out, every=10) == 0
    row = store.read_now(status.show_turn, ids[0])
    assert (row.state, row.reason) == (TurnState.LEFT_OUT, SkipReason.HELD_OUT)
    assert store.write_now(judging.add_feedback, ids[0], Feedback(value=Vote.BAD)) == "kept"
    [(turn, reward)] = store.read_now(learning.held_out_turns, limit=5, max_tokens=100)
    assert (turn.turn_id, reward) == (ids[0], 1)
    assert store.read_now(learning.held_out_turns, limit=5, max_tokens=4) == []


def test_the_newest_held_out_turns_are_measured(store: Store):
    ids = [judged_turn(store, Vote.GOOD) for _ in range(6)]
    assert store.write_now(learning.hold_out, every=2) == 3
    found = store.read_now(learning.held_out_turns, limit=2, max_tokens=100)
    assert [turn.turn_id for turn, _ in found] == [ids[2], ids[1]]
    assert store.read_now(status.status).accounted_for
