"""From samples to rows: which tokens are scored, under what, and how much each weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nextstate.chat.template import render_with_hint
from nextstate.config import HintChoice
from nextstate.learn.hints import in_order
from nextstate.store.learning import Sample
from nextstate.types import SkipReason, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample as the trainer reads it."""

    prompt_ids: TokenIds
    """[P]"""
    hinted_prompts: tuple[TokenIds, ...]
    """The prompts that the teacher reads, and then chooses from by overlap if there are several; none: no teacher."""
    hint_numbers: tuple[int, ...]
    """Which of the sample's hints each of them holds."""
    reply_ids: TokenIds
    """[R]"""
    sampled_logprobs: tuple[float, ...]
    """[R] nats, stored with the turn."""
    live: tuple[bool, ...]
    """[R] False where the token is too stale to learn from."""
    temperature: float
    advantage: float

    @property
    def sequence(self) -> TokenIds:
        """What is read to predict the reply: the last reply token is predicted, never read."""
        return (*self.prompt_ids, *self.reply_ids[:-1])

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.reply_ids)


def make_row(
    sample: Sample,
    advantage: float,
    tokenizer: Any,
    *,
    oldest_version: int,
    max_tokens: int,
    hint_choice: HintChoice = "first",
) -> Row:
    """A row from a sample. A hint whose prompt would not fit gives way to the next."""
    turn = sample.turn
    hinted: dict[int, TokenIds] = {}
    # The turn's id is the seed: an update that is done again draws the same.
    for n in in_order(sample.hints, hint_choice, seed=turn.turn_id):
        prompt = render_with_hint(tokenizer, sample.messages, sample.hints[n], sample.tools)
        if len(prompt) + len(turn.reply_ids) <= max_tokens:
            hinted[n] = prompt
            if hint_choice not in ("overlap", "overlap_by_token"):
                break
    return Row(
        prompt_ids=turn.prompt_ids,
        hinted_prompts=tuple(hinted.values()),
        hint_numbers=tuple(hinted),
        reply_ids=turn.reply_ids,
        sampled_logprobs=turn.reply_logprobs,
        live=tuple(version >= oldest_version for version in turn.reply_versions),
        temperature=turn.temperature,
        advantage=advantage,
    )


def unfit(sample: Sample, *, oldest_version: int, max_tokens: int) -> tuple[SkipReason, str] | None:
    """Why a sample cannot be trained at all, if so."""
    turn = sample.turn
    tokens = len(turn.prompt_ids) + len(turn.reply_ids)
    if tokens > max_tokens:
        return SkipReason.TOO_LONG, f"It has {tokens} tokens; learn.max_turn_tokens is {max_tokens}."
    if all(version < oldest_version for version in turn.reply_versions):
        newest = max(turn.reply_versions)
        return SkipReason.TOO_STALE, f"Version {newest} answered it; versions before {oldest_version} are too old now."
    return None


def mean_log_ratio(old: Sequence[float], sampled: Sequence[float], live: Sequence[bool]) -> float:
    """Mean of old - sampled log-probs, nats, over live tokens: how far a reply is from what would be said now."""
    return fmean(a - b for a, b, ok in zip(old, sampled, live, strict=True) if ok)


def token_weights(rows: Sequence[Row], *, with_teacher: bool) -> list[float]:
    """Weight of each live token, row by row: turns count equally, however long, and all weights sum to 1.

    with_teacher: only rows that have a teacher count; the others get 0.
    """
    counted = [row for row in rows if row.hinted_prompts or not with_teacher]
    return [0.0 if with_teacher and not row.hinted_prompts else 1.0 / (len(counted) * sum(row.live)) for row in rows]
