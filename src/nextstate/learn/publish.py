"""From candidate to the version that serves."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from sqlalchemy import Connection

from nextstate.config import GateConfig
from nextstate.engines.local import LocalEngine
from nextstate.errors import AdapterError, AdapterMismatch
from nextstate.learn.gate import examine
from nextstate.store import forgetting, learning
from nextstate.store.steering import paused_since
from nextstate.store.store import AnyRow, Store
from nextstate.types import BASE, PolicyRef

log = logging.getLogger(__name__)


async def publish_loop(store: Store, engine: LocalEngine, data: Path, gate: GateConfig, *, exact: bool) -> None:
    """Put each candidate through the gate and let it serve, or reject it.

    reads    policy_versions that are candidates
    writes   the same row: serving or rejected, with what the gate measured; of one whose parent was rolled back in the
             meantime, or that comes while learning is paused, the turns wait again
    waits    polls; versions come minutes apart
    crash    the candidate is still one, and is examined again
    """
    while True:
        await remove_dead(store, data)
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
        why = f"version {row.parent_version}, on which it was built, no longer serves"
        await store.write(learning.give_back, row.version, why)
        log.warning("version %d does not serve: %s", row.version, why, extra={"version": row.version})
        return True
    if row.served_at is None and await store.read(paused_since) is not None:
        # Given back and not kept waiting, for a candidate stands in the way of going back to an earlier version.
        await store.write(learning.give_back, row.version, "learning was paused before it could serve")
        log.info("version %d does not serve: learning is paused", row.version, extra={"version": row.version})
        return True
    result = await examine(engine, row.version, data / row.artifact, gate, exact=exact)
    if result.passed:
        engine.serve_version(row.version)
        await store.write(learning.promote, row.version, {**result.measured, "why": result.why})
        log.info("version %d serves; %s", row.version, dict(result.measured), extra={"version": row.version})
    else:
        await store.write(learning.reject, row.version, result.why, result.measured)
        log.warning("version %d was rejected: %s", row.version, result.why, extra={"version": row.version})
    return True


async def remove_dead(store: Store, data: Path) -> None:
    """Remove the weights of versions that were retired because turns they were trained on have been forgotten."""
    for row in await store.read(forgetting.dead_artifacts):
        await asyncio.to_thread(shutil.rmtree, data / row.artifact, ignore_errors=True)
        await store.write(forgetting.artifact_removed, row.version)
        log.info("the weights of version %d are removed: turns it was trained on were forgotten", row.version)


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
            fallback = await store.write(learning.fall_back, row.version, str(error))
            log.error("version %d cannot serve: %s Version %d serves instead.", row.version, error, fallback)
            continue
        engine.serve_version(row.version)
        return int(row.version)


def _serving_row(db: Connection) -> AnyRow:
    return learning.version_row(db, learning.serving_version(db))
