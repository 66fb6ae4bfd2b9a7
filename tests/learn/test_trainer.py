from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nextstate.chat.template import render_with_hint
from nextstate.learn import trainer as trainer_module
from nextstate.learn.trainer import Trainer
from nextstate.store.learning import Sample
from tests.learn.conftest import TrainerFactory, a_sample, gradients, shake


def gradient_of(trainer: Trainer, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The update's gradient, before clipping, without changing the weights."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(1.0))
    trainer.update(samples, oldest_version=0)
    return gradients(trainer)


def test_a_bad_turn_becomes_less_likely_and_a_good_one_more(make_trainer: TrainerFactory):
    for reward, direction in ((-1, -1), (1, 1)):
        trainer = make_trainer(objective="binary", kl_weight=0.0)
        sample = a_sample(trainer, reward=reward)
        trainer.update([sample], oldest_version=0)
        after = a_sample(trainer)
        change = sum(after.turn.reply_logprobs) - sum(sample.turn.reply_logprobs)
        assert change * direction > 0.01


def test_the_hinted_teacher_pulls_the_reply_towards_what_it_would_say(make_trainer: TrainerFactory):
    trainer = make_trainer(objective="distillation", kl_weight=0.0, distillation="sampled", gap_clip=100.0)
    shake(trainer)
    sample = a_sample(trainer, hints=("be brief, please",), reply=(60,))
    row = trainer_module.make_row(sample, 0.0, trainer.loaded.tokenizer, oldest_version=0, max_tokens=400)
    with torch.no_grad():
        teacher = trainer.logits(row.hinted_prompts, [len(row.hinted_prompts[0]) - 1]).log_softmax(-1)[0, 60]
    gap = float(teacher) - sample.turn.reply_logprobs[0]
    trainer.update([sample], oldest_version=0)
    change = a_sample(trainer, reply=(60,)).turn.reply_logprobs[0] - sample.turn.reply_logprobs[0]
    assert abs(gap) > 1e-3
    assert change * gap > 0


FORMS: list[dict[str, Any]] = [
    {"distillation": "sampled"},
    *({"distillation": "subset", "subset": subset} for subset in ("student", "teacher", "intersection")),
    *({"distillation": "topk", "divergence": divergence} for divergence in ("reverse_kl", "forward_kl", "jsd")),
    {"distillation": "topk", "divergence": "jsd", "jsd_alpha": 0.3},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_teacher_that_reads_the_same_prompt_gives_exactly_no_gradient(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
):
    # T5, through the whole trainer: teacher and student run in separate forward passes of one micro-batch. They are
    # scored at one temperature, or this would not hold at any other than 1.
    trainer = make_trainer(objective="distillation", kl_weight=0.0, **form)
    shake(trainer)
    sample = a_sample(trainer, hints=("be brief, please",), temperature=0.7)
    row = trainer_module.make_row(sample, -1.0, trainer.loaded.tokenizer, oldest_version=0, max_tokens=400)
    same = replace(row, hinted_prompts=(row.prompt_ids,), hint_numbers=(0,))
    monkeypatch.setattr(trainer_module, "make_row", lambda *_, **__: same)
    assert gradient_of(trainer, [sample], monkeypatch).abs().max().item() == 0.0


@pytest.mark.parametrize(("teacher", "is_zero"), [("base", False), ("average", False), ("policy", True)])
def test_a_teacher_that_stayed_behind_pulls_a_policy_back_that_has_moved(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch, teacher: str, is_zero: bool
):
    trainer = make_trainer(objective="distillation", kl_weight=0.0, distillation="topk", teacher=teacher)
    shake(trainer)
    row = trainer_module.make_row(
        a_sample(trainer, hints=("be brief, please",)), -1.0, trainer.loaded.tokenizer, oldest_version=0, max_tokens=400
    )
    same = replace(row, hinted_prompts=(row.prompt_ids,), hint_numbers=(0,))
    monkeypatch.setattr(trainer_module, "make_row", lambda *_, **__: same)
    assert (gradient_of(trainer, [a_sample(trainer)], monkeypatch).abs().max().item() == 0.0) is is_zero


def test_at_the_base_the_anchor_gives_exactly_no_gradient(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(objective="distillation", kl_weight=1.0)  # no hint: the anchor is alone
    assert gradient_of(trainer, [a_sample(trainer)], monkeypatch).abs().max().item() == 0.0


@pytest.mark.parametrize(
    "options",
    [
        *FORMS,
        {"hint_choice": "overlap", "distillation": "subset", "subset": "intersection", "top_k": 4},
        {"hint_choice": "overlap_by_token", "top_k": 4},
    ],
)
def test_splitting_an_update_into_micro_batches_changes_nothing(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    found = []
    for micro_batch_tokens in (1, 10_000):
        trainer = make_trainer(micro_batch_tokens=micro_batch_tokens, kl_weight=0.5, **options)
        shake(trainer)
        samples = [
            a_sample(trainer, "a fox?", (60, 61, 62), hints=("be brief, please", "the lazy dog", "a fox")),
            a_sample(trainer, "the lazy dog and the fox?", (70, 71), reward=1, temperature=0.7),
            a_sample(trainer, "jumps", (80, 81, 82, 83, 84), hints=("say more words",)),
        ]
        found.append(gradient_of(trainer, samples, monkeypatch))
    assert found[0].abs().max().item() > 1e-4
    assert (found[0] - found[1]).abs().max().item() < 1e-9


def test_tokens_of_versions_too_old_change_nothing(make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(objective="binary", kl_weight=0.5)
    shake(trainer)
    sample = a_sample(trainer)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    stale = replace(sample, turn=replace(sample.turn, reply_versions=(0, 1, 1)))
    other = replace(stale, turn=replace(stale.turn, reply_logprobs=(-30.0, *stale.turn.reply_logprobs[1:])))
    metrics = trainer.update([stale], oldest_version=1)
    before = gradients(trainer)
    trainer.baselines = {}
    trainer.update([other], oldest_version=1)
    assert metrics["stale_tokens"] == 1
    assert before.abs().max().item() > 0
    assert (gradients(trainer) - before).abs().max().item() == 0.0


def test_turns_count_equally_however_long(make_trainer: TrainerFactory):
    trainer = make_trainer(objective="binary", kl_weight=0.0, learning_rate=1e-9)
    samples = [a_sample(trainer, reply=(60,), reward=1), a_sample(trainer, reply=tuple(range(60, 79)), reward=-1)]
    # at ratio 1 the loss is minus the mean advantage over turns: -(1 - 1) / 2
    assert trainer.update(samples, oldest_version=0)["policy_gradient"] == pytest.approx(0.0, abs=1e-6)


def test_a_token_sampled_by_another_version_is_weighted_by_the_ratio_up_to_the_cap(make_trainer: TrainerFactory):
    trainer = make_trainer(objective="binary", kl_weight=0.0)
    sample = a_sample(trainer, reply=(60,), reward=1)
    likelier = replace(sample, turn=replace(sample.turn, reply_logprobs=(sample.turn.reply_logprobs[0] + 1.0,)))
    # the sampler was e times likelier to say it, so it counts 1 / e: loss -0.3679 instead of -1
    assert trainer.update([likelier], oldest_version=0)["policy_gradient"] == pytest.approx(-0.36788, abs=1e-4)


def test_a_second_step_is_measured_against_the_weights_before_the_first(make_trainer: TrainerFactory):
    once, twice = make_trainer(objective="binary", steps=1), make_trainer(objective="binary", steps=2)
    changes = []
    for trainer in (once, twice):
        sample = a_sample(trainer)
        trainer.update([sample], oldest_version=0)
        changes.append(sum(a_sample(trainer).turn.reply_logprobs) - sum(sample.turn.reply_logprobs))
    assert changes[1] < changes[0] < 0


def test_starting_over_gives_the_base_back(make_trainer: TrainerFactory):
    trainer = make_trainer()
    before = a_sample(trainer)
    trainer.update([before], oldest_version=0)
    assert a_sample(trainer).turn.reply_logprobs != before.turn.reply_logprobs
    trainer.start_over()
    assert a_sample(trainer).turn.reply_logprobs == before.turn.reply_logprobs
    assert trainer.baselines == {}


def test_only_the_adapter_is_trained(make_trainer: TrainerFactory):
    trainer = make_trainer()
    # rank 4 on seven linear layers of two blocks: 4 * (in + out) each; hidden 32, key-value 16, intermediate 64
    per_block = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert sum(p.numel() for p in trainer.parameters) == 2 * per_block


# -- which hint, which tokens -----------------------------------------------------------------------------------------

HINTS = ("be brief, please", "the lazy dog jumps over the fox", "a fox")


def replies_after_hints(trainer: Trainer, sample: Sample) -> list[torch.Tensor]:
    """[R, V] log-probs of the reply for each of HINTS, one sequence at a time and not by the trainer's way."""
    found = []
    for hint in HINTS:
        prompt = render_with_hint(trainer.loaded.tokenizer, sample.messages, hint)
        sequence, keep = [*prompt, *sample.turn.reply_ids[:-1]], range(len(prompt) - 1, len(prompt) + 2)
        with torch.no_grad():
            found.append(trainer.logits([sequence], list(keep)).log_softmax(-1))
    return found


def plain_reply(trainer: Trainer, sample: Sample) -> torch.Tensor:
    prompt = sample.turn.prompt_ids
    with torch.no_grad():
        keep = range(len(prompt) - 1, len(prompt) + 2)
        return trainer.logits([[*prompt, *sample.turn.reply_ids[:-1]]], list(keep)).log_softmax(-1)


def common(student: torch.Tensor, teacher: torch.Tensor, k: int) -> list[int]:
    sets = [[set(row.topk(k).indices.tolist()) for row in logprobs] for logprobs in (student, teacher)]
    return [len(a & b) for a, b in zip(*sets, strict=True)]


@pytest.mark.parametrize("k", [1, 4, 16])
def test_the_teacher_reads_the_hint_after_which_its_tokens_are_most_often_the_students(
    make_trainer: TrainerFactory, k: int
):
    trainer = make_trainer(objective="distillation", hint_choice="overlap", top_k=k, kl_weight=0.0)
    shake(trainer, 0.5)
    sample = a_sample(trainer, hints=HINTS)
    student = plain_reply(trainer, sample)
    sums = [sum(common(student, teacher, k)) for teacher in replies_after_hints(trainer, sample)]
    by_length = sorted(range(3), key=lambda n: len(HINTS[n]))
    best = max(by_length, key=lambda n: sums[n])  # the first, so the shortest, of equal ones
    metrics = trainer.update([sample], oldest_version=0)
    assert metrics["hints_read"] == {"1": [best]}


def test_stale_tokens_have_no_say_in_the_choice(make_trainer: TrainerFactory):
    trainer = make_trainer(objective="distillation", hint_choice="overlap", top_k=8)
    trainer.optimizer.step = lambda: None
    shake(trainer, 0.5)
    sample = a_sample(trainer, hints=HINTS)
    student = plain_reply(trainer, sample)
    overlaps = [common(student, teacher, 8) for teacher in replies_after_hints(trainer, sample)]
    by_length = sorted(range(3), key=lambda n: len(HINTS[n]))
    chosen = set()
    for live in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
        best = max(by_length, key=lambda n: sum(o * ok for o, ok in zip(overlaps[n], live, strict=True)))
        some_stale = replace(sample, turn=replace(sample.turn, reply_versions=live))
        assert trainer.update([some_stale], oldest_version=1)["hints_read"] == {"1": [best]}
        chosen.add(best)
    assert len(chosen) > 1


def test_by_token_each_is_corrected_by_its_own_hint(make_trainer: TrainerFactory):
    trainer = make_trainer(
        objective="distillation", hint_choice="overlap_by_token", top_k=8, kl_weight=0.0, distillation="topk"
    )
    shake(trainer, 0.5)
    sample = a_sample(trainer, hints=HINTS)
    student, teachers = plain_reply(trainer, sample), replies_after_hints(trainer, sample)
    by_length = sorted(range(3), key=lambda n: len(HINTS[n]))
    overlaps = [common(student, teacher, 8) for teacher in teachers]
    chosen = [max(by_length, key=lambda n: overlaps[n][t]) for t in range(3)]
    expected = 0.0
    for t, n in enumerate(chosen):
        top = teachers[n][t].topk(8).indices
        p, q = student[t][top].exp(), teachers[n][t][top].exp()
        rest_p, rest_q = 1 - p.sum(), 1 - q.sum()
        expected += float((p * (p / q).log()).sum() + rest_p * (rest_p / rest_q).log()) / 3
    metrics = trainer.update([sample], oldest_version=0)
    assert metrics["hints_read"] == {"1": sorted(set(chosen))}
    assert len(set(chosen)) > 1
    assert metrics["distillation"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("hint_choice", "number"), [("first", 0), ("longest", 1)])
def test_one_hint_is_read_where_no_overlap_is_asked_for(make_trainer: TrainerFactory, hint_choice: str, number: int):
    trainer = make_trainer(hint_choice=hint_choice)
    once = trainer.update([a_sample(trainer, hints=HINTS[number : number + 1])], oldest_version=0)
    trainer = make_trainer(hint_choice=hint_choice)
    metrics = trainer.update([a_sample(trainer, hints=HINTS)], oldest_version=0)
    assert metrics["hints_read"] == {"1": [number]}
    assert (metrics["distillation"], metrics["tokens_computed"]) == (once["distillation"], once["tokens_computed"])


def test_a_hint_whose_prompt_does_not_fit_gives_way_to_the_next(make_trainer: TrainerFactory):
    trainer = make_trainer()
    sample = a_sample(trainer, hints=("the lazy dog jumps over " * 20, "a fox"))
    options = {"oldest_version": 0, "hint_choice": "first"}
    room = len(render_with_hint(trainer.loaded.tokenizer, sample.messages, "a fox")) + 3
    fits = trainer_module.make_row(sample, 0.0, trainer.loaded.tokenizer, max_tokens=room, **options)
    assert fits.hint_numbers == (1,)
    none = trainer_module.make_row(sample, 0.0, trainer.loaded.tokenizer, max_tokens=room - 1, **options)
    assert none.hinted_prompts == ()


@pytest.mark.parametrize("subset", ["student", "teacher", "intersection"])
def test_the_subset_is_whose_it_is_said_to_be(make_trainer: TrainerFactory, subset: str):
    trainer = make_trainer(
        objective="distillation", distillation="subset", subset=subset, top_k=4, gap_clip=100.0, kl_weight=0.0
    )
    shake(trainer, 0.5)
    sample = a_sample(trainer, hints=HINTS)
    student, teacher = plain_reply(trainer, sample), replies_after_hints(trainer, sample)[0]
    expected, sizes = 0.0, set()
    for q, p in zip(student, teacher, strict=True):
        tops = set(q.topk(4).indices.tolist()), set(p.topk(4).indices.tolist())
        ids = sorted({"student": tops[0], "teacher": tops[1], "intersection": tops[0] & tops[1]}[subset])
        sizes.add(len(ids))
        if ids:
            weights = q[ids].exp() / q[ids].exp().sum()
            expected -= float((weights * (p[ids] - q[ids])).sum()) / 3  # at ratio 1 the loss is -sum A
    assert (sizes == {4}) == (subset != "intersection")
    assert trainer.update([sample], oldest_version=0)["distillation"] == pytest.approx(expected, rel=1e-4)


# -- turns that the version in training would not have said -----------------------------------------------------------


def moved(sample: Sample, *nats: float, turn_id: int = 2) -> Sample:
    """The same turn, its tokens so much likelier to the weights of now than to its sampler."""
    logprobs = tuple(lp - by for lp, by in zip(sample.turn.reply_logprobs, nats, strict=True))
    return replace(sample, turn=replace(sample.turn, turn_id=turn_id, reply_logprobs=logprobs))


@pytest.mark.parametrize(
    ("nats", "is_off"),
    [
        ((2.1, 2.1, 2.1), True),
        ((-2.1, -2.1, -2.1), True),
        ((1.9, 1.9, 1.9), False),
        ((9.0, 0.0, -8.0), False),  # a mean of 1/3: single tokens have their importance weight
    ],
)
def test_a_turn_beyond_the_mean_log_ratio_is_named_and_counted(
    make_trainer: TrainerFactory, nats: tuple[float, ...], is_off: bool
):
    trainer = make_trainer(max_log_ratio=2.0)
    sample = a_sample(trainer)
    metrics = trainer.update([sample, moved(replace(sample, reward=1), *nats)], oldest_version=0)
    assert (metrics["turns"], metrics["mean_reward"]) == ((1, -1.0) if is_off else (2, 0.0))
    assert metrics["turns_off_policy"] == is_off
    assert list(metrics["off_policy"]) == (["2"] if is_off else [])
    if is_off:
        assert metrics["off_policy"]["2"] == pytest.approx(sum(nats) / 3, abs=1e-5)


def test_a_turn_beyond_the_mean_log_ratio_moves_nothing_and_touches_no_baseline(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch
):
    found = []
    for reward, reply in ((1, (60, 61, 62)), (-1, (70, 71, 72))):
        trainer = make_trainer(kl_weight=0.5)
        shake(trainer)
        kept = a_sample(trainer, hints=("a fox",))
        off = moved(a_sample(trainer, reply=reply, reward=reward, user="v", hints=("be brief",)), 3.0, 3.0, 3.0)
        found.append(gradient_of(trainer, [kept, off], monkeypatch))
        assert trainer.baselines == pytest.approx({"u": -0.1})
    assert found[0].abs().max().item() > 1e-4
    assert (found[0] - found[1]).abs().max().item() < 1e-12


def test_stale_tokens_have_no_say_in_whether_a_turn_is_off_policy(make_trainer: TrainerFactory):
    trainer = make_trainer()
    sample = moved(a_sample(trainer, reply_versions=(0, 1, 1)), 50.0, 0.0, 0.0)
    assert trainer.update([sample], oldest_version=1)["turns_off_policy"] == 0


def test_an_update_without_any_turn_left_does_not_move_on_momentum(make_trainer: TrainerFactory):
    trainer = make_trainer()
    sample = a_sample(trainer)
    trainer.update([sample], oldest_version=0)
    before = [p.detach().clone() for p in trainer.parameters]
    baselines = trainer.baselines
    off = moved(a_sample(trainer), 3.0, 3.0, 3.0)
    assert trainer.update([off], oldest_version=0)["turns_off_policy"] == 1
    assert all(torch.equal(p, b) for p, b in zip(trainer.parameters, before, strict=True))
    assert trainer.baselines == baselines


# -- the moving average as teacher ------------------------------------------------------------------------------------


def test_the_average_goes_its_rate_of_the_way_after_each_update(make_trainer: TrainerFactory):
    trainer = make_trainer(teacher="average", average_rate=0.25)
    expected = [p.detach().clone() for p in trainer.parameters]
    for _ in range(2):
        trainer.update([a_sample(trainer, hints=("a fox",))], oldest_version=0)
        expected = [0.75 * e + 0.25 * p.detach() for e, p in zip(expected, trainer.parameters, strict=True)]
    found = list(trainer.average.values())
    assert all(torch.allclose(f, e, rtol=0, atol=1e-7) for f, e in zip(found, expected, strict=True))
    assert any((f - p).abs().max() > 1e-3 for f, p in zip(found, trainer.parameters, strict=True))


def test_the_average_is_what_reads_the_hint_and_the_policy_stays_what_it_was(make_trainer: TrainerFactory):
    options = {"objective": "distillation", "distillation": "sampled", "kl_weight": 0.0, "gap_clip": 100.0}
    trainer = make_trainer(teacher="average", **options)
    shake(trainer)
    before = replies_after_hints(trainer, a_sample(trainer))[0]
    trainer.average_anew()
    shake(trainer, 0.3)
    sample = a_sample(trainer, hints=HINTS[:1])
    ids = torch.tensor(sample.turn.reply_ids)
    gaps = before[torch.arange(3), ids] - torch.tensor(sample.turn.reply_logprobs)
    trainer.optimizer.step = lambda: None
    metrics = trainer.update([sample], oldest_version=0)
    assert metrics["distillation"] == pytest.approx(-float(gaps.mean()), rel=1e-5)  # at ratio 1, minus the mean gap
    assert a_sample(trainer).turn.reply_logprobs == sample.turn.reply_logprobs


@pytest.mark.parametrize("form", FORMS)
def test_an_average_that_is_the_policy_itself_teaches_as_the_policy_does(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
):
    found = []
    for teacher in ("policy", "average"):
        trainer = make_trainer(teacher=teacher, **form)
        shake(trainer)
        trainer.average_anew()
        found.append(gradient_of(trainer, [a_sample(trainer, hints=HINTS)], monkeypatch))
    assert found[0].abs().max().item() > 1e-4
    assert torch.equal(*found)


def test_the_policy_has_its_own_weights_again_when_its_gradient_is_computed(
    make_trainer: TrainerFactory, monkeypatch: pytest.MonkeyPatch
):
    # An average that never moved is the base, and the base teaches without touching the policy's weights.
    found = []
    for teacher in ("base", "average"):
        trainer = make_trainer(teacher=teacher, objective="distillation", kl_weight=0.0)
        shake(trainer, 0.3)
        found.append(gradient_of(trainer, [a_sample(trainer, hints=HINTS)], monkeypatch))
    assert found[0].abs().max().item() > 1e-3
    assert (found[0] - found[1]).abs().max().item() < 1e-12


def test_starting_over_lets_the_average_begin_at_the_base(make_trainer: TrainerFactory):
    trainer = make_trainer(teacher="average", average_rate=1.0)
    untrained = [p.detach().clone() for p in trainer.parameters]
    trainer.update([a_sample(trainer)], oldest_version=0)
    trainer.start_over()
    assert all(torch.equal(*pair) for pair in zip(trainer.average.values(), untrained, strict=True))
