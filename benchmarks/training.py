"""Tokens per second trained, beside TRL: `python -m benchmarks.training`, which wants `pip install "nextstate[bench]"`.

One optimiser step of GRPO's clipped policy gradient on 16 made-up turns in micro-batches of four, LoRA on every linear
layer, from the same weights, samples and advantages:

    ours   nextstate.learn.trainer.Trainer as it runs in production
    trl    trl.GRPOTrainer's loss, forward and backward, and the same AdamW; no generation, no gradient checkpointing

Prompts have 50 to 350 tokens and replies 10 to 190, evenly spread and in no order, or 200 and 100 each. The turns share
nothing. Every step has a process of its own, so that its peak memory is its own, and the sides take turns. Both begin
at the same adapter: the gradient's norm is in the result, and must be the same but for the precision.

A trained token is a token of a turn, prompt or reply. The share of the peak is what the step needs at least, 2
operations a weight and token forward and 2 back and those of the attention, over the time it took and the speed at
which this machine multiplied matrices of the model's shapes in the same run.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine
from nextstate.config import LearnConfig
from nextstate.engines.builtin import NAME
from nextstate.report.stats import quantile

SIDES = ("ours", "trl")
PRECISIONS = ("float32", "bfloat16")
LENGTHS = ("spread", "equal")
TURNS = 16
MICRO_BATCH_TURNS = 4
LEARN = LearnConfig(objective="binary", kl_weight=0.0, importance_cap=1.0, max_log_ratio=1000)
"""GRPO's loss alone. The sampler's log-probs are made up: every importance weight is at its cap, and no turn is kept
out."""

Step = Callable[[], dict[str, Any]]
"""Trains once and gives figures."""


# -- the process that compares; it loads no torch ----------------------------------------------------------------------


def measure(model: str, threads: int, lengths: str, rounds: int) -> dict[str, Any]:
    load_at_start = machine.load_average()
    keys = [(side, precision) for precision in PRECISIONS for side in SIDES]
    steps: dict[str, list[dict[str, Any]]] = {f"{side} {precision}": [] for side, precision in keys}
    for n in range(rounds):
        for side, precision in keys if n % 2 == 0 else reversed(keys):
            with _side(side, precision, model, threads, lengths) as process:
                steps[f"{side} {precision}"].append(_ask(process))
    with _side("peak", "float32", model, threads, lengths) as process:
        peak = _ask(process)
    return {
        "threads": threads,
        "lengths": lengths,
        "load_average": [load_at_start, machine.load_average()],
        "peak_flops": peak,
        "steps": steps,
    }


@contextmanager
def _side(side: str, precision: str, model: str, threads: int, lengths: str) -> Iterator[subprocess.Popen[str]]:
    """A process that trains once for every line it is sent."""
    command = [sys.executable, "-m", "benchmarks.training", "--side", side, "--precision", precision]
    options = ["--model", model, "--threads", str(threads), "--lengths", lengths]
    # Threads that spin while they wait for one another would measure the machine's other load.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TRL_EXPERIMENTAL_SILENCE": "1"}
    process = subprocess.Popen(
        [*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":  # libraries have things to say while they load
            if line:
                continue
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
        for name, steps in run["steps"].items():
            _, precision = name.split()
            others = run["steps"][f"trl {precision}"]
            seconds = [step["seconds"] for step in steps]
            middle = quantile(seconds, 0.5)
            assert middle is not None
            faster, faster_by_cpu = (
                quantile([other[clock] / own[clock] for own, other in zip(steps, others, strict=True)], 0.5)
                for clock in ("seconds", "cpu_seconds")
            )
            one = steps[0]
            rows.append(
                [
                    name,
                    middle,
                    one["tokens"] / middle,
                    one["tokens_computed"] / one["tokens"],
                    faster,
                    faster_by_cpu,
                    steps[-1]["peak_mb"],
                    steps[-1]["peak_mb"] / others[-1]["peak_mb"],
                    one["flops"] / middle / run["peak_flops"][precision],
                    f"{one['grad_norm']:.5f}",
                ]
            )
        speeds = ", ".join(f"{run['peak_flops'][p] / 1e9:.0f} GFLOP/s in {p}" for p in PRECISIONS)
        machine.show(
            f"{run['lengths']} lengths, {run['threads']} threads, {len(steps)} rounds, load average {start} to {end}; "
            f"matrix products {speeds}",
            [
                "side", "seconds, median", "trained tokens/s", "computed per trained", "times as fast as TRL",
                "by CPU", "peak, MB", "of TRL's", "share of peak", "gradient norm",
            ],
            rows,
        )  # fmt: skip


# -- the processes that train ------------------------------------------------------------------------------------------


def train_on_demand(side: str, precision: str, model: str, threads: int, lengths: str) -> None:
    """Load, say so, then train once for every line that comes, and answer each with a line of JSON."""
    import torch

    torch.set_num_threads(threads)
    step = {"ours": _ours, "trl": _trl, "peak": _peak}[side](model, precision, lengths)
    print("ready", flush=True)
    for _ in sys.stdin:
        started, busy = time.perf_counter(), time.process_time()
        found = step()
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
    from nextstate.store.learning import Sample
    from nextstate.types import Turn

    draw = random.Random(1)
    common = " the of and to in is that it was for on are as with his they at be this from have or by one had not but"
    words = list(tokenizer.encode(common, add_special_tokens=False))
    return [
        Sample(
            turn=Turn(
                turn_id=n,
                prompt_ids=tuple(draw.choices(words, k=prompt_tokens)),
                reply_ids=tuple(draw.choices(words, k=reply_tokens)),
                reply_logprobs=(-30.0,) * reply_tokens,
                reply_versions=(0,) * reply_tokens,
                temperature=1.0,
            ),
            user="bench",
            reward=-1 if n % 2 == 0 else 1,
            hints=(),
            messages=(),
        )
        for n, (prompt_tokens, reply_tokens) in enumerate(made_up_lengths(lengths))
    ]


def _counts(samples: Sequence[Any], config: Any) -> dict[str, Any]:
    """Tokens, and the operations that one step cannot do without, from the model's dimensions."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, pairs, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = width * dim * (heads + 2 * pairs) + heads * dim * width + 3 * width * inner
    rank = LEARN.rank * (5 * width + heads * dim + 2 * pairs * dim + heads * dim + 4 * inner)
    tokens, flops = 0, 0.0
    for sample in samples:
        prompt, reply = len(sample.turn.prompt_ids), len(sample.turn.reply_ids)
        n = prompt + reply - 1
        tokens += prompt + reply
        # Frozen weights: forward and the gradient of the input. An adapter's own gradients are a third.
        flops += config.num_hidden_layers * n * (4 * layer + 6 * rank)
        # Scores and values, for half of all pairs; the way back takes twice as much and the scores again.
        flops += config.num_hidden_layers * 2 * (2 * n * n / 2) * heads * dim * 3.5
        flops += 4 * reply * width * config.vocab_size
    return {"tokens": tokens, "flops": flops}


def _ours(model: str, precision: str, lengths: str) -> Step:
    from nextstate.engines.model import load
    from nextstate.learn import trainer as trainer_module
    from nextstate.learn.trainer import Trainer

    learn = LEARN.model_copy(update={"bfloat16": precision == "bfloat16"})
    trainer = Trainer(load(model, dtype="float32", device="cpu"), learn)
    samples = made_up_samples(trainer.loaded.tokenizer, lengths)
    # The same turns in a micro-batch as on the other side, instead of about as many tokens in each.
    groups = [list(range(at, at + MICRO_BATCH_TURNS)) for at in range(0, TURNS, MICRO_BATCH_TURNS)]
    trainer_module.grouped = lambda *_, **__: groups  # type: ignore[assignment]
    counts = _counts(samples, trainer.loaded.model.config)
    return lambda: {**trainer.update(samples, oldest_version=0), **counts}


def _trl(model: str, precision: str, lengths: str) -> Step:
    import tempfile

    import torch
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from nextstate.engines.adapters import lora_config
    from nextstate.engines.model import resolve

    path = resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    samples = made_up_samples(tokenizer, lengths)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    counts = _counts(samples, base.config)
    torch.manual_seed(LEARN.seed)
    policy = get_peft_model(base, lora_config(LEARN.rank, LEARN.alpha, LEARN.targets))
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=precision == "bfloat16",
        loss_type="grpo",
        beta=0.0,
        epsilon=LEARN.clip_low,
        epsilon_high=LEARN.clip_high,
        per_device_train_batch_size=MICRO_BATCH_TURNS,
        num_generations=MICRO_BATCH_TURNS,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = GRPOTrainer(
        policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=options,
        train_dataset=Dataset.from_dict({"prompt": ["?"] * TURNS}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = TURNS // MICRO_BATCH_TURNS
    policy.train()
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARN.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)

    def padded(rows: list[tuple[int, ...]], *, left: bool) -> tuple[Any, Any]:
        longest = max(map(len, rows))
        gaps = [[0] * (longest - len(row)) for row in rows]
        ids = [[*gap, *row] if left else [*row, *gap] for row, gap in zip(rows, gaps, strict=True)]
        ones = [[1] * len(row) for row in rows]
        mask = [[*gap, *one] if left else [*one, *gap] for one, gap in zip(ones, gaps, strict=True)]
        return torch.tensor(ids), torch.tensor(mask)

    def step() -> dict[str, Any]:
        optimizer.zero_grad(set_to_none=True)
        computed, loss = 0, 0.0
        for at in range(0, TURNS, MICRO_BATCH_TURNS):
            batch = samples[at : at + MICRO_BATCH_TURNS]
            prompt_ids, prompt_mask = padded([s.turn.prompt_ids for s in batch], left=True)
            reply_ids, reply_mask = padded([s.turn.reply_ids for s in batch], left=False)
            computed += prompt_ids.numel() + reply_ids.numel()
            inputs = {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": reply_ids,
                "completion_mask": reply_mask,
                "advantages": torch.tensor([float(s.reward) for s in batch]),
            }
            part = trainer._compute_loss(trainer.model, inputs)
            trainer.accelerator.backward(part)
            loss += float(part.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, LEARN.max_grad_norm))
        optimizer.step()
        return {"loss": loss, "grad_norm": norm, "tokens_computed": computed, **counts}

    return step


def _peak(model: str, _: str, lengths: str) -> Step:
    """Operations a second of plain products of the model's shapes, as many rows as a micro-batch has tokens."""
    import torch
    from transformers import AutoConfig

    from nextstate.engines.model import resolve

    config = AutoConfig.from_pretrained(resolve(model))
    rows = sum(prompt + reply for prompt, reply in made_up_lengths(lengths)) * MICRO_BATCH_TURNS // TURNS
    width, inner = config.hidden_size, config.intermediate_size
    shapes = [(width, width), (width, inner), (inner, width)]

    def speed(dtype: torch.dtype) -> float:
        flops = seconds = 0.0
        for across, out in shapes:
            x, w = torch.randn(rows, across, dtype=dtype), torch.randn(out, across, dtype=dtype)
            torch.nn.functional.linear(x, w)
            started = time.perf_counter()
            for _ in range(20):
                torch.nn.functional.linear(x, w)
            seconds += time.perf_counter() - started
            flops += 20 * 2 * rows * across * out
        return flops / seconds

    return lambda: {precision: speed(getattr(torch, precision)) for precision in PRECISIONS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--lengths", choices=LENGTHS, nargs="+", default=["spread"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--side", choices=(*SIDES, "peak"), help=argparse.SUPPRESS)
    parser.add_argument("--precision", choices=PRECISIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        train_on_demand(options.side, options.precision, options.model, options.threads[0], options.lengths[0])
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
