"""One update: samples in, new weights out.

The update's turns are cut into micro-batches of turns that share as much as can be (`tree.grouped`). Each is read by
student, base and teacher (`passes`), through the same attention that the engine decodes with, and gives its part of the
loss: a sum of named terms, each over its own tokens.

The teacher is the policy as it stood when the update began, a moving average of it, or the base. All three are scored
on the sampled token ids, at the temperature they were sampled with. It reads one hinted prompt of a turn, or each in
turn where it is to be the one that the student can best follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nextstate.config import LearnConfig
from nextstate.engines.model import LoadedModel
from nextstate.engines.packed import RowKeys, forward_packed
from nextstate.learn.baseline import advantages, updated
from nextstate.learn.batches import Row, make_row, mean_log_ratio, token_weights
from nextstate.learn.lean import make_lean
from nextstate.learn.objectives.anchor import anchor_kl
from nextstate.learn.objectives.distillation import (
    sampled_distillation,
    subset_distillation,
    topk_distillation,
)
from nextstate.learn.objectives.policy_gradient import importance_weights, policy_gradient
from nextstate.learn.passes import MicroBatch, Taught, Teaching
from nextstate.learn.scoring import Scorer, score_replies
from nextstate.learn.tree import grouped
from nextstate.learn.weights import swapped, trainable
from nextstate.store.learning import Sample


@dataclass(frozen=True, slots=True)
class _Scored:
    """What a row's first pass found; later optimiser steps of the same update are measured against it."""

    old_N: Tensor
    base_N: Tensor | None
    """None where nothing is to stay near the base."""
    taught: Taught
    old_top_NK: Tensor
    """Log-probs of the tokens that the teacher corrects."""
    log_ratio: float
    """Mean nats a live token that the weights of the update's beginning give more than the sampler's gave."""


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
        make_lean(self.model, bfloat16=config.bfloat16)
        self.scorer = Scorer(self.model, bfloat16=config.bfloat16)
        self._teaching = Teaching(scorer=self.scorer, config=config, base=self.weights.as_base, average=self._averaged)
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
                # Without a teacher in the loss, no hint is read.
                sample if self.config.objective != "binary" else replace(sample, hints=()),
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
                str(sample.turn.turn_id): sorted({row.hint_numbers[n] for n in scored[i].taught.hint_N.tolist()})
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
        for group in grouped([row.sequence for row in rows], max_rows=self.config.micro_batch_tokens):
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
        batch = MicroBatch([rows[i] for i in group], self.parameters[0])
        first = group[0] not in scored
        keys = RowKeys()
        hidden_NH = self.scorer.hidden(batch.tree, remember=keys)
        totals.tokens += len(batch.tree)
        hidden_PH = hidden_NH[batch.places]
        if first:
            base_P, taught, tokens = self._teaching.read(batch, hidden_NH.detach(), keys)
            totals.tokens += tokens
        else:
            taught = [scored[i].taught for i in group]
            bases = [base_N for i in group if (base_N := scored[i].base_N) is not None]
            base_P = torch.cat(bases) if bases else None
        top_PK = torch.cat([t.top_NK for t in taught])
        ids_PM = torch.cat([batch.ids_P[:, None], top_PK], 1)
        logprobs_PM = self.scorer.score(hidden_PH, ids_PM, batch.temperature_P).logprobs_PM
        if first:
            bases_of = [None] * len(group) if base_P is None else batch.split(base_P)
            parts = zip(group, batch.split(logprobs_PM.detach()), bases_of, taught, strict=True)
            for i, old_NM, base_N, of_teacher in parts:
                ratio = mean_log_ratio(old_NM[:, 0].tolist(), rows[i].sampled_logprobs, rows[i].live)
                scored[i] = _Scored(old_NM[:, 0], base_N, of_teacher, old_NM[:, 1:], ratio)
        seen = [scored[i] for i in group]
        logprobs_P, student_PK = logprobs_PM[:, 0], logprobs_PM[:, 1:]
        old_P = torch.cat([s.old_N for s in seen])
        live = [float(ok and not self._off_policy(scored[i])) for i in group for ok in rows[i].live]
        live_P = batch.numbers(live)
        sampled_P = batch.numbers([lp for row in batch.rows for lp in row.sampled_logprobs])
        importance_P = importance_weights(old_P, sampled_P, cap=config.importance_cap)
        turn_P = batch.spread([per_turn[i] for i in group]) * live_P
        taught_P = batch.spread([per_taught[i] for i in group]) * live_P
        advantages_P = batch.spread([row.advantage for row in batch.rows])
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}

        terms: dict[str, tuple[float, Tensor]] = {}
        if config.objective in ("binary", "hybrid"):
            term = policy_gradient(logprobs_P, old_P, advantages_P, turn_P * importance_P, **clip)
            terms["policy_gradient"] = config.reward_weight, term
        if config.objective in ("distillation", "hybrid"):
            weights_P = taught_P * importance_P
            teacher_PK = torch.cat([t.top_logprobs_NK for t in taught])
            if config.distillation == "sampled":
                teacher_P = torch.cat([t.logprobs_N for t in taught])
                term = sampled_distillation(logprobs_P, old_P, teacher_P, weights_P, gap_clip=config.gap_clip, **clip)
            elif config.distillation == "topk":
                term = topk_distillation(
                    student_PK, teacher_PK, weights_P, divergence=config.divergence, alpha=config.jsd_alpha
                )
            else:
                old_PK = torch.cat([s.old_top_NK for s in seen])
                term = subset_distillation(student_PK, old_PK, teacher_PK, weights_P, gap_clip=config.gap_clip, **clip)
            terms["distillation"] = config.teacher_weight, term
        if base_P is not None:
            terms["anchor_kl"] = config.kl_weight, anchor_kl(logprobs_P, base_P, turn_P)
            totals.add("mean_log_ratio_to_base", ((old_P - base_P) * turn_P).sum())
        for name, (_, term) in terms.items():
            totals.add(name, term)
        totals.add("importance", (importance_P * turn_P).sum())
        return torch.stack([weight * term for weight, term in terms.values()]).sum()

    def _off_policy(self, seen: _Scored) -> bool:
        return abs(seen.log_ratio) > self.config.max_log_ratio

    def logits(self, sequences: Sequence[Sequence[int]], keep: Sequence[int], *, base: bool = False) -> Tensor:
        """[K, V] unscaled logits in float32 at chosen rows of packed sequences, with or without what was learned."""
        with self.weights.as_base() if base else nullcontext():
            return forward_packed(self.model, sequences, keep).float()

    def logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, base: bool = False
    ) -> list[list[float]]:
        """Log-probs of ids[start:] of each sequence at temperature 1, with or without what was learned."""
        found: list[list[float]] = [[]] * len(sequences)
        with self.weights.as_base() if base else nullcontext():
            for group in grouped([ids[:-1] for ids in sequences], max_rows=self.config.micro_batch_tokens):
                parts = score_replies(self.scorer, [sequences[i] for i in group], [starts[i] for i in group])
                for i, part in zip(group, parts, strict=True):
                    found[i] = part
        return found
