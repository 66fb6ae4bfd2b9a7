"""Keeps the trainer's process running beside the server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from nextstate.config import Config
from nextstate.store import learning
from nextstate.store.store import Store, note

log = logging.getLogger(__name__)

REFUSED_STATUS = 3
"""A trainer that ends with it does not fit into memory, and has written down why."""
_REFUSED_PAUSE_S = 600.0
"""Memory does not become free in a moment, and every start loads the libraries and the model again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _HEALTHY_S = 1.0, 60.0, 60.0


async def keep_trainer_running(store: Store, config: Config) -> None:
    """Start the trainer, and start it again whenever it ends.

    reads    how many updates are done: a trainer that finished one was healthy; it reads its work from the store itself
    writes   an event for each end
    waits    for the process; after quick ends longer and longer, up to a minute; ten minutes where it does not fit
    crash    the trainer notices that its server is gone and ends too
    """
    # Keys stay here: the trainer needs no part of the configuration that has one.
    options = config.model_dump_json(include={"model", "data", "log", "engine", "learn", "gate"})
    pause = _FIRST_PAUSE_S
    loop = asyncio.get_running_loop()
    while True:
        started, done = loop.time(), await store.read(learning.done_updates)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nextstate.learn.process", options, str(os.getpid()), stdin=asyncio.subprocess.DEVNULL
        )
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        healthy = loop.time() - started > _HEALTHY_S or await store.read(learning.done_updates) > done
        pause = _FIRST_PAUSE_S if healthy else min(2 * pause, _LONGEST_PAUSE_S)
        wait = _REFUSED_PAUSE_S if status == REFUSED_STATUS else pause
        await store.write(note, "trainer_ended", status=status)
        log.warning("the trainer ended with status %s; it starts again in %.0f s, serving goes on", status, wait)
        await asyncio.sleep(wait)
