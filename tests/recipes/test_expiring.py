from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from nextstate.config import StoreConfig
from nextstate.recipes import personal
from nextstate.store import schema, status
from nextstate.store.store import Store
from tests.rows import finished_turn


async def expire_until(store: Store, limits: StoreConfig, left: int) -> None:
    task = asyncio.create_task(personal.expire_loop(store, limits))
    try:
        async with asyncio.timeout(20):
            while store.read_now(status.status).sessions != left:
                assert not task.done(), task.exception()
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert store.read_now(status.status).sessions == left


@pytest.fixture
def quiet(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Five sessions of a turn, the first quiet for five days, the last for one."""
    monkeypatch.setattr(personal, "_EXPIRED_AT_ONCE", 1)
    monkeypatch.setattr(personal, "_EXPIRE_AGAIN_S", 0.01)
    for days in (5, 4, 3, 2, 1):
        finished_turn(store)
        values: dict[str, Any] = {"last_at": time.time() - 86_400 * days}
        newest = schema.sessions.c.session_id == 6 - days
        store.write_now(lambda db, of=newest, to=values: db.execute(schema.sessions.update().where(of).values(to)))
    return store


async def test_what_is_older_than_its_limit_goes(quiet: Store):
    await expire_until(quiet, StoreConfig(max_age_days=2.5), left=2)


async def test_what_is_too_much_goes_the_oldest_first(quiet: Store):
    sizes = iter([3e9, 2e9, 0.5e9])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextstate.store.forgetting.stored_bytes", lambda _: next(sizes, 0))
        await expire_until(quiet, StoreConfig(max_gb=1), left=3)
    rows = quiet.read_now(lambda db: db.execute(schema.sessions.select()).all())
    assert [row.session_id for row in rows if row.user == "local"] == [3, 4, 5]
