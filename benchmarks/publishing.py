"""What many clients notice of versions that keep coming: `python -m benchmarks.publishing`.

A `nextstate serve` process with its publish loop: 32 clients stream answers of up to 64 tokens, each asking again as
soon as it has been answered. For half the time nothing is published, then a candidate is put into the store every two
seconds, then for the other half again nothing. A candidate takes the way of every version: its adapter is loaded beside
the one that serves, the gate lets the engine score it, and it serves from the next decoding step on; where the machine
needs longer than two seconds for that, the next one waits. Its numbers differ from those of the one before, so a cache
used across versions would show.

Counted are requests that failed and streams that were cut: any status but 200, no finish reason, no last event, or a
usage that is not the number of tokens in the store. Measured are the time to the first text, from sending the request,
and the gaps between pieces of text, by the phase in which they ended. Afterwards the store is asked whether each token
is tagged with a version that served at that time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
from sqlalchemy import Connection, insert, select

from benchmarks import machine, tiny
from benchmarks.server import serving
from nextstate.config import Config, LearnConfig
from nextstate.engines.builtin import NAME
from nextstate.engines.model import load
from nextstate.learn import checkpoint
from nextstate.learn.gate import measure_probe
from nextstate.learn.trainer import Trainer
from nextstate.report.stats import quantile
from nextstate.store import learning
from nextstate.store.arrays import unpack_versions
from nextstate.store.schema import policy_versions
from nextstate.store.schema import turns as turns_table
from nextstate.store.store import Store
from nextstate.types import FinishReason, VersionState

STREAMS = 32
MAX_TOKENS = 64
EVERY_S = 2.0
ADAPTERS = 3
"""Made once and published in turn, each time under a new number."""
_SERVES_WITHIN_S = 120.0
PHASES = ("quiet", "publishing")
_WARM_UP_S = 5.0
"""All clients come at once at the start; those waits do not count."""
_CLOCK_S = 0.05
"""By which a token may seem to come before its version served: the row is written just after the switch."""

Span = tuple[float, float]
"""Beginning and end, seconds since the epoch."""


@dataclass(slots=True)
class Seen:
    """What all clients saw."""

    firsts: list[Span] = field(default_factory=list)
    gaps: list[Span] = field(default_factory=list)
    finished: Counter[int] = field(default_factory=Counter)
    """Tokens by the server's count -> answers."""
    failed: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)


def phase(at: float, publishing: Span) -> str:
    """What went on at that time."""
    return PHASES[publishing[0] <= at <= publishing[1]]


def waits(spans: Sequence[Span], publishing: Span) -> dict[str, dict[str, float | int | None]]:
    """Phase -> count, p50, p99 and most, ms; absent is None. A wait belongs to the phase in which it ended."""
    found: dict[str, list[float]] = {name: [] for name in PHASES}
    for start, end in spans:
        found[phase(end, publishing)].append(1000 * (end - start))
    return {
        name: {
            "count": len(ms),
            "p50": quantile(ms, 0.5),
            "p99": quantile(ms, 0.99),
            "max": max(ms, default=None),
        }
        for name, ms in found.items()
    }


def wrongly_tagged(answers: Sequence[tuple[Span, tuple[int, ...]]], served: Sequence[tuple[int, float]]) -> int:
    """Answers with a token whose version did not serve while they were made, or whose versions go back.

    Args:
        answers: when each began and ended, and the version of each token.
        served: versions and since when they served, in that order.
    """
    ends = [since for _, since in served[1:]] + [float("inf")]
    spans = {version: (since, end) for (version, since), end in zip(served, ends, strict=True)}

    def fits(version: int, made: Span) -> bool:
        since, until = spans.get(version, (float("inf"), 0.0))
        return since - _CLOCK_S <= made[1] and made[0] <= until + _CLOCK_S

    return sum(
        list(versions) != sorted(versions) or not all(fits(version, made) for version in set(versions))
        for made, versions in answers
    )


async def measure(model: str, seconds: float, streams: int) -> dict[str, Any]:
    load_at_start = machine.load_average()
    # As many streams as there are clients: what is measured is publishing, not a queue.
    settings = {"NEXTSTATE_ENGINE__MAX_STREAMS": str(streams), "NEXTSTATE_LEARN__MAX_WAIT_S": "3600"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = model
        if model == tiny.NAME:
            path = str(tiny.tiny_model(folder / tiny.NAME))
            # Its tokens are too short to vote with. Nothing is judged here, so nobody has to be there.
            settings["NEXTSTATE_JUDGE__BASE_URL"] = "http://127.0.0.1:9/v1"
        adapters = await asyncio.to_thread(_made_adapters, path, folder / "made")
        with serving(folder, "--model", path, settings=settings) as served:
            store = Store.open(Config(data=served.data).database_url)
            try:
                # Until a version serves, streams run without an adapter, and faster.
                await _publish(store, served.data, adapters[0])
                seen, publishing = await _clients(store, served.data, served.url, adapters, seconds, streams)
                versions = await store.read(_served)
                answers = await store.read(_answers)
            finally:
                store.close()
            memory = {"peak": machine.peak_mb(served.pid), "pss": machine.pss_mb(served.pid)}
    inside = [since for _, since in versions if publishing[0] <= since <= publishing[1]]
    stored = Counter(len(tokens) for _, tokens in answers)
    return {
        "machine": machine.facts(),
        "model": model,
        "streams": streams,
        "seconds": seconds,
        "load_average": [load_at_start, machine.load_average()],
        "published": len(inside),
        "publish_every_s": quantile([b - a for a, b in pairwise(inside)], 0.5),
        "answers": sum(seen.finished.values()),
        "answers_across_versions": sum(len(set(tokens)) > 1 for _, tokens in answers),
        "failed": seen.failed,
        "cut": [*seen.cut, *(f"{tokens} tokens sent and not stored" for tokens in (seen.finished - stored).elements())],
        "wrongly_tagged": wrongly_tagged(answers, versions),
        "waits": {"first text": waits(seen.firsts, publishing), "between pieces": waits(seen.gaps, publishing)},
        "memory_mb": memory,
    }


async def _clients(
    store: Store, data: Path, url: str, adapters: Sequence[Path], seconds: float, streams: int
) -> tuple[Seen, Span]:
    seen, over = Seen(), asyncio.Event()
    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, verify=False) as http:
        clients = [asyncio.create_task(_client(http, n, seen, over)) for n in range(streams)]
        await asyncio.sleep(_WARM_UP_S)
        seen.firsts.clear()
        seen.gaps.clear()
        await asyncio.sleep(seconds / 2)
        starts = next_at = time.time()
        for n in count(1):
            await _publish(store, data, adapters[n % len(adapters)])
            next_at = max(next_at + EVERY_S, time.time())
            await asyncio.sleep(max(0.0, next_at - time.time()))
            if time.time() >= starts + seconds:
                break
        publishing = starts, time.time()
        await asyncio.sleep(seconds / 2)
        over.set()
        await asyncio.gather(*clients)
    return seen, publishing


async def _client(http: httpx.AsyncClient, n: int, seen: Seen, over: asyncio.Event) -> None:
    asked = 0
    while not over.is_set():
        asked += 1
        try:
            await _ask(http, f"Tell me story {asked} for reader {n}.", seen)
        except httpx.HTTPError as error:
            seen.failed.append(repr(error))


async def _ask(http: httpx.AsyncClient, text: str, seen: Seen) -> None:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    before = time.time()
    pieces, finish, tokens, last = 0, None, None, ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            seen.failed.append(f"status {response.status_code}")
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            last = line.removeprefix("data: ")
            if last == "[DONE]":
                continue
            event = json.loads(last)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event.get("choices", ()):
                finish = choice.get("finish_reason") or finish
                if choice["delta"].get("content"):
                    now = time.time()
                    (seen.gaps if pieces else seen.firsts).append((before, now))
                    before, pieces = now, pieces + 1
    if finish not in ("stop", "length") or last != "[DONE]" or tokens is None:
        seen.cut.append(f"finish reason {finish}, {tokens} tokens, last event {last[:80]}")
    else:
        seen.finished[tokens] += 1


# -- publishing --------------------------------------------------------------------------------------------------------


def _made_adapters(model: str, folder: Path) -> list[Path]:
    """Versions as the trainer writes them, each changing what the model says by a little, and by something else."""
    trainer = Trainer(load(model, dtype="float32", device="cpu"), LearnConfig())
    made = []
    for n in range(ADAPTERS):
        torch.manual_seed(n)
        with torch.no_grad():
            for parameter in trainer.parameters:
                parameter.add_(torch.randn_like(parameter) * 1e-3)
        made.append(checkpoint.save(trainer, folder, n, probe=measure_probe(trainer), metrics={}))
    return made


async def _publish(store: Store, data: Path, adapter: Path) -> None:
    """A candidate for the server's publish loop; returns when it serves.

    Raises:
        RuntimeError: it was rejected, or nothing became of it.
    """
    version = await store.read(learning.serving_version) + 1
    artifact = checkpoint.version_dir(Path("versions"), version)
    await asyncio.to_thread(shutil.copytree, adapter, data / artifact)
    await store.write(_add_candidate, version, str(artifact))
    ends = time.monotonic() + _SERVES_WITHIN_S
    while (row := await store.read(learning.version_row, version)).state != VersionState.SERVING:
        if row.state != VersionState.CANDIDATE or time.monotonic() > ends:
            raise RuntimeError(f"version {version} does not serve; it is {row.state}: {row.gate}")
        await asyncio.sleep(0.05)


def _add_candidate(db: Connection, version: int, artifact: str) -> None:
    values = {"version": version, "parent_version": version - 1, "artifact": artifact, "created_at": time.time()}
    db.execute(insert(policy_versions).values(state=VersionState.CANDIDATE, **values))


def _served(db: Connection) -> list[tuple[int, float]]:
    """Versions but the base, and since when they served."""
    query = select(policy_versions.c.version, policy_versions.c.served_at).where(policy_versions.c.version > 0)
    return [(version, at) for version, at in db.execute(query.order_by(policy_versions.c.version))]


def _answers(db: Connection) -> list[tuple[Span, tuple[int, ...]]]:
    columns = turns_table.c.created_at, turns_table.c.finished_at, turns_table.c.reply_versions
    whole = turns_table.c.finish_reason.in_((FinishReason.STOP, FinishReason.LENGTH))
    rows = db.execute(select(*columns).where(whole))
    return [((row.created_at, row.finished_at), unpack_versions(row.reply_versions)) for row in rows]


def show(result: dict[str, Any]) -> None:
    start, end = result["load_average"]
    machine.show(
        f"{result['streams']} streams, {result['seconds']:.0f} s with and {result['seconds']:.0f} s without publishes, "
        f"model {result['model']}, load average {start} to {end}",
        ["", "count"],
        [
            ["versions published", result["published"]],
            ["seconds from one to the next, median", result["publish_every_s"]],
            ["answers", result["answers"]],
            ["answers that a new version met in the middle", result["answers_across_versions"]],
            ["failed requests", len(result["failed"])],
            ["cut streams", len(result["cut"])],
            ["answers with a wrongly tagged token", result["wrongly_tagged"]],
        ],
    )
    rows = []
    for what, found in result["waits"].items():
        for name in PHASES:
            own, quiet = found[name], found["quiet"]
            missing = name == "quiet" or own["count"] == 0 or quiet["count"] == 0
            added = [None, None] if missing else [own[q] - quiet[q] for q in ("p50", "p99")]
            rows.append([what, name, own["count"], own["p50"], own["p99"], own["max"], *added])
    columns = ["wait for, ms", "while", "count", "p50", "p99", "most", "added p50", "added p99"]
    machine.show("", columns, rows)
    for what in ("failed", "cut"):
        for said, times in Counter(result[what]).most_common(5):
            print(f"{what}, {times} times: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publishing", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=NAME, help=f"or '{tiny.NAME}', a random one with next to no arithmetic")
    parser.add_argument("--seconds", type=float, default=300, help="with publishes; as many go by without")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    result = asyncio.run(measure(options.model, options.seconds, options.streams))
    show(result)
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
