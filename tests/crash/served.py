"""The real `nextstate serve` in a process of its own, with the trainer that it starts, to be talked to and killed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
from safetensors.torch import load_file, save_file

from nextstate.store.store import Store
from tests.crash import spots
from tests.crash.warm import Template, WarmServer

T = TypeVar("T")

DEADLINE_S = 600.0
"""For anything that is waited for; a machine that is busy with other things needs some of it."""

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}

_SERVING = re.compile(r"version (\d+), on (http://\S+/v1)")


async def until(condition: Callable[[], T], what: str, *, poll_s: float = 0.02, deadline_s: float = DEADLINE_S) -> T:
    """The condition's first value that counts as true."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s in vain until {what}"
        await asyncio.sleep(poll_s)
    return value


def spawn(command: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that all of it can be killed."""
    return subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT, start_new_session=True)


def talkative(model: Path, folder: Path, *, ends: int) -> Path:
    """A copy of the tiny model of which only this many of its 400 tokens end an answer."""
    shutil.copytree(model, folder)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "eos_token_id": settings["eos_token_id"][:ends]}))
    return folder


def sharpen(model: Path, by: float) -> None:
    """Make some tokens much likelier than others, in place, and with it the whole model quicker to learn.

    The tiny model's last layer is not trained and finds all tokens about equally likely, however far the others move.
    """
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= by
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def write_config(
    file: Path, *, model: Path, judge_url: str, learn: dict[str, Any], gate: dict[str, Any] | None = None
) -> Path:
    """A configuration that trains soon and little, and keeps no turn out of training: tests wait for a certain one."""
    learn = {"rank": 4, "alpha": 8, "max_wait_s": 1, "learning_rate": 1e-5, "threads": 1, **learn}
    lines = [f"model = {json.dumps(str(model))}", "[serve]", "port = 0"]
    lines += ["[judge]", f"base_url = {json.dumps(judge_url)}", "votes = 1", "deadline_s = 20"]
    for section, values in (("learn", learn), ("gate", {"hold_out_every": 0, **(gate or {})})):
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    file.write_text("\n".join(lines) + "\n")
    return file


class Served:
    """One data folder and the server on it. Started, killed and started again, it is the same object."""

    def __init__(self, data: Path, *options: str, template: Template | None = None) -> None:
        """Args:
        template: from which to fork it. Only then can `die_at` be used.
        """
        self.data, self._options = data, options
        self._template, self._spot = template, data.with_suffix(".spot")
        self._log = data.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | WarmServer | None = None
        self._logged = 0
        self.url = ""
        self.version = 0
        """What it said that it serves when it started."""
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The store, for looking; the server has made it."""
        if self._store is None:
            self._store = Store.open(f"sqlite:///{self.data.resolve() / 'nextstate.db'}")
        return self._store

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def trainer_pid(self) -> int:
        return int((self.data / "trainer.lock").read_text())

    def log(self) -> str:
        """What this start of the server has printed so far; the trainer writes there too."""
        with self._log.open("rb") as file:
            file.seek(self._logged)
            return file.read().decode()

    async def start(self) -> None:
        """Start, and come back when it serves."""
        self._logged = self._log.stat().st_size if self._log.exists() else 0
        self._log.touch()
        arguments = ["serve", "--data", str(self.data), *self._options]
        if self._template is not None:
            process = self._process = self._template.serve(arguments, self._log, self._spot)
        else:
            with self._log.open("ab") as log:
                process = self._process = spawn([sys.executable, "-m", "nextstate.cli.main", *arguments], log)

        def address() -> re.Match[str] | None:
            assert process.poll() is None, f"the server ended with status {process.returncode}:\n{self.log()}"
            return _SERVING.search(self.log())

        said = await until(address, "the server serves", poll_s=0.05)
        self.version, self.url = int(said[1]), said[2]
        # The port is taken before anybody serves it: this request waits until somebody does.
        async with httpx.AsyncClient(verify=False, timeout=DEADLINE_S) as http:
            (await http.get(self.url.replace("/v1", "/healthz"))).raise_for_status()

    async def die_at(self, spot: str, *, skip: int = 0, delay_s: float = 0.0, orphan: bool = False) -> None:
        """Let the server or its trainer die at a spot, see `spots.arm`, and come back when it is dead.

        Args:
            orphan: when the server dies, let its trainer find that out by itself; else it is killed in the next moment.
        """
        assert self._process is not None
        assert self._template is not None
        process, file = self._process, self._spot
        spots.arm(file, spot, skip=skip, delay_s=delay_s)
        await until(lambda: spots.fired(file), f"somebody reaches '{spot}'", poll_s=0.005, deadline_s=120)
        if spot.startswith("trainer"):
            await asyncio.sleep(delay_s)
            await until(self.trainer_is_gone, "the trainer is dead", poll_s=0.002)
            return
        await until(lambda: process.poll() is not None, "the server is dead", poll_s=0.002)
        if not orphan:
            await self.kill_what_is_left()

    async def kill_what_is_left(self) -> None:
        """SIGKILL whatever of the server and its trainer is alive, also one that has only begun to start."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await until(self.trainer_is_gone, "the killed trainer is gone")

    def trainer_is_gone(self) -> bool:
        """Whether nobody holds the trainer's place. Its lock says so, whoever reaps the process."""
        return not is_locked(self.data / "trainer.lock")

    async def stop(self) -> int:
        """End it as a person would; its exit status."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self._process.wait, 30)
        finally:
            self._process.kill()
            if self._store is not None:
                self._store.close()
                self._store = None


def is_locked(lock: Path) -> bool:
    """Whether a process has this place. Looking takes nothing and writes nothing."""
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
