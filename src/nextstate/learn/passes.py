"""The forward passes of a micro-batch: every token once under each set of weights that has to read it.

    student   prompt + reply                            one tree of all its turns                  gradient
    base      the same tree, adapter off                -> log-probs to stay near                  no gradient
    teacher   prompt with the hint + reply              -> log-probs to move towards               no gradient

A teacher whose weights are the student's, or the base's, reads only what the hint makes different: it goes on from the
keys and values that the other pass left. A moving average has passes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from nextstate.config import LearnConfig
from nextstate.engines.packed import RowKeys
from nextstate.learn.batches import Row
from nextstate.learn.hints import best_by_token, best_for_reply, overlap, shared
from nextstate.learn.scoring import Scorer
from nextstate.learn.tree import Tree


class MicroBatch:
    """Rows whose prompts and replies are one tree. P counts the reply tokens of all rows, one row after the other."""

    def __init__(self, rows: Sequence[Row], like: Tensor) -> None:
        """like: what is trained; numbers are made on its device and as exact as it is."""
        self.rows, self.device = rows, like.device
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self.tree = Tree()
        paths = self.tree.add_all([row.sequence for row in rows])
        self.lengths = [len(row.reply_ids) for row in rows]
        self.places = [
            place for row, path in zip(rows, paths, strict=True) for place in path[len(row.prompt_ids) - 1 :]
        ]
        """[P] the row of the tree at which each reply token is predicted."""

    @cached_property
    def ids_P(self) -> Tensor:
        return torch.tensor([t for row in self.rows for t in row.reply_ids], device=self.device)

    @cached_property
    def temperature_P(self) -> Tensor:
        return self.spread([row.temperature for row in self.rows])

    def spread(self, per_row: Sequence[float]) -> Tensor:
        """One number a row becomes one number a reply token: [P]."""
        return self.numbers([x for x, n in zip(per_row, self.lengths, strict=True) for _ in range(n)])

    def numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=self._dtype)

    def split(self, of_P: Tensor) -> list[Tensor]:
        """The part of each row."""
        return list(torch.split(of_P, self.lengths))


@dataclass(frozen=True, slots=True)
class Taught:
    """What the teacher says about a row's reply."""

    logprobs_N: Tensor
    """Of the sampled tokens; NaN without a teacher."""
    top_NK: Tensor
    """Ids of the K tokens that the teacher corrects."""
    top_logprobs_NK: Tensor
    """NaN without a teacher, and where a token is outside the subset."""
    hint_N: Tensor
    """Which of the row's hinted prompts the teacher read for each token; without a teacher, 0."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the teacher makes of a row's reply after one hinted prompt."""

    sampled_N: Tensor
    """Log-probs of the sampled tokens."""
    top_NK: Tensor
    """Ids of its K most likely tokens."""
    top_logprobs_NK: Tensor
    student_top_logprobs_NK: Tensor
    """Log-probs of the student's K most likely tokens, if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """Base and teacher beside a student: whose weights, how many tokens, and which hint."""

    scorer: Scorer
    config: LearnConfig
    base: Callable[[], AbstractContextManager[None]]
    """Within, the model computes with the base weights."""
    average: Callable[[], AbstractContextManager[None]]
    """Within, the model computes with the moving average."""

    @property
    def corrected(self) -> int:
        """K: how many tokens the teacher corrects at a place; 0: the sampled one only."""
        return 0 if self.config.distillation == "sampled" or self.config.objective == "binary" else self.config.top_k

    @torch.no_grad()
    def read(self, batch: MicroBatch, hidden_NH: Tensor, keys: RowKeys) -> tuple[Tensor | None, list[Taught], int]:
        """What base and teacher say about every row, and the tokens computed for it.

        Args:
            hidden_NH: the student's hidden states of the batch's tree, and `keys` its keys and values.

        Returns:
            [P] the base's log-probs of the sampled tokens, None where nothing stays near it; what was taught; the
            number of tokens.
        """
        ids_P1, temperature_P = batch.ids_P[:, None], batch.temperature_P
        top_P0 = ids_P1[:, :0]
        own_rows, tokens = len(batch.tree), 0
        base_P, base_NH, base_keys = None, hidden_NH, RowKeys()
        if self.config.kl_weight > 0 or self.config.teacher == "base":
            with self.base():  # its output layer too: with full weights that is another one
                base_NH = self.scorer.hidden(batch.tree, remember=base_keys)
                base_P = self.scorer.score(base_NH[batch.places], ids_P1, temperature_P).logprobs_PM[:, 0]
            tokens += own_rows
        if not any(row.hinted_prompts for row in batch.rows):
            return base_P, [self._untaught(part) for part in batch.split(batch.ids_P)], tokens
        student_top_PK = top_P0
        if self._needs_student_top(batch.rows):
            found = self.scorer.score(hidden_NH[batch.places], top_P0, temperature_P, top_k=self.config.top_k)
            student_top_PK = found.top_PK
        tree = Tree() if self.config.teacher == "average" else batch.tree
        hinted = [(row, prompt) for row in batch.rows for prompt in row.hinted_prompts]
        paths = tree.add_all([(*prompt, *row.reply_ids[:-1]) for row, prompt in hinted])
        places = [place for (_, prompt), path in zip(hinted, paths, strict=True) for place in path[len(prompt) - 1 :]]
        tops = [part for row, part in zip(batch.rows, batch.split(student_top_PK), strict=True)
                for _ in row.hinted_prompts]  # fmt: skip
        asked = torch.tensor([t for row, _ in hinted for t in row.reply_ids], device=batch.device)[:, None]
        temperature = batch.numbers([row.temperature for row, _ in hinted for _ in row.reply_ids])
        ids_PM = torch.cat([asked, torch.cat(tops)], 1)
        tokens += len(tree) if self.config.teacher == "average" else len(tree) - own_rows
        with {"policy": nullcontext, "average": self.average, "base": self.base}[self.config.teacher]():
            if self.config.teacher == "average":
                hidden_NH = self.scorer.hidden(tree)
            elif self.config.teacher == "base":
                hidden_NH = self._grown(tree, base_NH, base_keys)
            else:
                hidden_NH = self._grown(tree, hidden_NH, keys)
            found = self.scorer.score(hidden_NH[places], ids_PM, temperature, top_k=self.config.top_k)
        lengths = [len(row.reply_ids) for row, _ in hinted]
        parts = (torch.split(x, lengths) for x in (found.logprobs_PM, found.top_PK, found.top_logprobs_PK))
        readings = [
            _Reading(logprobs_NM[:, 0], top_NK, top_logprobs_NK, logprobs_NM[:, 1:])
            for logprobs_NM, top_NK, top_logprobs_NK in zip(*parts, strict=True)
        ]
        taught: list[Taught] = []
        for row, ids_N, student_top_NK in zip(
            batch.rows, batch.split(batch.ids_P), batch.split(student_top_PK), strict=True
        ):
            of_row, readings = readings[: len(row.hinted_prompts)], readings[len(row.hinted_prompts) :]
            taught.append(self._taught(row, student_top_NK, of_row) if of_row else self._untaught(ids_N))
        return base_P, taught, tokens

    def _grown(self, tree: Tree, hidden_NH: Tensor, keys: RowKeys) -> Tensor:
        """Hidden states of a tree that has grown since those of its first N rows were computed."""
        if len(tree) == len(hidden_NH):
            return hidden_NH
        return torch.cat([hidden_NH, self.scorer.hidden(tree, first=len(hidden_NH), past=keys)])

    def _needs_student_top(self, rows: Sequence[Row]) -> bool:
        """Whether it matters which tokens the student finds likely, for the subset or for the choice of a hint."""
        config = self.config
        of_subset = config.distillation == "subset" and config.subset != "teacher"
        return of_subset or any(len(row.hinted_prompts) > 1 for row in rows)

    def _untaught(self, ids_N: Tensor) -> Taught:
        """For a row without a teacher: numbers that no objective reads."""
        none_N = torch.full(ids_N.shape, torch.nan, device=ids_N.device)
        top_NK = ids_N[:, None].expand(-1, self.corrected)
        return Taught(none_N, top_NK, none_N[:, None].expand(-1, self.corrected), torch.zeros_like(ids_N))

    def _taught(self, row: Row, student_top_NK: Tensor, readings: Sequence[_Reading]) -> Taught:
        hint_N = torch.zeros_like(readings[0].top_NK[:, 0])
        if len(readings) > 1:
            hint_N = self._choose_hint(row, student_top_NK, readings)
        reading = _chosen(hint_N, readings)
        top_NK, logprobs_NK = student_top_NK, reading.student_top_logprobs_NK
        if self.config.distillation == "topk" or self.config.subset == "teacher":
            top_NK, logprobs_NK = reading.top_NK, reading.top_logprobs_NK
        elif self.config.subset == "intersection":
            logprobs_NK = logprobs_NK.masked_fill(~shared(top_NK, reading.top_NK), torch.nan)
        corrected = slice(None, self.corrected)
        return Taught(reading.sampled_N, top_NK[:, corrected], logprobs_NK[:, corrected], hint_N)

    def _choose_hint(self, row: Row, top_NK: Tensor, readings: Sequence[_Reading]) -> Tensor:
        """[N] the number of a hinted prompt for every token of a row."""
        overlaps_HN = torch.stack([overlap(top_NK, reading.top_NK) for reading in readings])
        if self.config.hint_choice == "overlap_by_token":
            return best_by_token(overlaps_HN)
        live_N = torch.tensor(row.live, device=top_NK.device)
        return torch.full_like(top_NK[:, 0], best_for_reply(overlaps_HN * live_N))


def _chosen(hint_N: Tensor, readings: Sequence[_Reading]) -> _Reading:
    """For each token, what the teacher makes of it after the hint it was given."""
    at_N = torch.arange(len(hint_N), device=hint_N.device)
    parts = {f.name: torch.stack([getattr(reading, f.name) for reading in readings]) for f in fields(_Reading)}
    return _Reading(**{name: part[hint_N, at_N] for name, part in parts.items()})
