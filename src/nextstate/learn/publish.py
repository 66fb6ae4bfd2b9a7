"""From candidate to the version that serves."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from sqlalchemy import Connection

from nextstate.config import GateConfig
from nextstate.engines.local import LocalEngine
from nextstate.errors import AdapterError, AdapterMismatch
from nextstate.learn.gate import examine
from nextstate.store import learning
from nextstate.store.store import AnyRow, Store
from nextstate.types import BASE, PolicyRef

log = logging.getLogger(__name__)


async def publish_loop(store: Store, engine: LocalEngine, data: Path, gate: GateConfig, *, exact: bool) -> None:
    """Put each candidate through the gate and let it serve, or reject it.

    reads    policy_versions that are candidates
    writes   the same row: serving or rejected, with what the gate measured; of one whose parent was rolled back in the
             meantime, the turns wait again
    waits    polls; versions come minutes apart
    crash    the candidate is still one, and is examined again
    """
    while True:
        if not await publish_next(store, engine, data, gate, exact=exact):
            await asyncio.sleep(0.2)


async def publish_next(store: Store, engine: LocalEngine, data: Path, gate: GateConfig, *, exact: bool) -> bool:
    """Decide about the candidate, as `publish_loop` says. Returns whether there was one."""
    row = await store.read(learning.candidate)
    if row is None:
        return False
    if row.version == BASE.version:  # somebody went back to it; there is nothing to load or to examine
        engine.serve_version(row.version)
        await store.write(learning.promote, row.version, {})
        return True
    if row.served_at is None and row.parent_version != await store.read(learning.serving_version):
        await store.write(learning.give_back, row.version)
        log.warning("version %d was built on version %d, which no longer serves", row.version, row.parent_version)
        return True
    result = await examine(engine, row.version, data / row.artifact, gate, exact=exact)
    if result.passed:
        engine.serve_version(row.version)
        await store.write(learning.promote, row.version, {**result.measured, "why": result.why})
        log.info("version %d serves; %s", row.version, dict(result.measured))
    else:
        await store.write(learning.reject, row.version, result.why, result.measured)
        log.warning("version %d was rejected: %s", row.version, result.why)
    return True


async def serve_newest(store: Store, engine: LocalEngine, data: Path) -> int:
    """At start: load the version that served last, or, where it is damaged, the newest one before it that is whole.

    Raises:
        AdapterMismatch: it is whole, and the configuration asks for another shape. Nothing was changed.
    """
    while True:
        row = await store.read(_serving_row)
        if row.version == 0:
            return 0
        try:
            await engine.publish(PolicyRef(version=row.version), data / row.artifact)
        except AdapterMismatch:
            raise
        except AdapterError as error:
            fallback = await store.write(_fall_back, row.version, str(error))
            log.error("version %d cannot serve: %s Version %d serves instead.", row.version, error, fallback)
            continue
        engine.serve_version(row.version)
        return int(row.version)


def _serving_row(db: Connection) -> AnyRow:
    return learning.version_row(db, learning.serving_version(db))


def _fall_back(db: Connection, version: int, why: str) -> int:
    parent = int(learning.version_row(db, version).parent_version)
    learning.reject(db, version, why, {})
    learning.promote(db, parent, {})
    return parent
