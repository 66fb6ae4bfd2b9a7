"""Tokens per second served, at 1, 4 and 16 streams: `python -m benchmarks.serving`.

Four sides take turns, on the same float32 weights, with one thread for the arithmetic, at temperature 0.7, with prompts
of about 35 tokens and 48 new tokens a stream:

    adapter     the engine in this process, version 1 serving: a LoRA adapter on every linear layer
    base        the engine in this process, version 0
    http        a `nextstate serve --no-learn` process, version 0, through the official client, streaming
    generate    `model.generate` of transformers, one padded batch, sdpa attention, cache on

In this process no token ends a stream, so all make exactly 48; over HTTP a stream may end early, and the tokens that it
made are counted. The engine's prefix cache is off, as `generate` has none: each side computes each prompt. A rate is
tokens over the time from the first request sent to the last token received, the prompts' prefill included. Beside it
stands the rate by CPU time: tokens over the processor seconds of the process that serves, which other work on the
machine changes far less; on a busy machine, trust the ratio of those.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoModelForCausalLM

from benchmarks import machine
from benchmarks.server import Served, serving
from nextstate.chat.template import render
from nextstate.config import LearnConfig
from nextstate.engines.adapters import lora_config
from nextstate.engines.builtin import NAME
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import LoadedModel, load
from nextstate.learn import checkpoint
from nextstate.learn.trainer import Trainer
from nextstate.report.stats import quantile
from nextstate.types import BASE, PolicyRef, Sampling, TokenIds

STREAMS = (1, 4, 16)
NEW_TOKENS = 48
TEMPERATURE = 0.7
THREADS = 1
SUBJECTS = (
    "fox", "river", "baker", "comet", "miner", "garden", "sailor", "clock",
    "tower", "violin", "desert", "letter", "market", "winter", "bridge", "lantern",
)  # fmt: skip
"""One a stream, so that no two prompts are the same."""

Side = Callable[[int], Awaitable[int]]
"""Serves so many streams at once and says how many tokens that made."""

Rates = dict[str, dict[int, list[float]]]
"""Side -> streams -> tokens a second, one a round."""


def question(n: int) -> str:
    return f"Tell me a long story about a {SUBJECTS[n]}."


async def measure(model: str, rounds: int) -> dict[str, Any]:
    load_at_start = machine.load_average()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = {"NEXTSTATE_ENGINE__PREFIX_CACHE_TOKENS": "0", "NEXTSTATE_ENGINE__DTYPE": "float32"}
        with serving(folder, "--no-learn", "--model", model, settings=settings) as served:
            memory = {"server, started": _memory(served)}
            loaded = replace(load(model, dtype="float32", device="cpu"), end_ids=frozenset())
            prompts = [
                render(loaded.tokenizer, [{"role": "user", "content": question(n)}]) for n in range(max(STREAMS))
            ]
            artifact = _made_adapter(model, folder / "versions")
            engine = LocalEngine(loaded, max_streams=max(STREAMS), prefix_cache_tokens=0, threads=THREADS)
            engine.prepare_adapters(_shape())
            await engine.publish(PolicyRef(version=1), artifact)
            engine.start()
            client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=600)
            sides: dict[str, Side] = {
                "adapter": lambda n: _engine(engine, prompts[:n], PolicyRef(version=1)),
                "base": lambda n: _engine(engine, prompts[:n], BASE),
                "http": lambda n: _http(client, n),
                "generate": _plain(loaded, prompts),
            }
            pids = {name: served.pid if name == "http" else os.getpid() for name in sides}
            try:
                for side in sides.values():
                    await side(1)  # the first pass of each allocates
                rates, cpu_rates = await _take_turns(sides, pids, rounds)
            finally:
                engine.stop()
                await client.close()
            memory["server, after 16 streams"] = _memory(served)
    return {
        "machine": machine.facts(),
        "model": model,
        "threads": THREADS,
        "prompt_tokens": sorted(len(prompt) for prompt in prompts),
        "new_tokens": NEW_TOKENS,
        "load_average": [load_at_start, machine.load_average()],
        "tokens_per_s": rates,
        "tokens_per_cpu_s": cpu_rates,
        "memory_mb": memory,
    }


async def _take_turns(sides: dict[str, Side], pids: dict[str, int], rounds: int) -> tuple[Rates, Rates]:
    """Rates by the clock and by the processor time of the process that serves."""
    by_clock: Rates = {name: {n: [] for n in STREAMS} for name in sides}
    by_cpu: Rates = {name: {n: [] for n in STREAMS} for name in sides}
    for turn in range(rounds):
        order = list(sides.items()) if turn % 2 == 0 else list(reversed(sides.items()))
        for n in STREAMS:
            for name, side in order:
                started, busy = time.perf_counter(), machine.cpu_s(pids[name])
                tokens = await side(n)
                by_clock[name][n].append(round(tokens / (time.perf_counter() - started), 2))
                by_cpu[name][n].append(round(tokens / (machine.cpu_s(pids[name]) - busy), 2))
    return by_clock, by_cpu


async def _engine(engine: LocalEngine, prompts: Sequence[TokenIds], policy: PolicyRef) -> int:
    async def one(prompt: TokenIds) -> int:
        sampling = Sampling(max_tokens=NEW_TOKENS, temperature=TEMPERATURE)
        return sum([len(chunk.ids) async for chunk in engine.generate(prompt, sampling, policy)])

    return sum(await asyncio.gather(*map(one, prompts)))


async def _http(client: openai.AsyncOpenAI, streams: int) -> int:
    async def one(n: int) -> int:
        stream = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": question(n)}],
            max_tokens=NEW_TOKENS,
            temperature=TEMPERATURE,
            stream=True,
            stream_options={"include_usage": True},
        )
        return sum([chunk.usage.completion_tokens async for chunk in stream if chunk.usage])

    return sum(await asyncio.gather(*map(one, range(streams))))


def _plain(loaded: LoadedModel, prompts: Sequence[TokenIds]) -> Side:
    model = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=torch.float32, attn_implementation="sdpa").eval()
    # No token ends a stream here either, and transformers' default of the 50 likeliest tokens would be other work.
    model.generation_config.eos_token_id = None
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0, "use_cache": True}

    async def generate(streams: int) -> int:
        longest = max(map(len, prompts[:streams]))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts[:streams]])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts[:streams]])
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, pad_token_id=0, **sampling)
        return int(made[:, longest:].numel())

    return generate


def _shape() -> Any:
    learn = LearnConfig()
    return lora_config(learn.rank, learn.alpha, learn.targets)


def _made_adapter(model: str, versions: Path) -> Path:
    """A version as the trainer writes it, that changes what the model says a little."""
    trainer = Trainer(load(model, dtype="float32", device="cpu"), LearnConfig())
    with torch.no_grad():
        for parameter in trainer.parameters:
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    return checkpoint.save(trainer, versions, 1, probe={}, metrics={})


def _memory(served: Served) -> dict[str, float | None]:
    return {"peak": machine.peak_mb(served.pid), "pss": machine.pss_mb(served.pid)}


def show(result: dict[str, Any]) -> None:
    start, end = result["load_average"]
    rows = []
    for n in STREAMS:
        for name in result["tokens_per_s"]:
            row: list[Any] = [n, name]
            for measured in ("tokens_per_s", "tokens_per_cpu_s"):
                own, plain = (result[measured][side][n] for side in (name, "generate"))
                ratios = [a / b for a, b in zip(own, plain, strict=True)]
                row += [quantile(own, 0.5), max(own)]
                row += [None, None] if name == "generate" else [quantile(ratios, 0.5), _range(ratios)]
            rows.append(row)
    rounds = len(result["tokens_per_s"]["generate"][STREAMS[0]])
    each = ["median", "best", "of generate", "in each round"]
    machine.show(
        f"tokens per second and per CPU second, {rounds} rounds, {result['threads']} thread, "
        f"load average {start} to {end}",
        ["streams", "side", *each, *(f"{column}, CPU" for column in each)],
        rows,
    )
    columns = ["memory, MB", "peak resident", "proportional (PSS)"]
    machine.show("", columns, [[name, found["peak"], found["pss"]] for name, found in result["memory_mb"].items()])


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    result = asyncio.run(measure(options.model, options.rounds))
    show(result)
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
