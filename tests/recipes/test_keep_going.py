from __future__ import annotations

import asyncio

from sqlalchemy import select

from nextstate.recipes import personal
from nextstate.store.schema import events
from nextstate.store.store import Store


async def test_a_learning_loop_that_fails_starts_again_and_says_why(store: Store, monkeypatch):
    runs: list[int] = []
    second = asyncio.Event()

    async def loop() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise OSError("the disk is full")
        second.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(personal.keep_going(store, "publish", loop))
    async with asyncio.timeout(10):
        await second.wait()
    task.cancel()
    (row,) = store.read_now(lambda db: db.execute(select(events)).all())
    assert (row.kind, row.data["loop"]) == ("loop_failed", "publish")
    assert "the disk is full" in row.data["error"]
