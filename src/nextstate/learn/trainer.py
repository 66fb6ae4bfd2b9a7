"""One update: samples in, new weights out.

For every micro-batch of turns, through the same packed forward pass that the engine decodes with:

    base      prompt + reply, nothing learned        -> log-probs to stay near          no gradient
    teacher   prompt with the hint + reply           -> log-probs to move towards       no gradient
    student   prompt + reply                         -> log-probs, and the loss         gradient

The teacher is the policy as it stood when the update began, a moving average of it, or the base. All three are scored
on the sampled token ids, at the temperature they were sampled with. It reads one hinted prompt of a turn, or each in
turn where it is to be the one that the student can best follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from nextstate.config import LearnConfig
from nextstate.engines.model import LoadedModel
from nextstate.engines.packed import forward_packed
from nextstate.learn.baseline import advantages, updated
from nextstate.learn.batches import Row, make_row, mean_log_ratio, micro_batches, token_weights
from nextstate.learn.hints import best_by_token, best_for_reply, overlap, shared
from nextstate.learn.objectives.anchor import anchor_kl
from nextstate.learn.objectives.distillation import (
    sampled_distillation,
    subset_distillation,
    topk_distillation,
)
from nextstate.learn.objectives.policy_gradient import importance_weights, policy_gradient
from nextstate.learn.weights import swapped, trainable
from nextstate.store.learning import Sample


@dataclass(slots=True)
class _Scored:
    """What a row's first pass found; later optimiser steps of the same update are measured against it."""

    old_N: Tensor
    base_N: Tensor
    top_NK: Tensor
    """Ids of the K tokens that the teacher corrects."""
    old_top_NK: Tensor
    teacher_N: Tensor
    teacher_top_NK: Tensor
    """NaN without a teacher, and where a token is outside the subset."""
    hint_N: Tensor
    """Which of the row's hinted prompts the teacher read for each token; without a teacher, 0."""
    log_ratio: float
    """Mean nats a live token that the weights of the update's beginning give more than the sampler's gave."""


@dataclass(slots=True)
class _Reading:
    """What the teacher makes of a row's reply after one hinted prompt: all that is kept of [N, V]."""

    sampled_N: Tensor
    """Log-probs of the sampled tokens."""
    top_NK: Tensor
    """Ids of its K most likely tokens."""
    top_logprobs_NK: Tensor
    student_top_logprobs_NK: Tensor
    """Log-probs of the student's K most likely tokens."""


@dataclass(slots=True)
class _Totals:
    terms: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def add(self, name: str, value: Tensor) -> None:
        self.terms[name] = self.terms.get(name, 0.0) + float(value.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What weights have been trained on since the base, all updates behind them together."""

    updates: int = 0
    steps: int = 0
    """Of the optimiser."""
    turns: int = 0
    reply_tokens: int = 0

    def after(self, *, steps: int, turns: int, reply_tokens: int) -> Trained:
        """The same after one more update."""
        return Trained(
            updates=self.updates + 1,
            steps=self.steps + steps,
            turns=self.turns + turns,
            reply_tokens=self.reply_tokens + reply_tokens,
        )


class Trainer:
    """The policy in training: its weights, their optimiser, the baselines, and what it has been trained on."""

    def __init__(self, loaded: LoadedModel, config: LearnConfig) -> None:
        self.loaded, self.config = loaded, config
        torch.manual_seed(config.seed)
        self.weights = trainable(loaded, config)
        self.model = self.weights.model
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.baselines: dict[str, float] = {}
        self.trained = Trained()
        self.average: dict[str, Tensor] | None = None
        """The moving average of `parameters`, by name and in their order; None unless the teacher is one."""
        self.average_anew()

    def start_over(self) -> None:
        """Back to the base."""
        self.weights.start_over()
        self.optimizer.state.clear()
        self.baselines = {}
        self.trained = Trained()
        self.average_anew()

    def average_anew(self) -> None:
        """Let the moving average begin at the present weights."""
        if self.config.teacher == "average":
            named = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
            self.average = {name: parameter.detach().clone() for name, parameter in named}

    def update(self, samples: Sequence[Sample], *, oldest_version: int) -> dict[str, Any]:
        """Train on samples, in place. Gives the loss terms and counts, for people and reports.

        A turn that the weights disagree about with its sampler by more than learn.max_log_ratio takes no part and
        touches no baseline; `off_policy` names it. That is known only when it has been scored, so its share of the
        update is left empty, and the other turns weigh what they would have weighed beside it.

        Args:
            oldest_version: tokens of versions before it are too stale to learn from.

        Raises:
            FloatingPointError: loss or gradient is not finite; the weights are as before.
        """
        started = time.monotonic()
        rewards = [(sample.user, sample.reward) for sample in samples]
        rows = [
            make_row(
                sample,
                advantage,
                self.loaded.tokenizer,
                oldest_version=oldest_version,
                max_tokens=min(self.config.max_turn_tokens, self.loaded.context_tokens),
                hint_choice=self.config.hint_choice,
            )
            for sample, advantage in zip(samples, advantages(rewards, self.baselines), strict=True)
        ]
        scored: dict[int, _Scored] = {}
        steps = [self._step(rows, scored) for _ in range(self.config.steps)]
        off_policy = {i: seen.log_ratio for i, seen in sorted(scored.items()) if self._off_policy(seen)}
        kept = [i for i in range(len(rows)) if i not in off_policy]
        self.baselines = updated(self.baselines, [rewards[i] for i in kept], rate=self.config.baseline_rate)
        if kept:
            self._move_average()
            self.trained = self.trained.after(
                steps=self.config.steps, turns=len(kept), reply_tokens=sum(len(rows[i].reply_ids) for i in kept)
            )
        seconds = time.monotonic() - started
        return {
            **steps[0],
            "turns": len(kept),
            "turns_with_teacher": sum(bool(rows[i].hinted_prompts) for i in kept),
            "mean_reward": sum(rewards[i][1] for i in kept) / len(kept) if kept else None,
            "reply_tokens": sum(len(row.reply_ids) for row in rows),
            "stale_tokens": sum(row.live.count(False) for row in rows),
            "turns_off_policy": len(off_policy),
            "off_policy": {str(samples[i].turn.turn_id): ratio for i, ratio in off_policy.items()},
            "hints_read": {
                str(sample.turn.turn_id): sorted({row.hint_numbers[n] for n in scored[i].hint_N.tolist()})
                for i, (sample, row) in enumerate(zip(samples, rows, strict=True))
                if row.hinted_prompts
            },
            "trained_in_all": asdict(self.trained),
            "seconds": round(seconds, 3),
        }

    def _move_average(self) -> None:
        """average += rate * (parameters - average).

        With LoRA of the two factors of every layer, as others keep it too: their product is not the average of the
        products, and near enough where the factors move little within 1 / rate updates.
        """
        if self.average is not None:
            for average, parameter in zip(self.average.values(), self.parameters, strict=True):
                average.lerp_(parameter.detach(), self.config.average_rate)

    def _averaged(self) -> AbstractContextManager[None]:
        """Within, forward passes without gradient compute with the moving average, where there is one."""
        return nullcontext() if self.average is None else swapped(self.parameters, list(self.average.values()))

    def rehearse(self, tokens: int) -> None:
        """Compute what an update on one turn of so many tokens computes, most of them reply, and change nothing."""
        ids = tuple(n % 100 for n in range(max(2, tokens)))
        prompt = min(8, len(ids) - 1)
        row = Row(
            prompt_ids=ids[:prompt],
            hinted_prompts=(ids[:prompt],),
            hint_numbers=(0,),
            reply_ids=ids[prompt:],
            sampled_logprobs=(-1.0,) * (len(ids) - prompt),
            live=(True,) * (len(ids) - prompt),
            temperature=1.0,
            advantage=1.0,
        )
        try:
            self._backward([row], {}, _Totals())
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _step(self, rows: Sequence[Row], scored: dict[int, _Scored]) -> dict[str, Any]:
        totals = _Totals()
        self.optimizer.zero_grad(set_to_none=True)
        self._backward(rows, scored, totals)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm became {norm}; the update was given up")
        # Without a turn the gradient is 0, and the optimiser's momentum would still move the weights.
        if not all(self._off_policy(scored[i]) for i in range(len(rows))):
            self.optimizer.step()
        return {**totals.terms, "grad_norm": norm, "tokens_computed": totals.tokens}

    def _backward(self, rows: Sequence[Row], scored: dict[int, _Scored], totals: _Totals) -> None:
        """Add the gradient of the loss over all rows."""
        per_turn = token_weights(rows, with_teacher=False)
        per_taught = token_weights(rows, with_teacher=True)
        for group in micro_batches(rows, max_tokens=self.config.micro_batch_tokens):
            loss = self._loss(rows, group, scored, per_turn, per_taught, totals)
            if not torch.isfinite(loss):
                raise FloatingPointError(f"the loss became {float(loss)}; the update was given up")
            loss.backward()  # type: ignore[no-untyped-call]

    def _loss(
        self,
        rows: Sequence[Row],
        group: Sequence[int],
        scored: dict[int, _Scored],
        per_turn: Sequence[float],
        per_taught: Sequence[float],
        totals: _Totals,
    ) -> Tensor:
        """The part of the update's loss that a micro-batch brings; the parts add up."""
        config = self.config
        logprobs_NV = self._reply_logprobs([rows[i] for i in group], totals)
        new = [i for i in group if i not in scored]
        if new:
            self._score_first(rows, group, logprobs_NV.detach(), scored, totals)
        device = logprobs_NV.device
        ids_N = torch.tensor([t for i in group for t in rows[i].reply_ids], device=device)
        seen = [scored[i] for i in group]
        old_N = torch.cat([s.old_N for s in seen])
        live = [ok and not self._off_policy(scored[i]) for i in group for ok in rows[i].live]
        live_N = torch.tensor(live, device=device, dtype=torch.float32)
        sampled_N = torch.tensor([lp for i in group for lp in rows[i].sampled_logprobs], device=device)
        importance_N = importance_weights(old_N, sampled_N, cap=config.importance_cap)
        turn_N = self._spread(rows, group, per_turn, device) * live_N
        taught_N = self._spread(rows, group, per_taught, device) * live_N
        advantages_N = self._spread(rows, group, [row.advantage for row in rows], device)
        logprobs_N = logprobs_NV.gather(1, ids_N[:, None])[:, 0]
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}

        terms: dict[str, tuple[float, Tensor]] = {}
        if config.objective in ("binary", "hybrid"):
            term = policy_gradient(logprobs_N, old_N, advantages_N, turn_N * importance_N, **clip)
            terms["policy_gradient"] = config.reward_weight, term
        if config.objective in ("distillation", "hybrid"):
            weights_N = taught_N * importance_N
            if config.distillation == "sampled":
                teacher_N = torch.cat([s.teacher_N for s in seen])
                term = sampled_distillation(logprobs_N, old_N, teacher_N, weights_N, gap_clip=config.gap_clip, **clip)
            else:
                student_NK = logprobs_NV.gather(1, torch.cat([s.top_NK for s in seen]))
                teacher_NK = torch.cat([s.teacher_top_NK for s in seen])
                if config.distillation == "topk":
                    term = topk_distillation(
                        student_NK, teacher_NK, weights_N, divergence=config.divergence, alpha=config.jsd_alpha
                    )
                else:
                    old_NK = torch.cat([s.old_top_NK for s in seen])
                    term = subset_distillation(
                        student_NK, old_NK, teacher_NK, weights_N, gap_clip=config.gap_clip, **clip
                    )
            terms["distillation"] = config.teacher_weight, term
        base_N = torch.cat([s.base_N for s in seen])
        terms["anchor_kl"] = config.kl_weight, anchor_kl(logprobs_N, base_N, turn_N)
        for name, (_, term) in terms.items():
            totals.add(name, term)
        totals.add("mean_log_ratio_to_base", ((old_N - base_N) * turn_N).sum())
        totals.add("importance", (importance_N * turn_N).sum())
        return torch.stack([weight * term for weight, term in terms.values()]).sum()

    def _score_first(
        self, rows: Sequence[Row], group: Sequence[int], old_NV: Tensor, scored: dict[int, _Scored], totals: _Totals
    ) -> None:
        """Base and teacher on these rows, and the student as it stands at the update's beginning."""
        config = self.config
        with torch.no_grad():
            base_NV = self._reply_logprobs([rows[i] for i in group], totals, base=True)
            tokens = [len(rows[i].reply_ids) for i in group]
            olds, bases = dict(zip(group, torch.split(old_NV, tokens), strict=True)), torch.split(base_NV, tokens)
            tops = {i: old.topk(config.top_k, dim=-1).indices for i, old in olds.items()}
            readings = self._read_hints(rows, group, tops, totals)
            for i, base in zip(group, bases, strict=True):
                old, top_NK = olds[i], tops[i]
                ids_N1 = torch.tensor(rows[i].reply_ids, device=old.device)[:, None]
                hint_N = torch.zeros(len(old), dtype=torch.long, device=old.device)
                teacher_N = torch.full_like(old[:, 0], torch.nan)
                teacher_top_NK = torch.full_like(top_NK, torch.nan, dtype=old.dtype)
                if readings[i]:
                    hint_N = self._choose_hint(rows[i], top_NK, readings[i])
                    reading = _chosen(hint_N, readings[i])
                    teacher_N, teacher_top_NK = reading.sampled_N, reading.student_top_logprobs_NK
                    if config.distillation == "topk" or config.subset == "teacher":
                        top_NK, teacher_top_NK = reading.top_NK, reading.top_logprobs_NK
                    elif config.subset == "intersection":
                        teacher_top_NK = teacher_top_NK.masked_fill(~shared(top_NK, reading.top_NK), torch.nan)
                old_N = old.gather(1, ids_N1)[:, 0]
                scored[i] = _Scored(
                    old_N=old_N,
                    base_N=base.gather(1, ids_N1)[:, 0],
                    top_NK=top_NK,
                    old_top_NK=old.gather(1, top_NK),
                    teacher_N=teacher_N,
                    teacher_top_NK=teacher_top_NK,
                    hint_N=hint_N,
                    log_ratio=mean_log_ratio(old_N.tolist(), rows[i].sampled_logprobs, rows[i].live),
                )

    def _off_policy(self, seen: _Scored) -> bool:
        return abs(seen.log_ratio) > self.config.max_log_ratio

    def _read_hints(
        self, rows: Sequence[Row], group: Sequence[int], student_tops: Mapping[int, Tensor], totals: _Totals
    ) -> dict[int, list[_Reading]]:
        """The teacher on every hinted prompt of every row; one pass for all first ones, one for all second ones, ..."""
        readings: dict[int, list[_Reading]] = {i: [] for i in group}
        for n in range(max(len(rows[i].hinted_prompts) for i in group)):
            taught = [i for i in group if len(rows[i].hinted_prompts) > n]
            by_base = self.config.teacher == "base"
            with self._averaged():
                teacher_NV = self._reply_logprobs([rows[i] for i in taught], totals, hint=n, base=by_base)
            parts = torch.split(teacher_NV, [len(rows[i].reply_ids) for i in taught])
            for i, teacher in zip(taught, parts, strict=True):
                ids_N1 = torch.tensor(rows[i].reply_ids, device=teacher.device)[:, None]
                top = teacher.topk(self.config.top_k, dim=-1)
                readings[i].append(
                    _Reading(
                        sampled_N=teacher.gather(1, ids_N1)[:, 0],
                        top_NK=top.indices,
                        top_logprobs_NK=top.values,
                        student_top_logprobs_NK=teacher.gather(1, student_tops[i]),
                    )
                )
        return readings

    def _choose_hint(self, row: Row, top_NK: Tensor, readings: Sequence[_Reading]) -> Tensor:
        """[N] the number of a hinted prompt for every token of a row."""
        overlaps_HN = torch.stack([overlap(top_NK, reading.top_NK) for reading in readings])
        if self.config.hint_choice == "overlap_by_token":
            return best_by_token(overlaps_HN)
        live_N = torch.tensor(row.live, device=top_NK.device)
        return torch.full_like(top_NK[:, 0], best_for_reply(overlaps_HN * live_N))

    def logits(self, sequences: Sequence[Sequence[int]], keep: Sequence[int], *, base: bool = False) -> Tensor:
        """[K, V] unscaled logits in float32 at chosen rows of packed sequences, with or without what was learned."""
        with self.weights.as_base() if base else nullcontext():
            return forward_packed(self.model, sequences, keep).float()

    def _reply_logprobs(
        self, rows: Sequence[Row], totals: _Totals, *, hint: int | None = None, base: bool = False
    ) -> Tensor:
        """[N, V] log-probs at the reply positions of all rows, each at its own temperature.

        Args:
            hint: after the hinted prompts of that number; None: after the prompts that were answered.
        """
        sequences: list[list[int]] = []
        keep: list[int] = []
        start = 0
        for row in rows:
            prompt = row.prompt_ids if hint is None else row.hinted_prompts[hint]
            # The last reply token is predicted, never read.
            sequences.append([*prompt, *row.reply_ids[:-1]])
            keep.extend(range(start + len(prompt) - 1, start + len(sequences[-1])))
            start += len(sequences[-1])
        totals.tokens += start
        logits_NV = self.logits(sequences, keep, base=base)
        temperature_N1 = torch.tensor([[row.temperature] for row in rows for _ in row.reply_ids])
        return (logits_NV / temperature_N1.to(logits_NV.device)).log_softmax(-1)

    @staticmethod
    def _spread(rows: Sequence[Row], group: Sequence[int], per_row: Sequence[float], device: torch.device) -> Tensor:
        """One number a row becomes one number a reply token: [N]."""
        return torch.tensor([per_row[i] for i in group for _ in rows[i].reply_ids], device=device)


def _chosen(hint_N: Tensor, readings: Sequence[_Reading]) -> _Reading:
    """For each token, what the teacher makes of it after the hint it was given."""
    at_N = torch.arange(len(hint_N), device=hint_N.device)
    parts = {f.name: torch.stack([getattr(reading, f.name) for reading in readings]) for f in fields(_Reading)}
    return _Reading(**{name: part[hint_N, at_N] for name, part in parts.items()})
