"""A bad update, planted on the real server and the real trainer: the gate turns it down, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nextstate.store import learning, status
from nextstate.store.store import Store
from nextstate.types import SkipReason, VersionState
from tests.crash.judge_endpoint import JudgeEndpoint
from tests.crash.people import People, Seen
from tests.crash.served import Served, sharpen, talkative, until, write_config

CONTENT, DISCONTENT = "Good, thanks.", "Too short."
ENOUGH = 6
"""Characters that an answer must have: more than half of the untrained model's answers have them."""


@pytest.fixture
def model(tmp_path: Path, tiny_model_path: Path) -> Path:
    """A model that learns within one update. Its answers are of ten characters or so, and end by themselves."""
    folder = talkative(tiny_model_path, tmp_path / "tiny", ends=41)
    sharpen(folder, by=4)
    return folder


def wants_more(answer: Seen) -> bool:
    return len(answer.text) < ENOUGH


async def talk(people: People, who: int) -> None:
    """Ask, and say of each answer honestly whether it was long enough; for ever."""
    n = 0
    while True:
        n += 1
        messages = [{"role": "user", "content": f"a fox? {who}.{n}"}]
        answer = await people.ask(messages)
        assert answer is not None
        if answer.finish == "stop":
            remark = DISCONTENT if wants_more(answer) else CONTENT
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": remark}]
            assert await people.ask(messages, max_tokens=1)


@asynccontextmanager
async def going_on(*work: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_whole(store: Store, people: People) -> None:
    """Every answer is stored as it was seen, and every turn is accounted for."""
    assert people.broken == 0
    for seen in people.seen:
        assert store.read_now(status.show_turn, seen.turn_id).answer == seen.text
    assert store.read_now(status.status).accounted_for


def versions_in(store: Store, state: VersionState) -> list[Any]:
    return [row for row in store.read_now(learning.list_versions) if row.state == state]


@pytest.mark.slow
async def test_a_learning_rate_a_hundred_times_too_high_never_serves(tmp_path: Path, model: Path):
    with JudgeEndpoint() as judge:
        # The same at 1e-3 has moved 0.02 nats from the base after one update; this has moved 3, and 1 is allowed.
        learn = {"batch_turns": 8, "max_wait_s": 0.5, "steps": 5, "learning_rate": 1e-1}
        config = write_config(tmp_path / "config.toml", model=model, judge_url=judge.url, learn=learn)
        served = Served(tmp_path / "data", "--config", str(config))
        await served.start()
        store, people = served.store, People(served, seed=0)
        try:
            async with going_on(*(talk(people, who) for who in range(2))):
                await until(lambda: len(versions_in(store, VersionState.REJECTED)) >= 2, "the gate rejects two")
            assert store.read_now(learning.serving_version) == 0
            assert {seen.version for seen in people.seen} == {0}
            for row in versions_in(store, VersionState.REJECTED):
                assert "gate.max_" in row.gate["why"]
            assert store.read_now(status.status).left_out[SkipReason.VERSION_REJECTED] >= 2
            check_whole(store, people)
        finally:
            await served.stop()
