"""Tokens per second trained: `python -m benchmarks.training`.

One update on 16 made-up turns, half of them with a hint, under the default objective (clipped policy gradient, top-4
distillation from the hinted teacher, KL to the base), in float32, LoRA on every linear layer. Two sides take turns:

    ours      nextstate.learn.trainer.Trainer as it runs in production: packed, logits of reply tokens only
    padded    transformers + PEFT as one would write it first: two turns a batch, padded to the longer, sdpa
              attention, logits and log-softmax at all positions; the same three passes, and the same loss functions

Both begin at the same adapter, so the first update of each must find the same gradient: its norm is in the result. A
second and later updates of a side go on from where it is. The lengths are either equal (200 prompt and 100 reply
tokens) or spread (50 to 350 and 10 to 190, same mean).

A trained token is a token of a turn, prompt or reply; a computed one is a row of a forward pass: base, teacher or
student, padding included. CPU seconds are those of all threads; other work on the machine stretches them far less than
it stretches the clock's, so on a busy machine theirs is the ratio to trust. Each side has a process of its own, so that
its peak memory is its own; the other process waits meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import machine
from nextstate.config import LearnConfig
from nextstate.engines.builtin import NAME
from nextstate.report.stats import quantile

SIDES = ("ours", "padded")
LENGTHS = ("equal", "spread")
TURNS = 16
LEARN = LearnConfig(distillation="subset", top_k=4, max_log_ratio=100)
"""Both sides compute the same loss; with the published hybrid's subset, the padded side is short enough to read. No
turn is kept out for the log-probs that were made up for it."""
HINT = "Answer in one short sentence, please."
PADDED_TURNS = 2
"""Turns a batch of the padded side: two of 300 tokens are about what `learn.micro_batch_tokens` holds."""

Update = Callable[[], dict[str, Any]]
"""Trains once and gives terms, counts and seconds."""


# -- the process that compares; it loads no torch ----------------------------------------------------------------------


def measure(model: str, threads: int, lengths: str, rounds: int) -> dict[str, Any]:
    load_at_start = machine.load_average()
    updates: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with _side(SIDES[0], model, threads, lengths) as first, _side(SIDES[1], model, threads, lengths) as second:
        for n in range(rounds):
            order = [(SIDES[0], first), (SIDES[1], second)]
            for side, process in order if n % 2 == 0 else reversed(order):
                updates[side].append(_ask(process))
    return {
        "threads": threads,
        "lengths": lengths,
        "load_average": [load_at_start, machine.load_average()],
        "updates": updates,
    }


@contextmanager
def _side(side: str, model: str, threads: int, lengths: str) -> Iterator[subprocess.Popen[str]]:
    """A process that trains once for every line it is sent."""
    command = [sys.executable, "-m", "benchmarks.training", "--side", side]
    options = ["--model", model, "--threads", str(threads), "--lengths", lengths]
    process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the side '{side}' did not start; what it said stands above")
        yield process
    finally:
        process.terminate()
        process.wait()


def _ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError("a side ended in the middle of an update; what it said stands above")
    found: dict[str, Any] = json.loads(answer)
    return found


def show(result: dict[str, Any]) -> None:
    for run in result["runs"]:
        start, end = run["load_average"]
        rows = []
        for side in SIDES:
            updates = run["updates"][side]
            seconds = [u["seconds"] for u in updates]
            pairs = list(zip(updates, run["updates"]["padded"], strict=True))
            against = [
                quantile([other[clock] / own[clock] for own, other in pairs], 0.5) if side != "padded" else None
                for clock in ("seconds", "cpu_seconds")
            ]
            one = updates[0]
            middle = quantile(seconds, 0.5)
            assert middle is not None
            rows.append(
                [
                    side,
                    middle,
                    min(seconds),
                    one["tokens"] / middle,
                    one["reply_tokens"] / middle,
                    one["tokens_computed"] / one["tokens"],
                    *against,
                    quantile([u["cpu_seconds"] for u in updates], 0.5),
                    updates[-1]["peak_mb"],
                    f"{one['grad_norm']:.5f}",
                ]
            )
        machine.show(
            f"{run['lengths']} lengths, {run['threads']} threads, {len(seconds)} rounds, load average {start} to {end}",
            [
                "side", "seconds, median", "least", "trained tokens/s", "of them reply", "computed per trained",
                "times as fast", "by CPU", "CPU seconds", "peak, MB", "gradient norm",
            ],
            rows,
        )  # fmt: skip


# -- the processes that train ------------------------------------------------------------------------------------------


def train_on_demand(side: str, model: str, threads: int, lengths: str) -> None:
    """Load, say so, then train once for every line that comes, and answer each with a line of JSON."""
    import torch

    torch.set_num_threads(threads)
    update = {"ours": _ours, "padded": _padded}[side](model, lengths)
    print("ready", flush=True)
    for _ in sys.stdin:
        started, busy = time.perf_counter(), time.process_time()
        found = update()
        found["seconds"] = round(time.perf_counter() - started, 3)
        found["cpu_seconds"] = round(time.process_time() - busy, 3)
        found["peak_mb"] = machine.peak_mb(os.getpid())
        print(json.dumps(found), flush=True)


def made_up_lengths(lengths: str) -> list[tuple[int, int]]:
    """Prompt and reply tokens of each turn; 300 a turn on average either way."""
    if lengths == "equal":
        return [(200, 100)] * TURNS
    steps = TURNS - 1
    prompts = [50 + round(300 * i / steps) for i in range(TURNS)]
    replies = [10 + round(180 * i / steps) for i in range(TURNS)]
    draw = random.Random(0)
    draw.shuffle(prompts)
    draw.shuffle(replies)
    return list(zip(prompts, replies, strict=True))


def made_up_samples(tokenizer: Any, lengths: str) -> list[Any]:
    from nextstate.chat.template import render
    from nextstate.store.learning import Sample
    from nextstate.types import Turn

    draw = random.Random(1)
    common = " the of and to in is that it was for on are as with his they at be this from have or by one had not but"
    words = list(tokenizer.encode(common, add_special_tokens=False))
    samples = []
    for n, (prompt_tokens, reply_tokens) in enumerate(made_up_lengths(lengths)):
        content: list[int] = []
        while len(prompt := render(tokenizer, [_asked(tokenizer, content)])) < prompt_tokens:
            content += draw.choices(words, k=prompt_tokens - len(prompt))
        turn = Turn(
            turn_id=n,
            prompt_ids=prompt,
            reply_ids=tuple(draw.choices(words, k=reply_tokens)),
            # So unlikely that every importance weight is at its cap, and the gradient the same on both sides.
            reply_logprobs=(-30.0,) * reply_tokens,
            reply_versions=(0,) * reply_tokens,
            temperature=0.7,
        )
        hint = HINT if n % 2 == 0 else None
        messages = (_asked(tokenizer, content),)
        samples.append(
            Sample(turn=turn, user="bench", reward=-1 if hint else 1, hints=(hint,) if hint else (), messages=messages)
        )
    return samples


def _asked(tokenizer: Any, content: Sequence[int]) -> dict[str, str]:
    return {"role": "user", "content": tokenizer.decode(content)}


def _ours(model: str, lengths: str) -> Update:
    from nextstate.engines.model import load
    from nextstate.learn.trainer import Trainer

    trainer = Trainer(load(model, dtype="float32", device="cpu"), LEARN)
    samples = made_up_samples(trainer.loaded.tokenizer, lengths)
    tokens = sum(len(s.turn.prompt_ids) + len(s.turn.reply_ids) for s in samples)
    return lambda: {**trainer.update(samples, oldest_version=0), "tokens": tokens}


def _padded(model: str, lengths: str) -> Update:
    import torch
    from peft import get_peft_model
    from torch import Tensor
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nextstate.engines.adapters import lora_config
    from nextstate.engines.model import resolve
    from nextstate.learn.baseline import advantages, updated
    from nextstate.learn.batches import Row, make_row, token_weights
    from nextstate.learn.objectives.anchor import anchor_kl
    from nextstate.learn.objectives.distillation import subset_distillation
    from nextstate.learn.objectives.policy_gradient import importance_weights, policy_gradient

    config = LEARN
    path = resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    samples = made_up_samples(tokenizer, lengths)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    torch.manual_seed(config.seed)
    policy = get_peft_model(base, lora_config(config.rank, config.alpha, config.targets))
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    baselines: dict[str, float] = {}
    computed = 0

    def reply_logprobs(rows: Sequence[Row], *, hinted: bool = False, adapter: bool = True) -> Tensor:
        """[N, V] at the reply positions of all rows, cut out of log-probs at all positions."""
        nonlocal computed
        prompts = [row.hinted_prompts[0] if hinted else row.prompt_ids for row in rows]
        sequences = [[*prompt, *row.reply_ids] for prompt, row in zip(prompts, rows, strict=True)]
        longest = max(map(len, sequences))
        computed += longest * len(rows)
        ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences])
        mask_BT = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
        with nullcontext() if adapter else policy.disable_adapter():
            logits_BTV = policy(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        logprobs_BTV = (logits_BTV / rows[0].temperature).log_softmax(-1)
        replies = [
            logprobs_V[len(ids) - len(row.reply_ids) - 1 : len(ids) - 1]
            for logprobs_V, ids, row in zip(logprobs_BTV, sequences, rows, strict=True)
        ]
        return torch.cat(replies)

    def update() -> dict[str, Any]:
        nonlocal baselines, computed
        computed = 0
        rewards = [(s.user, s.reward) for s in samples]
        rows = [
            make_row(s, advantage, tokenizer, oldest_version=0, max_tokens=config.max_turn_tokens)
            for s, advantage in zip(samples, advantages(rewards, baselines), strict=True)
        ]
        baselines = updated(baselines, rewards, rate=config.baseline_rate)
        per_turn, per_taught = token_weights(rows, with_teacher=False), token_weights(rows, with_teacher=True)
        optimizer.zero_grad(set_to_none=True)
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        total = 0.0
        for at in range(0, len(rows), PADDED_TURNS):
            group = range(at, min(at + PADDED_TURNS, len(rows)))
            batch = [rows[i] for i in group]
            new_NV = reply_logprobs(batch)
            old_NV = new_NV.detach()
            top_NK = old_NV.topk(config.top_k, dim=-1).indices
            ids_N1 = torch.tensor([[t] for row in batch for t in row.reply_ids])
            with torch.no_grad():
                base_N = reply_logprobs(batch, adapter=False).gather(1, ids_N1)[:, 0]
                taught = [row for row in batch if row.hinted_prompts]
                has_teacher_N = torch.tensor([bool(row.hinted_prompts) for row in batch for _ in row.reply_ids])
                teacher_NK = torch.full_like(top_NK, torch.nan, dtype=old_NV.dtype)
                if taught:
                    teacher_NK[has_teacher_N] = reply_logprobs(taught, hinted=True).gather(1, top_NK[has_teacher_N])
            new_N, old_N = (x.gather(1, ids_N1)[:, 0] for x in (new_NV, old_NV))
            sampled_N = torch.tensor([lp for row in batch for lp in row.sampled_logprobs])
            importance_N = importance_weights(old_N, sampled_N, cap=config.importance_cap)
            turn_N, taught_N, advantage_N = (
                torch.tensor([per_row[i] for i in group for _ in rows[i].reply_ids])
                for per_row in (per_turn, per_taught, [row.advantage for row in rows])
            )
            loss = (
                config.reward_weight * policy_gradient(new_N, old_N, advantage_N, turn_N * importance_N, **clip)
                + config.teacher_weight
                * subset_distillation(
                    new_NV.gather(1, top_NK),
                    old_NV.gather(1, top_NK),
                    teacher_NK,
                    taught_N * importance_N,
                    gap_clip=config.gap_clip,
                    **clip,
                )
                + config.kl_weight * anchor_kl(new_N, base_N, turn_N)
            )
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
        optimizer.step()
        return {
            "loss": total,
            "grad_norm": norm,
            "tokens": sum(row.tokens for row in rows),
            "reply_tokens": sum(len(row.reply_ids) for row in rows),
            "tokens_computed": computed,
        }

    return update


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--lengths", choices=LENGTHS, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        train_on_demand(options.side, options.model, options.threads[0], options.lengths[0])
        return
    runs = [
        measure(options.model, threads, lengths, options.rounds)
        for threads in options.threads
        for lengths in options.lengths
    ]
    result = {"machine": machine.facts(), "model": options.model, "runs": runs}
    show(result)
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
