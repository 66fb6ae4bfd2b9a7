"""The publisher while learning is paused and when turns were forgotten; the trainer's part in a pause, too."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from nextstate.config import Config, GateConfig
from nextstate.learn import process, publish
from nextstate.learn.gate import GateResult
from nextstate.store import forgetting, learning, status, steering
from nextstate.store.store import Store
from nextstate.types import TurnState, VersionState
from tests.rows import judged_turn


def a_candidate(store: Store) -> tuple[int, int]:
    """A turn, and the version that was trained on it."""
    turn_id = judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={})
    return turn_id, 1


def test_while_learning_is_paused_no_update_starts(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    judged_turn(store)
    store.write_now(steering.pause_learning)
    monkeypatch.setattr(process, "POLL_S", 0.0)
    alive = iter([1, 1, 1, 0])
    monkeypatch.setattr(os, "getppid", lambda: next(alive))
    config = Config(data=tmp_path, learn={"batch_turns": 1, "max_wait_s": 0.001})
    process.learn_loop(store, None, config, parent_pid=1)  # type: ignore[arg-type]  # a trainer would be asked to work
    found = store.read_now(status.status)
    assert (found.waiting["waits_for_update"], found.updates) == (1, {})


class FakeEngine:
    served: int | None = None

    def serve_version(self, version: int) -> None:
        self.served = version


async def publish_until(store: Store, done: Any, monkeypatch: pytest.MonkeyPatch, data: Path = Path()) -> FakeEngine:
    """The real publisher, with a gate that lets everything pass."""

    async def passes(*_: Any, **__: Any) -> GateResult:
        return GateResult(passed=True, why="passed", measured={})

    monkeypatch.setattr(publish, "examine", passes)
    engine = FakeEngine()
    loop = publish.publish_loop(store, engine, data, GateConfig(), exact=True)  # type: ignore[arg-type]
    task = asyncio.create_task(loop)
    try:
        async with asyncio.timeout(20):
            while not done():
                assert not task.done(), task.exception()
                await asyncio.sleep(0.02)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return engine


async def test_a_version_that_comes_while_learning_is_paused_does_not_serve_and_its_turns_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    turn_id, version = a_candidate(store)
    store.write_now(steering.pause_learning)
    engine = await publish_until(store, lambda: store.read_now(learning.candidate) is None, monkeypatch)
    row = store.read_now(learning.version_row, version)
    assert (row.state, row.gate) == (VersionState.REJECTED, {"why": "learning was paused before it could serve"})
    assert store.read_now(status.show_turn, turn_id).state == TurnState.JUDGED
    assert engine.served is None


async def test_going_back_works_while_learning_is_paused(store: Store, monkeypatch: pytest.MonkeyPatch):
    a_candidate(store)
    store.write_now(learning.promote, 1, {})
    store.write_now(steering.pause_learning)
    store.write_now(learning.roll_back, None)
    engine = await publish_until(store, lambda: store.read_now(learning.serving_version) == 0, monkeypatch)
    assert engine.served == 0


async def test_the_weights_of_a_version_go_when_another_serves_in_its_place(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    turn_id, _ = a_candidate(store)
    store.write_now(learning.promote, 1, {})
    folder = tmp_path / "versions" / "000001"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_text("weights")
    store.write_now(forgetting.forget, [turn_id])
    store.write_now(forgetting.start_over)
    assert store.read_now(forgetting.dead_artifacts) == []  # it serves still
    engine = await publish_until(
        store, lambda: store.read_now(learning.version_row, 1).artifact is None, monkeypatch, tmp_path
    )
    assert engine.served == 0
    assert not folder.exists()
