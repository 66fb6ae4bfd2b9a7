"""Bad updates, planted on the real server and the real trainer: what the gate turns down, and what the watch finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nextstate.store import judging, learning, status
from nextstate.store.store import Store
from nextstate.types import Feedback, SkipReason, TurnState, VersionState, Vote
from tests.crash.judge_endpoint import JudgeEndpoint
from tests.crash.people import People, Seen
from tests.crash.served import Served, talkative, until, write_config

CONTENT, DISCONTENT = "Good, thanks.", "Too short."
ENOUGH = 15
"""Characters that an answer must have: about two in three of the untrained model's have them."""


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


async def give_thumbs(store: Store, people: People) -> None:
    """Say honestly of each answer what it was worth; of the untrained model's only when they have been trained."""
    given: set[int] = set()
    while True:
        for seen in [one for one in people.seen if one.turn_id not in given]:
            row = store.read_now(status.show_turn, seen.turn_id)
            late = TurnState.TRAINED if seen.version == 0 else TurnState.JUDGED
            if row.state == late:
                thumb = Feedback(value=Vote.BAD if wants_more(seen) else Vote.GOOD)
                await store.write(judging.add_feedback, seen.turn_id, thumb)
                given.add(seen.turn_id)
        await asyncio.sleep(0.1)


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
async def test_a_learning_rate_a_hundred_times_too_high_never_serves(tmp_path: Path, tiny_model_path: Path):
    model = talkative(tiny_model_path, tmp_path / "tiny", ends=16)
    with JudgeEndpoint() as judge:
        # In tests/recipes/test_personal.py the same at 1e-3 serves.
        learn = {"batch_turns": 8, "max_wait_s": 0.5, "steps": 5, "learning_rate": 1e-1}
        # The tiny model's last layer is not trained, and makes all tokens about equally likely: it cannot get beyond 0.4.
        gate = {"max_divergence": 0.2, "max_perplexity_ratio": 100.0}
        config = write_config(tmp_path / "config.toml", model=model, judge_url=judge.url, learn=learn, gate=gate)
        served = Served(tmp_path / "data", "--config", str(config))
        await served.start()
        store, people = served.store, People(served, seed=0)
        try:
            async with going_on(*(talk(people, who) for who in range(2))):
                await until(
                    lambda: len(versions_in(store, VersionState.REJECTED)) >= 2, "the gate rejects two", deadline_s=120
                )
            assert store.read_now(learning.serving_version) == 0
            assert {seen.version for seen in people.seen} == {0}
            for row in versions_in(store, VersionState.REJECTED):
                assert "from the base" in row.gate["why"]
            assert store.read_now(status.status).left_out[SkipReason.VERSION_REJECTED] >= 2
            check_whole(store, people)
        finally:
            await served.stop()


@pytest.mark.slow
async def test_what_a_judge_that_lies_has_taught_is_taken_back_by_what_people_say(
    tmp_path: Path, tiny_model_path: Path
):
    def lie(prompt: str) -> str:
        return "It is the other way round.\nHINT: none\nVERDICT: " + ("good" if DISCONTENT in prompt else "bad")

    model = talkative(tiny_model_path, tmp_path / "tiny", ends=16)
    with JudgeEndpoint(lie) as judge:
        learn = {"batch_turns": 80, "max_wait_s": 600, "steps": 20, "learning_rate": 1e-2, "objective": "binary"}
        learn |= {"clip_low": 0.9, "clip_high": 9.0, "kl_weight": 0}  # nothing holds the lie back
        gate = {"max_divergence": 100.0, "max_perplexity_ratio": 100.0}  # it has to be found by what people say
        config = write_config(tmp_path / "config.toml", model=model, judge_url=judge.url, learn=learn, gate=gate)
        served = Served(tmp_path / "data", "--config", str(config))
        await served.start()
        store, people = served.store, People(served, seed=0)
        try:
            thumbs = give_thumbs(store, people)
            async with going_on(thumbs, *(talk(people, who) for who in range(4))):
                await until(lambda: versions_in(store, VersionState.ROLLED_BACK), "the watch goes back")
            taken_back = versions_in(store, VersionState.ROLLED_BACK)
            print([(row.version, row.gate["why"]) for row in taken_back])
            assert all(row.gate["watch"]["e_value"] >= 100 for row in taken_back)
            assert store.read_now(learning.serving_version) < taken_back[0].version
            later = await people.ask([{"role": "user", "content": "a dog?"}])
            assert later is not None
            assert later.version < taken_back[0].version
            check_whole(store, people)
        finally:
            await served.stop()
