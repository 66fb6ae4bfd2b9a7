"""Spots at which the server or its trainer gets a SIGKILL, by name rather than by a lucky delay.

Every loop moves by transactions of the store, so a spot is `role: moment work`: which process, whether just before, in
or just after the transaction, and the function that runs in it. Beside those there are the trainer's steps on disk.
A test arms a spot with a file; the process that reaches it takes the file away and kills itself, there or a moment
later, from a thread of its own. Nobody in the process gets to clean up anything.

Armed with 'trainer: in finish_update', a trainer dies when the rows are written and before they are committed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nextstate.store.store import Store


def arm(file: Path, spot: str, *, skip: int = 0, delay_s: float = 0.0) -> None:
    """Let the process that reaches a spot die.

    Args:
        skip: how many times it is passed before.
        delay_s: from the spot to the death, while the process goes on.
    """
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"spot": spot, "skip": skip, "delay_s": delay_s}))
    part.rename(file)


def fired(file: Path) -> bool:
    """Whether somebody has reached the spot; with a delay, it may live on for that long."""
    return not file.exists()


class _Spots:
    """In a process that is to die: what is armed, and how often it was passed."""

    def __init__(self, role: str, file: Path) -> None:
        self._role, self._file = role, file
        self._passed: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def reach(self, where: str) -> None:
        spot = f"{self._role}: {where}"
        with self._lock:  # the server writes from several threads
            try:
                armed, made = json.loads(self._file.read_text()), self._file.stat().st_mtime_ns
            except FileNotFoundError:
                return
            if armed["spot"] != spot:
                return
            self._passed[spot, made] += 1
            if self._passed[spot, made] <= armed["skip"]:
                return
            self._file.unlink()
            if armed["delay_s"]:
                threading.Thread(target=_die, args=(armed["delay_s"],), daemon=True).start()
            else:
                _die(0.0)


def _die(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


def watch(role: str, file: Path) -> None:
    """Let this process die where it is told to.

    Args:
        role: 'server' or 'trainer'.
        file: see `arm`.
    """
    spots = _Spots(role, file)
    write_now, read_now, rename, fsync = Store.write_now, Store.read_now, os.rename, os.fsync

    def write(self: Store, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found: Any = None

        def inside(*inner: Any, **more: Any) -> Any:
            nonlocal found
            found = work(*inner, **more)
            if found != []:  # a claim that got nothing was nothing
                spots.reach(f"in {name}")
            return found

        name = getattr(work, "__name__", "")
        spots.reach(f"before {name}")
        write_now(self, inside, *args, **kwargs)
        if found != []:
            spots.reach(f"after {name}")
        return found

    def read(self: Store, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = read_now(self, work, *args, **kwargs)
        if found is not None:
            spots.reach(f"read {getattr(work, '__name__', '')}")
        return found

    def renamed(*args: Any, **kwargs: Any) -> None:
        spots.reach("before rename")
        rename(*args, **kwargs)
        spots.reach("after rename")

    def synced(handle: int) -> None:
        spots.reach("before fsync")
        fsync(handle)

    Store.write_now, Store.read_now = write, read  # type: ignore[method-assign, assignment]
    os.rename, os.fsync = renamed, synced
