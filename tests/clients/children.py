"""Client programs as child processes: each with a home of its own, a time limit, and an end for all that it started."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.clients.installed import NODE

TIME_LIMIT_S = 180.0
"""For one run of a client; OpenClaw takes ten seconds to start on an idle machine."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended."""

    status: int
    output: str
    """All that it printed, errors included."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client runs. It finds nothing there but what the test has put there."""

    home: Path
    work: Path
    """The current directory, which its tools work in."""
    settings: Mapping[str, str]
    """Environment variables."""

    def environment(self) -> dict[str, str]:
        # Only what programs need, so that no key and no setting of whoever runs the tests gets in. The proxy does not
        # exist: whatever a client wants from another host than this one, it does not get.
        nowhere = "http://127.0.0.1:9"
        return {
            "HOME": str(self.home),
            "PATH": f"{NODE.path.parent}:{os.environ['PATH']}",
            "LANG": "C.UTF-8",
            "TERM": "xterm",
            "TMPDIR": str(self.home),
            "DO_NOT_TRACK": "1",
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "http_proxy": nowhere,
            "https_proxy": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **self.settings,
        }


def make_place(folder: Path, **settings: str) -> Place:
    """A new home and a new folder to work in."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    return Place(home, work, settings)


class Child:
    """A running client."""

    def __init__(self, process: asyncio.subprocess.Process, terminal: int | None) -> None:
        self._process, self._terminal = process, terminal
        self._output = bytearray()
        self._reading = asyncio.create_task(self._read())

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    async def _read(self) -> None:
        if self._terminal is None:
            assert self._process.stdout is not None
            while chunk := await self._process.stdout.read(65536):
                self._output += chunk
            return
        with suppress(OSError):  # how a terminal says that nobody is left at the other end
            while chunk := await asyncio.to_thread(os.read, self._terminal, 65536):
                self._output += chunk

    async def until(self, words: str) -> None:
        """Wait until the client has printed this, and forget what it printed before."""
        async with asyncio.timeout(TIME_LIMIT_S):
            while (at := self._output.find(words.encode())) < 0:
                assert self._process.returncode is None, f"it ended without saying '{words}':\n{self.output}"
                await asyncio.sleep(0.05)
        del self._output[: at + len(words)]

    def type(self, text: str) -> None:
        """Type at the client's terminal."""
        assert self._terminal is not None
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.signal(signal.SIGINT)

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def ended(self, within_s: float = TIME_LIMIT_S) -> Ran:
        """Wait until the client and all that it started have ended.

        Raises:
            TimeoutError: it goes on; the message says what it has printed.
        """
        try:
            async with asyncio.timeout(within_s):
                status = await self._process.wait()
                await self._reading
        except TimeoutError as error:
            raise TimeoutError(f"no end within {within_s:.0f} s; it has printed:\n{self.output}") from error
        return Ran(status, self.output)

    async def killed(self) -> None:
        self.signal(signal.SIGKILL)
        await self._process.wait()
        await self._reading
        if self._terminal is not None:
            os.close(self._terminal)


@asynccontextmanager
async def started(command: Sequence[str | Path], place: Place, *, terminal: bool = False) -> AsyncIterator[Child]:
    """A client, until the end of the block.

    Args:
        terminal: give it a terminal to talk to; else it finds an empty standard input.
    """
    ours, theirs = pty.openpty() if terminal else (None, asyncio.subprocess.DEVNULL)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=place.work,
        env=place.environment(),
        stdin=theirs,
        stdout=theirs if terminal else asyncio.subprocess.PIPE,
        stderr=theirs if terminal else asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    if terminal:
        os.close(theirs)
    child = Child(process, ours)
    try:
        yield child
    finally:
        await child.killed()


async def run(command: Sequence[str | Path], place: Place) -> Ran:
    """Run a client to its end."""
    async with started(command, place) as child:
        return await child.ended()
