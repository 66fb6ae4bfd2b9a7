"""A `nextstate serve` process to measure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    url: str
    """Without the /v1."""
    pid: int
    data: Path


@contextmanager
def serving(folder: Path, *options: str, settings: Mapping[str, str] | None = None) -> Iterator[Served]:
    """A server process on a free port of this machine, ready to answer; it ends with the block.

    Args:
        folder: for its data and its log.
        options: further ones of `nextstate serve`.
        settings: environment variables for it, NEXTSTATE_*.

    Raises:
        RuntimeError: it did not start; what it said is in the text.
    """
    log = folder / "server.log"
    command = [sys.executable, "-m", "nextstate.cli.main", "serve", "--data", str(folder / "data"), "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(settings or {})},
        )
    try:
        yield Served(url=_ready(process, log), pid=process.pid, data=folder / "data")
    finally:
        process.terminate()
        process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    ends = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < ends:
        said = log.read_text(errors="replace").splitlines()
        url = next((line.split(" on ")[1].split("/v1")[0] for line in said if line.startswith("serving ")), None)
        if url is not None:
            try:
                if httpx.get(f"{url}/readyz").is_success:
                    return url
            except httpx.TransportError:
                pass  # the port is bound, and the server is about to listen
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start; it said:\n{log.read_text(errors='replace')[-2000:]}")
