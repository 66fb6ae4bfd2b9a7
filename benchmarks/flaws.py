"""What known flaws of published code cost, on purpose: `python -m benchmarks.flaws`.

The experiment of `nextstate eval people` with one persona and the published hybrid objective, as it should be and with
one flaw at a time. No configuration of nextstate can switch these on: they replace functions of the trainer's module
while a run lasts. The numbers W1, W2, W8 and W19 are those of the list that they come from.

    W1    teacher log-probs without the row maximum taken off: too high by the teacher's top logit
    W2    a missing teacher value is 0, the log-prob of what is certain
    W8    no baseline: rewards as they are
    W19   replies tokenised again from their text; log-probs cut, or filled up with 0
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nextstate.learn import trainer as under_test
from nextstate.learn.batches import Row, make_row, token_weights
from nextstate.learn.objectives.distillation import subset_distillation
from nextstate.people import results
from nextstate.people.experiment import Run, run
from nextstate.people.personas import PERSONAS
from nextstate.store.learning import Sample

PUBLISHED = Path(__file__).with_name("published.toml")
FOLDER = Path("docs/results/flaws")
PERSONA = "assistant-teacher"
"""Whose wish the published objective learns soonest, so that a flaw has something to spoil."""

SESSIONS = 40
"""More than in the table by method: some flaws take a while to show."""

TOP_LOGIT = 20.0
"""nats. What a row's maximum is like; above the clip and the largest true gap, every number gives the same loss."""


@contextmanager
def teacher_not_normalised() -> Iterator[None]:
    def flawed(logprobs_NK: Tensor, old_NK: Tensor, teacher_NK: Tensor, weights_N: Tensor, **clip: float) -> Tensor:
        return subset_distillation(logprobs_NK, old_NK, teacher_NK + TOP_LOGIT, weights_N, **clip)

    with patch.object(under_test, "subset_distillation", flawed):
        yield


@contextmanager
def missing_is_zero() -> Iterator[None]:
    def flawed(logprobs_NK: Tensor, old_NK: Tensor, teacher_NK: Tensor, weights_N: Tensor, **clip: float) -> Tensor:
        return subset_distillation(logprobs_NK, old_NK, teacher_NK.nan_to_num(nan=0.0), weights_N, **clip)

    def all_counted(rows: list[Row], *, with_teacher: bool) -> list[float]:
        return token_weights(rows, with_teacher=False)

    with patch.multiple(under_test, subset_distillation=flawed, token_weights=all_counted):
        yield


@contextmanager
def no_baseline() -> Iterator[None]:
    with patch.object(under_test, "updated", lambda baselines, rewards, *, rate: {}):
        yield


@contextmanager
def retokenised(counts: Counter[str] | None = None) -> Iterator[None]:
    """
    Args:
        counts: takes how many replies there were, and how many had other tokens or another length than sampled.
    """

    def flawed(sample: Sample, advantage: float, tokenizer: Any, **options: Any) -> Row:
        row = make_row(sample, advantage, tokenizer, **options)
        text = tokenizer.decode(row.reply_ids, skip_special_tokens=True)
        messages = [dict(message) for message in sample.messages]
        answered = [*messages, {"role": "assistant", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(answered, tokenize=False)
        ids = tuple(tokenizer.encode(whole.removeprefix(prompt), add_special_tokens=False))
        n = len(ids)
        if counts is not None:
            common = min(n, len(row.reply_ids))
            counts["replies"] += 1
            counts["other tokens"] += ids[:common] != row.reply_ids[:common]
            counts["other length"] += n != len(row.reply_ids)
        logprobs = (*row.sampled_logprobs, *(0.0,) * n)[:n]
        return replace(row, reply_ids=ids, sampled_logprobs=logprobs, live=(True,) * n)

    with patch.object(under_test, "make_row", flawed):
        yield


FLAWS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "as-it-should-be": nullcontext,
    "W1": teacher_not_normalised,
    "W2": missing_is_zero,
    "W8": no_baseline,
    "W19": retokenised,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flaws", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--flaw", choices=list(FLAWS), action="append", help="only these")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.flaw or FLAWS:
            plan = Run(personas=(PERSONAS[PERSONA],), method="hybrid", seed=seed, sessions=SESSIONS)
            with results.claimed(options.out, f"{PERSONA}-{name}-{seed}") as write:
                if write is None:
                    continue
                print(f"{PERSONA}-{name}-{seed} begins", flush=True)
                counts: Counter[str] = Counter()
                started = time.process_time()
                with (
                    tempfile.TemporaryDirectory(prefix="nextstate-flaws-") as folder,
                    retokenised(counts) if name == "W19" else FLAWS[name](),
                ):
                    outcome = asyncio.run(run(plan, Path(folder), config_file=PUBLISHED))
                record = results.as_json(plan, outcome, cpu_s=time.process_time() - started)
                write({**record, "flaw": name, "retokenised": dict(counts)})


if __name__ == "__main__":
    main()
