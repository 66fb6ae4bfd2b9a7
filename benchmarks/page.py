"""What the page and the report cost with many turns in the store: `python -m benchmarks.page`.

A store of 100,000 turns (benchmarks/many_turns.py), a server with a tiny model in this process, and a client that asks
what the page asks. Times are from sending a request to having its whole answer; the first one of each kind does not
count. The reports are what `nextstate report` does, without the start of Python.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks import machine
from benchmarks.many_turns import fill
from benchmarks.tiny import tiny_model
from nextstate.config import Config
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import load
from nextstate.report import account
from nextstate.report.stats import quantile
from nextstate.serve.app import create_app
from nextstate.serve.page import FILES
from nextstate.serve.run import bind, serve_http
from nextstate.store.store import Store

TIMES = 15


async def measure(turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = Config(data=folder)
        store = Store.open(config.database_url)
        store.write_now(fill, turns, start=1.8e9)
        engine = LocalEngine(load(str(tiny_model(folder / "model")), dtype="float32", device="cpu"))
        engine.start()
        app = create_app(
            store=store,
            engine=engine,
            config=config,
            learning=True,
            ready=lambda: (True, "ready"),
            wake_judge=lambda: None,
        )
        listener = bind("127.0.0.1", 0)
        serving = asyncio.create_task(serve_http(app, listener))
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                looks = await _looks(client, turns)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            engine.stop()
        reports = {
            "report, as a record": _timed(lambda: store.read_now(account.account)),
            "report, --json": _timed(lambda: account.as_json(store.read_now(account.account))),
            "report, --html": _timed(lambda: account.as_html(store.read_now(account.account))),
        }
        store.close()
        size = (folder / "nextstate.db").stat().st_size
    return {"machine": machine.facts(), "turns": turns, "store_mb": round(size / 1e6, 1), "looks": looks, **reports}


async def _looks(client: httpx.AsyncClient, turns: int) -> dict[str, dict[str, Any]]:
    """Milliseconds and bytes of each thing that the page asks."""
    changes = (await client.get("/api/sessions/7/changes")).json()["cursor"]
    learning = (await client.get("/api/learning")).json()["cursor"]
    paths = {
        "page load: its files": [*FILES],
        "page load: who asks, sessions": ["/api/me", "/api/sessions"],
        "a session is opened": ["/api/sessions/7"],
        "live, nothing new": [f"/api/sessions/7/changes?seen={changes}"],
        "live, one turn has changed": ["/api/sessions/7/changes", f"/api/turns/{turns // 2}"],
        "tokens of a turn": [f"/api/turns/{turns // 2}/tokens"],
        "search, found at once": ["/api/search?words=lime"],
        "search, 5,000 turns without a hit": ["/api/search?words=nowhere"],
        "learning view, nothing new": [f"/api/learning?seen={learning}"],
        "learning view, whole": ["/api/learning"],
        "a version is unfolded": ["/api/versions/1"],
    }
    found = {}
    for name, asked in paths.items():
        seconds, size = [], 0
        for n in range(TIMES + 1):
            started = time.perf_counter()
            answers = [await client.get(path) for path in asked]
            if n:
                seconds.append(time.perf_counter() - started)
            for answer in answers:
                answer.raise_for_status()
            size = sum(len(answer.content) for answer in answers)
        p50, most = quantile(seconds, 0.5), max(seconds)
        assert p50 is not None
        found[name] = {"requests": len(asked), "bytes": size, "p50_ms": 1000 * p50, "max_ms": 1000 * most}
    return found


def _timed(work: Callable[[], object]) -> float:
    """Seconds, the median of three."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[1]


def show(result: dict[str, Any]) -> None:
    rows = [[name, *one.values()] for name, one in result["looks"].items()]
    title = f"{result['turns']} turns, {result['store_mb']} MB"
    machine.show(title, ["look", "requests", "bytes", "p50, ms", "most, ms"], rows)
    reports = [[name, seconds] for name, seconds in result.items() if name.startswith("report")]
    machine.show("", ["", "seconds"], reports)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    result = asyncio.run(measure(options.turns))
    show(result)
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
