"""Many clients at once, for long: `python -m benchmarks.load`.

The model is a random one with next to no arithmetic, so that what is measured is everything around the arithmetic. The
server is a `nextstate serve --no-learn` process with as many streams as there are clients, who stream one answer after
another, each request a conversation of its own that is written down as ever.

First the cost of a request and of a streamed token, for these sides, which take turns within one run:

    engine                  the engine in this process
    http                    the server
    generate                `model.generate` of transformers in this process, one prompt after another
    transformers serve      the server of transformers, which answers one request after another
    ... batching            the same with --continuous-batching, which computes them together

A side answers a number of requests with answers of one token and as many with answers of up to LONG; two costs, two
unknowns: cost = requests * per_request + tokens * per_token. The cost is the processor time of the process that serves,
and beside it the time by the clock, in which the clients, in this process, have their share. What HTTP adds is the
difference between a server and what it has inside: http - engine, and transformers serve - generate.

Then the server alone answers all requests. Reported are requests that failed (any status but 200, a broken connection,
no finish reason), requests and tokens a second, and the server's resident memory when 10 %, 50 % and 100 % were
answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from benchmarks import machine, tiny
from benchmarks.server import serving
from nextstate.chat.template import render
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import LoadedModel, load
from nextstate.report.stats import quantile
from nextstate.types import BASE, Sampling

CLIENTS = 200
REQUESTS = 10_000
COMPARED = 400
"""Requests of each kind with which a side is measured in a round."""
SHORT, LONG = 1, 32
"""Tokens of an answer at most."""
TEMPERATURE = 0.7
THREADS = 1
MARKS = (0.1, 0.5, 1.0)
"""Shares of the requests behind which the memory is read."""
_START_S = 120.0
_REQUEST_S = 600.0

INSIDE = {
    "http": "engine",
    "transformers serve": "generate",
    "transformers serve, batching": None,
}
"""Servers, and what each has inside, where that is measured."""

Ask = Callable[[int, int], Awaitable[int]]
"""Answers request number n with at most so many tokens, and says how many it took.

Raises:
    Failed: there was no answer, or half of one.
"""


class Failed(Exception):
    """A request without a whole answer."""


@dataclass(slots=True, kw_only=True)
class Driven:
    """What came of a number of requests."""

    requests: int
    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of the process that serves."""
    failed: list[str] = field(default_factory=list)
    rss_mb: dict[int, float | None] = field(default_factory=dict)
    """Requests answered -> resident memory of the process that serves."""


async def drive(
    ask: Ask, *, clients: int, requests: int, max_tokens: int, pid: int, marks: Sequence[int] = ()
) -> Driven:
    """Let clients ask, each as soon as it has its answer, until so many requests were made.

    Args:
        pid: of the process that serves.
        marks: after so many requests, read its memory.
    """
    driven, numbers = Driven(requests=requests), iter(range(requests))
    answered = 0

    async def client() -> None:
        nonlocal answered
        for n in numbers:
            try:
                tokens = await ask(n, max_tokens)  # on a line of its own: others add meanwhile
                driven.tokens += tokens
            except Failed as error:
                driven.failed.append(str(error))
            answered += 1
            if answered in marks:
                driven.rss_mb[answered] = machine.rss_mb(pid)

    started, busy = time.perf_counter(), machine.cpu_s(pid)
    await asyncio.gather(*(client() for _ in range(clients)))
    driven.seconds, driven.cpu_s = time.perf_counter() - started, machine.cpu_s(pid) - busy
    return driven


def costs(requests: int, short: tuple[int, float], long: tuple[int, float]) -> tuple[float, float]:
    """Cost of a request and of a token, from two runs of so many requests: tokens and cost of each."""
    (few, cheap), (many, dear) = short, long
    per_token = (dear - cheap) / (many - few)
    return (cheap - few * per_token) / requests, per_token


# -- sides -------------------------------------------------------------------------------------------------------------


def question(n: int) -> str:
    return f"Tell me story {n}."


@asynccontextmanager
async def over_http(url: str, model: str, clients: int) -> AsyncIterator[Ask]:
    """Ask a server for streamed chat completions."""
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_S, limits=limits, verify=False) as http:

        async def ask(n: int, max_tokens: int) -> int:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": question(n)}],
                "max_tokens": max_tokens,
                "temperature": TEMPERATURE,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            finish, tokens = None, 0
            try:
                async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        raise Failed(f"status {response.status_code}: {(await response.aread())[:300]!r}")
                    async for line in response.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        event = json.loads(line.removeprefix("data: "))
                        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                        for choice in event.get("choices", ()):
                            finish = choice.get("finish_reason") or finish
            except httpx.HTTPError as error:
                raise Failed(repr(error)) from error
            if finish not in ("stop", "length"):
                raise Failed(f"finish reason {finish}")
            return tokens

        yield ask


def _engine(engine: LocalEngine) -> Ask:
    async def ask(n: int, max_tokens: int) -> int:
        prompt = render(engine.loaded.tokenizer, [{"role": "user", "content": question(n)}])
        sampling = Sampling(max_tokens=max_tokens, temperature=TEMPERATURE)
        return sum([len(chunk.ids) async for chunk in engine.generate(prompt, sampling, BASE)])

    return ask


def _generate(loaded: LoadedModel) -> Ask:
    model = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=torch.float32, attn_implementation="sdpa").eval()
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0, "use_cache": True}

    def generate(n: int, max_tokens: int) -> int:
        ids = torch.tensor([render(loaded.tokenizer, [{"role": "user", "content": question(n)}])])
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, pad_token_id=0, **sampling
            )
        return int(made.shape[1] - ids.shape[1])

    async def ask(n: int, max_tokens: int) -> int:
        return generate(n, max_tokens)

    return ask


@contextmanager
def transformers_serving(model: Path, log: Path, *options: str) -> Iterator[tuple[str, int]]:
    """A `transformers serve` process: its URL and its id; it ends with the block.

    Raises:
        RuntimeError: it did not start; what it said is in the text.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cli = str(Path(sys.executable).with_name("transformers"))
    command = [cli, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    threads = {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dtype", "float32", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **threads},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        ends = time.monotonic() + _START_S
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > ends:
                said = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"`transformers serve` did not start; it said:\n{said}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


# -- the run -----------------------------------------------------------------------------------------------------------


async def measure(clients: int, requests: int, rounds: int, compared: int) -> dict[str, Any]:
    load_at_start = machine.load_average()
    torch.set_num_threads(THREADS)
    settings = {
        "NEXTSTATE_ENGINE__MAX_STREAMS": str(clients),
        "NEXTSTATE_SERVE__MAX_QUEUE": str(clients),
        "NEXTSTATE_ENGINE__DTYPE": "float32",
    }
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = tiny.tiny_model(folder / tiny.NAME)
        loaded = load(str(model), dtype="float32", device="cpu")
        engine = LocalEngine(loaded, max_streams=clients, threads=THREADS)
        engine.start()
        stack.callback(engine.stop)
        served = stack.enter_context(serving(folder, "--no-learn", "--model", str(model), settings=settings))
        own = await stack.enter_async_context(over_http(served.url, "policy", clients))
        # Its cache, in blocks of 16 tokens, would else take most of the machine's memory.
        blocks = str(8 * clients)
        others = {
            "transformers serve": (),
            "transformers serve, batching": (
                "--continuous-batching",
                "--cb-block-size",
                "16",
                "--cb-num-blocks",
                blocks,
            ),
        }
        sides: dict[str, tuple[Ask, int]] = {
            "engine": (_engine(engine), os.getpid()),
            "http": (own, served.pid),
            "generate": (_generate(loaded), os.getpid()),
        }
        for n, (name, options) in enumerate(others.items()):
            log = folder / f"transformers-{n}.log"
            url, pid = stack.enter_context(transformers_serving(model, log, *options))
            sides[name] = (await stack.enter_async_context(over_http(url, str(model), clients)), pid)
        compared_sides = await _take_turns(sides, clients, compared, rounds)
        marks = [math.ceil(share * requests) for share in MARKS]
        long_run = await drive(own, clients=clients, requests=requests, max_tokens=LONG, pid=served.pid, marks=marks)
        peaks = {name: machine.peak_mb(pid) for name, (_, pid) in sides.items() if name in INSIDE}
    return {
        "machine": machine.facts(),
        "clients": clients,
        "threads": THREADS,
        "load_average": [load_at_start, machine.load_average()],
        "compared_requests": compared,
        "sides": compared_sides,
        "requests": requests,
        "failed": long_run.failed,
        "requests_per_s": requests / long_run.seconds,
        "tokens_per_s": long_run.tokens / long_run.seconds,
        "cpu_share": long_run.cpu_s / long_run.seconds,
        "rss_mb": {f"{share:.0%}": long_run.rss_mb[mark] for share, mark in zip(MARKS, marks, strict=True)},
        "peak_mb": peaks,
    }


async def _take_turns(
    sides: dict[str, tuple[Ask, int]], clients: int, requests: int, rounds: int
) -> dict[str, dict[str, list[Any]]]:
    """Side -> what it cost, ms, one a round; and the requests that failed."""
    found: dict[str, dict[str, list[Any]]] = {
        name: {"request_cpu_ms": [], "token_cpu_ms": [], "request_ms": [], "token_ms": [], "failed": []}
        for name in sides
    }
    for name, (ask, pid) in sides.items():
        warm = await drive(ask, clients=clients, requests=2 * clients, max_tokens=2, pid=pid)
        found[name]["failed"] += warm.failed
    for turn in range(rounds):
        for name, (ask, pid) in list(sides.items()) if turn % 2 == 0 else reversed(sides.items()):
            runs = [
                await drive(ask, clients=clients, requests=requests, max_tokens=most, pid=pid) for most in (SHORT, LONG)
            ]
            side, (short, long) = found[name], runs
            by_cpu = costs(requests, (short.tokens, short.cpu_s), (long.tokens, long.cpu_s))
            by_clock = costs(requests, (short.tokens, short.seconds), (long.tokens, long.seconds))
            for kind, (per_request, per_token) in {"cpu_ms": by_cpu, "ms": by_clock}.items():
                side[f"request_{kind}"].append(1000 * per_request)
                side[f"token_{kind}"].append(1000 * per_token)
            side["failed"] += short.failed + long.failed
    return found


def show(result: dict[str, Any]) -> None:
    start, end = result["load_average"]
    kinds = ("request_cpu_ms", "token_cpu_ms", "request_ms", "token_ms")
    rows = []
    for name, side in result["sides"].items():
        rows.append([name, *(quantile(side[kind], 0.5) for kind in kinds), len(side["failed"])])
    for name, inside in INSIDE.items():
        if inside is not None:
            added = [
                [a - b for a, b in zip(result["sides"][name][kind], result["sides"][inside][kind], strict=True)]
                for kind in kinds
            ]
            rows.append([f"{name} - {inside}", *(quantile(values, 0.5) for values in added), None])
    machine.show(
        f"{result['clients']} clients, median of {len(result['sides']['http']['token_ms'])} rounds of "
        f"{result['compared_requests']} requests, load average {start} to {end}",
        ["side", "CPU ms a request", "CPU ms a token", "ms a request", "ms a token", "failed"],
        rows,
    )
    rss = result["rss_mb"]
    first, last = rss[f"{MARKS[0]:.0%}"], rss[f"{MARKS[-1]:.0%}"]
    machine.show(
        f"{result['requests']} requests, one server",
        ["", "measured"],
        [
            ["failed requests", len(result["failed"])],
            ["requests a second", result["requests_per_s"]],
            ["tokens a second", result["tokens_per_s"]],
            ["processors that the server kept busy", result["cpu_share"]],
            *([f"resident memory at {share}, MB", f"{mb:.1f}" if mb else None] for share, mb in rss.items()),
            ["the last of them over the first", f"{last / first:.3f}" if first and last else None],
            *([f"most resident memory of {name}, MB", mb] for name, mb in result["peak_mb"].items()),
        ],
    )
    said = Counter(result["failed"])
    for side in result["sides"].values():
        said.update(side["failed"])
    for what, times in said.most_common(5):
        print(f"failed, {times} times: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="in the long run")
    parser.add_argument("--rounds", type=int, default=3, help="in which the sides take turns before it")
    parser.add_argument("--compared", type=int, default=COMPARED, help="requests of each kind in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    result = asyncio.run(measure(options.clients, options.requests, options.rounds, options.compared))
    show(result)
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
