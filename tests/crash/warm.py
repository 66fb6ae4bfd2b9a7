"""Servers and trainers that start in a moment: processes forked from one that has imported everything already.

    the test ─▶ Template ─fork▶ keeper ─fork▶ server ─fork▶ nursery ─fork▶ trainer
                                writes the            forks a trainer when the
                                server's exit status  server's supervisor asks for one

A start from nothing takes four seconds of CPU, nearly all of it imports, and so does a trainer's; fifty kills would
cost ten minutes. What runs afterwards is the same: separate processes, the real command line, the real supervisor. The
nursery stands for the server where the trainer looks whether its parent lives, and dies with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.crash import spots

_PR_SET_PDEATHSIG = 1


class Template:
    """The process that has imported everything. Use it with `close`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def serve(self, arguments: Sequence[str], log: Path, spot: Path) -> WarmServer:
        """A server in a process group of its own.

        Args:
            arguments: of the command line, from 'serve' on.
            log: its output is appended there, and its trainer's.
            spot: see `spots.arm`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        status = log.with_suffix(".status")
        status.unlink(missing_ok=True)
        order = {"arguments": list(arguments), "log": str(log), "spot": str(spot), "status": str(status)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return WarmServer(int(self._process.stdout.readline()), status)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class WarmServer:
    """As much of `subprocess.Popen` as is needed."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._status.exists():
            self.returncode = int(self._status.read_text())
        return self.returncode

    def wait(self, timeout: float) -> int:
        ends = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("the server", timeout)
            time.sleep(0.005)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


# -- in the template and its children ----------------------------------------------------------------------------------


def main() -> NoReturn:
    """Fork a server for each order on standard input, and say its process id."""
    _import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        if os.fork() == 0:
            _keep(order, writing)
        os.close(writing)
        print(os.read(reading, 20).decode(), flush=True)
        os.close(reading)
    os._exit(0)


def _import_everything() -> None:
    import nextstate.cli.main
    import nextstate.learn.process
    import nextstate.learn.trainer
    import nextstate.recipes.personal  # noqa: F401


def _keep(order: dict[str, Any], say: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(say)
        _serve(order)
    os.write(say, str(pid).encode())
    os.close(say)
    _, status = os.waitpid(pid, 0)
    file = Path(order["status"])
    part = file.with_suffix(".part")
    part.write_text(str(os.waitstatus_to_exitcode(status)))
    part.rename(file)
    os._exit(0)


def _serve(order: dict[str, Any]) -> NoReturn:
    from nextstate.cli.main import app

    os.setsid()
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    spot = Path(order["spot"])
    asyncio.create_subprocess_exec = _nursery(spot)  # type: ignore[assignment]
    spots.watch("server", spot)
    sys.argv = ["nextstate", *order["arguments"]]
    _end_as(app)


def _nursery(spot: Path) -> Any:
    """What starts trainers in place of `asyncio.create_subprocess_exec`. Forked now, while there is one thread."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ours.close()
        _bear(theirs.makefile("rw"), spot)
    theirs.close()
    line = ours.makefile("rw")

    async def start(_python: str, _m: str, module: str, options: str, _parent: str, **_: Any) -> _Trainer:
        assert module == "nextstate.learn.process"
        line.write(json.dumps(options) + "\n")
        line.flush()
        return _Trainer(int(await asyncio.to_thread(line.readline)), line)

    return start


class _Trainer:
    """As much of `asyncio.subprocess.Process` as the supervisor needs."""

    def __init__(self, pid: int, line: IO[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = asyncio.ensure_future(asyncio.to_thread(line.readline))

    async def wait(self) -> int:
        self.returncode = int(await asyncio.shield(self._end))
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _bear(line: IO[str], spot: Path) -> NoReturn:
    """Fork one trainer after the other; say the process id of each, and how it ended."""
    from nextstate.learn import process

    nursery = os.getpid()
    while options := line.readline():
        pid = os.fork()
        if pid == 0:
            spots.watch("trainer", spot)
            sys.argv = ["nextstate.learn.process", json.loads(options), str(nursery)]
            _end_as(process.main)
        line.write(f"{pid}\n")
        line.flush()
        _, status = os.waitpid(pid, 0)
        line.write(f"{os.waitstatus_to_exitcode(status)}\n")
        line.flush()
    os._exit(0)


def _end_as(run: Any) -> NoReturn:
    """Run it and end with its status, without anything of the process that this one was forked from."""
    status: Any = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
