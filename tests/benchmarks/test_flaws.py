"""Each flaw does what its description says, and nothing is left of it afterwards."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import flaws
from nextstate.config import LearnConfig
from nextstate.learn import trainer as trainer_module
from nextstate.learn.trainer import Trainer
from nextstate.store.learning import Sample
from tests.learn.conftest import TrainerFactory, a_sample, shake

PUBLISHED = {"objective": "hybrid", "distillation": "subset", "teacher": "policy", "kl_weight": 0.0, "top_k": 4}
HINT = "be brief, please"


def a_trainer(make: TrainerFactory, **options: Any) -> Trainer:
    trainer = make(**{**PUBLISHED, **options})
    shake(trainer)
    return trainer


def same_prompt(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, sample: Sample) -> None:
    """Let the hinted prompt be the prompt, so that the teacher is the student."""
    row = trainer_module.make_row(sample, 0.0, trainer.loaded.tokenizer, oldest_version=0, max_tokens=400)
    same = replace(row, hinted_prompts=(row.prompt_ids,), hint_numbers=(0,))
    monkeypatch.setattr(trainer_module, "make_row", lambda *_, **__: same)


def test_w1_gives_a_loss_of_minus_one_even_for_a_teacher_that_is_the_student(
    make_trainer: TrainerFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    # All gaps are 20 nats, clipped to C = 1; the shares sum to 1; at rho = 1 the loss is -sum of shares * 1 = -1.
    trainer = a_trainer(make_trainer)
    sample = a_sample(trainer, hints=(HINT,))
    same_prompt(monkeypatch, trainer, sample)
    with flaws.teacher_not_normalised():
        assert trainer.update([sample], oldest_version=0)["distillation"] == pytest.approx(-1.0, abs=1e-6)


def test_without_w1_that_teacher_gives_nothing(
    make_trainer: TrainerFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    trainer = a_trainer(make_trainer)
    sample = a_sample(trainer, hints=(HINT,))
    same_prompt(monkeypatch, trainer, sample)
    assert trainer.update([sample], oldest_version=0)["distillation"] == 0.0


def test_w2_rewards_every_likely_token_of_a_turn_that_has_no_teacher(make_trainer: TrainerFactory):
    # The gap is 0 - log p, at least 1 nat for each of the four tokens, since none of 379 has a share of 1/e; clipped
    # to C = 1. Weighed by shares that sum to 1 the loss is -1, where a turn without teacher has none.
    trainer = a_trainer(make_trainer)
    assert trainer.update([a_sample(trainer)], oldest_version=0)["distillation"] == 0.0
    trainer = a_trainer(make_trainer)
    sample = a_sample(trainer)
    with flaws.missing_is_zero():
        assert trainer.update([sample], oldest_version=0)["distillation"] == pytest.approx(-1.0, abs=1e-6)


def test_w8_leaves_rewards_as_they_are(make_trainer: TrainerFactory):
    trainer = a_trainer(make_trainer)
    sample = a_sample(trainer)
    with flaws.no_baseline():
        trainer.update([sample], oldest_version=0)
        assert trainer.baselines == {}
    trainer.update([sample], oldest_version=0)
    assert trainer.baselines == {"u": pytest.approx(-0.1)}  # 0 + 0.1 * (-1 - 0)


def test_w19_makes_other_tokens_of_the_same_text_and_pads_their_log_probs(
    make_trainer: TrainerFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    trainer = a_trainer(make_trainer)
    tokenizer = trainer.loaded.tokenizer
    whole = tuple(tokenizer.encode("the fox", add_special_tokens=False))
    # The same text as it can be sampled: letter by letter.
    letters = tuple(token for sign in "the fox" for token in tokenizer.encode(sign, add_special_tokens=False))
    assert len(letters) == 7 > len(whole)
    end = tokenizer.eos_token_id
    sample = a_sample(trainer, reply=(*letters, end))
    seen: list[Any] = []
    monkeypatch.setattr(trainer_module.Trainer, "_step", lambda self, rows, scored: seen.extend(rows) or {})
    counts: Counter[str] = Counter()
    with flaws.retokenised(counts):
        trainer.update([], oldest_version=0)
        row = trainer_module.make_row(sample, 0.0, tokenizer, oldest_version=0, max_tokens=400)
    newline = tuple(tokenizer.encode("\n", add_special_tokens=False))
    assert row.reply_ids == (*whole, end, *newline)  # the template closes an answer with a line of its own
    assert counts == Counter({"replies": 1, "other tokens": 1, "other length": 1})
    assert row.sampled_logprobs == sample.turn.reply_logprobs[: len(whole) + 2]  # of other tokens than these
    # A reply that is sampled as it would be encoded gets one token more, which nobody sampled, and a log-prob of 0.
    with flaws.retokenised():
        row = trainer_module.make_row(
            a_sample(trainer, reply=(*whole, end)), 0.0, tokenizer, oldest_version=0, max_tokens=400
        )
    assert row.reply_ids[-1:] == newline
    assert row.sampled_logprobs[-1] == 0.0


def test_no_flaw_is_left_behind():
    before = dict(vars(trainer_module))
    for flaw in flaws.FLAWS.values():
        with flaw():
            pass
    assert dict(vars(trainer_module)) == before


def test_no_configuration_can_switch_a_flaw_on():
    assert not set(LearnConfig.model_fields) & {name.lower() for name in flaws.FLAWS}
    assert "benchmarks" not in inspect.getsource(trainer_module)


@pytest.mark.parametrize("flaw", [name for name in flaws.FLAWS if name != "as-it-should-be"])
def test_a_flaw_changes_what_an_update_does(make_trainer: TrainerFactory, flaw: str):
    changed = []
    for patched in (flaws.FLAWS["as-it-should-be"], flaws.FLAWS[flaw]):
        trainer = a_trainer(make_trainer)
        samples = [
            a_sample(trainer, hints=(HINT,), turn_id=1),
            a_sample(trainer, "an ox?", (*(60, 61), trainer.loaded.tokenizer.eos_token_id), reward=1, turn_id=2),
        ]
        with patched():
            trainer.update(samples, oldest_version=0)
            trainer.update(samples, oldest_version=0)
        changed.append(torch.cat([parameter.detach().flatten() for parameter in trainer.parameters]))
    assert not torch.equal(*changed)
