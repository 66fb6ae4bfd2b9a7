"""The trainer's update beside one written down turn by turn: no tree, the library's own attention, and [R, V]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from nextstate.config import LearnConfig
from nextstate.engines.model import load
from nextstate.engines.packed import ATTENTION
from nextstate.learn import trainer as trainer_module
from nextstate.learn.baseline import advantages
from nextstate.learn.batches import Row, make_row, token_weights
from nextstate.learn.hints import best_by_token, best_for_reply, overlap, shared
from nextstate.learn.objectives.anchor import anchor_kl
from nextstate.learn.objectives.distillation import sampled_distillation, subset_distillation, topk_distillation
from nextstate.learn.objectives.policy_gradient import importance_weights, policy_gradient
from nextstate.learn.trainer import Trainer
from nextstate.store.learning import Sample
from nextstate.types import Turn
from tests.learn.conftest import in_float64, shake
from tests.learn.test_trainer import FORMS

Kind = Callable[..., Trainer]


@pytest.fixture(params=["llama", "qwen"])
def make(request: pytest.FixtureRequest, tiny_model_path: Path) -> Kind:
    def make_one(*, full: bool = False, **options: Any) -> Trainer:
        loaded = load(str(tiny_model_path), dtype="float32", device="cpu")
        if request.param == "qwen":
            torch.manual_seed(0)
            sizes = {k: getattr(loaded.model.config, k) for k in (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "initializer_range")}  # fmt: skip
            config = Qwen2Config(**sizes, attn_implementation=ATTENTION, tie_word_embeddings=True)
            loaded = replace(loaded, model=Qwen2ForCausalLM(config).eval().requires_grad_(False))
        in_float64(loaded.model)
        kind = {"weights": "full" if full else "lora"}
        trainer = Trainer(loaded, LearnConfig(**{"rank": 4, "alpha": 8, "top_k": 8, **kind, **options}))
        if trainer.average is not None:  # it is somewhere else than the policy
            shake(trainer, 0.3)
            trainer.average_anew()
        shake(trainer)
        return trainer

    return make_one


def a_turn(prompt: Sequence[int], reply: Sequence[int], **changes: Any) -> tuple[Turn, tuple[tuple[int, ...], ...]]:
    hinted = changes.pop("hinted", ())
    turn = {
        "turn_id": 1,
        "prompt_ids": tuple(prompt),
        "reply_ids": tuple(reply),
        "reply_logprobs": tuple(-5.0 - 0.1 * n for n in range(len(reply))),
        "reply_versions": (0,) * len(reply),
        "temperature": 1.0,
    }
    return Turn(**{**turn, **changes}), tuple(map(tuple, hinted))


TRUNK = list(range(50, 110))
HINT, OTHER = [200, 201, 202], [210]
BATCHES = {
    "a session that only grows": [
        a_turn(TRUNK[:20], TRUNK[20:25], hinted=([*TRUNK[:18], *HINT, *TRUNK[18:20]],)),
        a_turn(TRUNK[:40], TRUNK[40:44]),
        a_turn(TRUNK[:50], TRUNK[50:60], hinted=([*TRUNK[:48], *HINT, *TRUNK[48:50]], [*TRUNK[:48], *OTHER])),
    ],
    "passing words close each prompt": [
        a_turn([*TRUNK[:n], 120, n], TRUNK[n : n + 4], hinted=([*TRUNK[:n], *HINT, 120, n],)) for n in (10, 24, 38)
    ],
    "replies to one prompt, one of them twice, one a beginning": [
        a_turn(TRUNK[:10], [70, 71, 72], hinted=([*TRUNK[:10], *HINT], [*TRUNK[:10], *OTHER])),
        a_turn(TRUNK[:10], [70, 71, 73], temperature=0.7),
        a_turn(TRUNK[:10], [70, 71], reply_versions=(0, 5)),
        a_turn(TRUNK[:10], [70, 71, 72], hinted=([*TRUNK[:10], *OTHER],)),
    ],
    "strangers": [
        a_turn([60, 61, 62], [70], hinted=([60, *HINT, 61, 62],), reply_versions=(5,)),
        a_turn([90, 91], [92, 93, 94], temperature=0.7, hinted=([90, 91, *HINT], [90, *HINT], HINT)),
    ],
    "a hint that changes nothing beside one that does": [
        a_turn(TRUNK[:10], [70, 71, 72], hinted=(TRUNK[:10],)),
        a_turn(TRUNK[:12], [80, 81], hinted=([*TRUNK[:11], *HINT, TRUNK[11]],)),
    ],
}
OLDEST = 0


def samples_of(batch: str, monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """Samples whose hinted prompts are those of the batch, whatever a template would have made of their hints."""
    turns = BATCHES[batch]
    hinted: dict[int, tuple[tuple[int, ...], ...]] = {}
    samples = []
    for n, (turn, prompts) in enumerate(turns):
        hinted[n] = prompts
        samples.append(Sample(
            turn=replace(turn, turn_id=n), user="u", reward=1 if n % 2 else -1, hints=("",) * len(prompts), messages=()
        ))  # fmt: skip

    def made(sample: Sample, *args: Any, **kwargs: Any) -> Row:
        row = make_row(replace(sample, hints=()), *args, **kwargs)
        prompts = hinted[sample.turn.turn_id] if sample.hints else ()
        if "overlap" not in kwargs["hint_choice"]:
            prompts = prompts[:1]
        return replace(row, hinted_prompts=prompts, hint_numbers=tuple(range(len(prompts))))

    monkeypatch.setattr(trainer_module, "make_row", made)
    return samples


def turn_by_turn(trainer: Trainer, samples: Sequence[Sample]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of an update, every sequence computed alone and from its beginning."""
    config, model = trainer.config, trainer.model
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    causal.set_attn_implementation("sdpa")
    rows = [
        trainer_module.make_row(sample, advantage, trainer.loaded.tokenizer, oldest_version=OLDEST, max_tokens=10_000,
                                hint_choice=config.hint_choice)
        for sample, advantage in zip(
            samples, advantages([(s.user, s.reward) for s in samples], trainer.baselines), strict=True
        )
    ]  # fmt: skip
    per_turn, per_taught = token_weights(rows, with_teacher=False), token_weights(rows, with_teacher=True)

    def reply(row: Row, prompt: Sequence[int]) -> Tensor:
        logits = model(torch.tensor([[*prompt, *row.reply_ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        return (logits / row.temperature).log_softmax(-1)

    total = torch.zeros((), dtype=torch.float64)
    for row, of_turn, of_taught in zip(rows, per_turn, per_taught, strict=True):
        ids = torch.tensor(row.reply_ids)[:, None]
        new = reply(row, row.prompt_ids)
        old = new.detach()
        with torch.no_grad():
            with trainer.weights.as_base():
                base = reply(row, row.prompt_ids)
            context: AbstractContextManager[Any] = {
                "base": trainer.weights.as_base(), "average": trainer._averaged(), "policy": nullcontext()
            }[config.teacher]  # fmt: skip
            with context:
                teachers = [reply(row, prompt) for prompt in row.hinted_prompts]
        live = torch.tensor(row.live, dtype=torch.float64)
        sampled = torch.tensor(row.sampled_logprobs, dtype=torch.float64)
        new_R, old_R, base_R = (x.gather(1, ids)[:, 0] for x in (new, old, base))
        importance = importance_weights(old_R, sampled, cap=config.importance_cap)
        advantage = torch.full_like(old_R, row.advantage)
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        if config.objective != "distillation":
            term = policy_gradient(new_R, old_R, advantage, of_turn * live * importance, **clip)
            total = total + config.reward_weight * term
        total = total + config.kl_weight * anchor_kl(new_R, base_R, of_turn * live)
        if not teachers or config.objective == "binary":
            continue
        student_top = old.topk(config.top_k).indices
        overlaps = torch.stack([overlap(student_top, t.topk(config.top_k).indices) for t in teachers])
        if config.hint_choice == "overlap_by_token":
            chosen = best_by_token(overlaps)
        else:
            chosen = torch.full((len(ids),), best_for_reply(overlaps * live))
        teacher = torch.stack(teachers)[chosen, torch.arange(len(ids))]
        weights = of_taught * live * importance
        teacher_top = teacher.topk(config.top_k).indices
        if config.distillation == "sampled":
            term = sampled_distillation(
                new_R, old_R, teacher.gather(1, ids)[:, 0], weights, gap_clip=config.gap_clip, **clip
            )
        elif config.distillation == "topk":
            term = topk_distillation(new.gather(1, teacher_top), teacher.gather(1, teacher_top), weights,
                                     divergence=config.divergence, alpha=config.jsd_alpha)  # fmt: skip
        else:
            top = teacher_top if config.subset == "teacher" else student_top
            values = teacher.gather(1, top)
            if config.subset == "intersection":
                values = values.masked_fill(~shared(top, teacher_top), torch.nan)
            term = subset_distillation(new.gather(1, top), old.gather(1, top), values, weights,
                                       gap_clip=config.gap_clip, **clip)  # fmt: skip
        total = total + config.teacher_weight * term
    total.backward()
    gradients = [p.grad.clone() for p in trainer.parameters]
    model.zero_grad()
    causal.set_attn_implementation(ATTENTION)
    return float(total.detach()), gradients


def by_tree(trainer: Trainer, samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch) -> tuple[float, list[Tensor]]:
    monkeypatch.setattr(trainer.optimizer, "step", lambda: None)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(1.0))
    metrics = trainer.update(samples, oldest_version=OLDEST)
    trainer.baselines = {}
    weights = {"policy_gradient": trainer.config.reward_weight, "distillation": trainer.config.teacher_weight,
               "anchor_kl": trainer.config.kl_weight}  # fmt: skip
    loss = sum(weight * metrics.get(name, 0.0) for name, weight in weights.items())
    return loss, [p.grad.clone() for p in trainer.parameters]


def check(trainer: Trainer, samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    expected_loss, expected = turn_by_turn(trainer, samples)  # first: an update moves baselines and average
    loss, gradients = by_tree(trainer, samples, monkeypatch)
    assert loss == pytest.approx(expected_loss, abs=1e-9)
    assert max(g.abs().max().item() for g in expected) > 1e-4
    assert max((a - b).abs().max().item() for a, b in zip(gradients, expected, strict=True)) < 1e-9


OPTIONS: list[dict[str, Any]] = [
    {"objective": "binary"},
    {"objective": "distillation"},
    *FORMS,
    {"hint_choice": "overlap", "distillation": "subset", "subset": "intersection"},
    {"hint_choice": "overlap_by_token"},
    {"hint_choice": "overlap", "distillation": "sampled"},
]
MOVES_ALL = {"max_log_ratio": 1000.0, "kl_weight": 0.5}
"""No turn is kept out for the log-probs that were made up for it."""


@pytest.mark.parametrize("make", ["llama"], indirect=True)
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradient_of_all_batches_at_once_are_those_of_their_turns_one_by_one(
    make: Kind, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    monkeypatch.setitem(BATCHES, "all", [turn for turns in BATCHES.values() for turn in turns])
    check(make(**MOVES_ALL, **options), samples_of("all", monkeypatch), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_loss_and_gradient_are_those_of_the_turns_one_by_one(
    make: Kind, monkeypatch: pytest.MonkeyPatch, batch: str, options: dict[str, Any]
):
    check(make(**MOVES_ALL, **options), samples_of(batch, monkeypatch), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["policy", "average", "base"])
@pytest.mark.parametrize("batch", BATCHES)
def test_so_they_are_with_all_weights_trained_and_under_every_teacher(
    make: Kind, monkeypatch: pytest.MonkeyPatch, batch: str, teacher: str
):
    options = {"teacher": teacher, "hint_choice": "overlap_by_token"}
    for full in (False, True):
        check(make(full=full, **MOVES_ALL, **options), samples_of(batch, monkeypatch), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 45])
@pytest.mark.parametrize("batch", BATCHES)
def test_so_they_are_however_the_update_is_split(
    make: Kind, monkeypatch: pytest.MonkeyPatch, batch: str, micro_batch_tokens: int
):
    trainer = make(micro_batch_tokens=micro_batch_tokens, **MOVES_ALL)
    check(trainer, samples_of(batch, monkeypatch), monkeypatch)


@pytest.mark.parametrize("form", FORMS)
def test_a_hint_that_changes_nothing_gives_exactly_no_gradient_beside_turns_without(
    make: Kind, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
):
    trainer = make(objective="distillation", **{**MOVES_ALL, "kl_weight": 0.0}, **form)
    turns = [
        a_turn(TRUNK[:10], [70, 71, 72], hinted=(TRUNK[:10],), temperature=0.7),
        a_turn(TRUNK[:12], [80, 81]),
        a_turn(TRUNK[:10], [70, 75], hinted=(TRUNK[:10],)),
    ]
    monkeypatch.setitem(BATCHES, "unchanged", turns)
    _, gradients = by_tree(trainer, samples_of("unchanged", monkeypatch), monkeypatch)
    assert max(g.abs().max().item() for g in gradients) == 0.0


def test_a_shared_token_is_computed_once_under_each_set_of_weights(make: Kind, monkeypatch: pytest.MonkeyPatch):
    def computed(batch: str, **options: Any) -> int:
        trainer = make(**MOVES_ALL, **options)
        return trainer.update(samples_of(batch, monkeypatch), oldest_version=OLDEST)["tokens_computed"]

    # the last reply token of a turn is not read; each hinted prompt is cut off where its hint begins
    growing = 59 + 59 + (3 + 2 + 4) + (3 + 2 + 9)
    assert computed("a session that only grows") == growing
    assert computed("a session that only grows", teacher="base") == growing
    assert computed("a session that only grows", objective="binary") == 59 + 59
    # an average has to read the prompts too: 18 and 48 tokens of one trunk
    assert computed("a session that only grows", teacher="average") == growing + 48
    # three turns, each of them 2 passing tokens and 3 of its reply behind the trunk, whose first 38 tokens they need
    assert computed("passing words close each prompt") == 2 * (38 + 3 * 5) + 3 * (3 + 5)
