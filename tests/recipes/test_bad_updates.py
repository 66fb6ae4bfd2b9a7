"""Bad updates, planted on the real server and the real trainer: the gate turns one down, the watch takes the other
back, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.config import GateConfig
from nextstate.store import learning, status
from nextstate.store.store import Store
from nextstate.types import SkipReason, VersionState
from tests.crash.judge_endpoint import JudgeEndpoint
from tests.crash.people import People, Seen
from tests.crash.served import Served, sharpen, talkative, until, write_config

CONTENT, DISCONTENT = "Good, thanks.", "Too short."
ENOUGH = 10
"""Characters that an answer must have. About half of the untrained model's answers that are not empty have them: so as
many verdicts are good when all are turned round, and what a version is compared with is no worse for being lies."""


@pytest.fixture
def model(tmp_path: Path, tiny_model_path: Path) -> Path:
    """A model that learns within one update. Its answers are of ten characters or so, and end by themselves."""
    folder = talkative(tiny_model_path, tmp_path / "tiny", ends=41)
    sharpen(folder, by=4)
    return folder


def wants_more(answer: Seen) -> bool:
    return len(answer.text) < ENOUGH


async def talk(people: People, who: int, heard: list[Seen] | None = None) -> None:
    """Ask, and say of each answer honestly whether it was long enough; for ever.

    Args:
        heard: the answers that it spoke about are added there.
    """
    n = 0
    while True:
        n += 1
        messages = [{"role": "user", "content": f"a fox? {who}.{n}"}]
        answer = await people.ask(messages)
        assert answer is not None
        if answer.finish == "stop" and answer.text.strip():  # of an empty one no judge is asked
            if heard is not None:
                heard.append(answer)
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


class Liar:
    """A judge that says the opposite of what it read, until it is told to be honest."""

    def __init__(self) -> None:
        self.lies = True

    def opinion(self, prompt: str) -> str:
        content = json.loads(prompt)["what_followed"][-1]["text"] == CONTENT
        return f"HINT: none\nVERDICT: {'good' if content != self.lies else 'bad'}"


def contented(heard: Sequence[Seen]) -> float:
    """Share of answers that are what people want."""
    return 1 - sum(map(wants_more, heard)) / len(heard)


@pytest.mark.slow
async def test_a_version_that_a_lying_judge_made_serves_and_is_taken_back_for_what_people_say(
    tmp_path: Path, model: Path
):
    liar = Liar()
    before: list[Seen] = []
    since: list[Seen] = []
    with JudgeEndpoint(liar.opinion) as judge:
        # One strong update on nothing but lies, well within what the gate lets pass.
        learn = {"objective": "binary", "batch_turns": 250, "max_wait_s": 3600, "steps": 8, "learning_rate": 1e-2}
        learn |= {"clip_low": 0.9, "clip_high": 4.0, "kl_weight": 0.0}
        config = write_config(tmp_path / "config.toml", model=model, judge_url=judge.url, learn=learn)
        served = Served(tmp_path / "data", "--config", str(config))
        await served.start()
        store, people = served.store, People(served, seed=0)
        try:
            async with going_on(*(talk(people, who, before) for who in range(4))):
                await until(lambda: store.read_now(learning.running_updates), "it learns the lies")
            await until(lambda: store.read_now(learning.serving_version) == 1, "the gate lets it serve")
            liar.lies = False
            # On the truth the next update would repair what the lies did; here the watch has to find it by itself.
            os.kill(served.trainer_pid, signal.SIGSTOP)
            async with going_on(*(talk(people, who, since) for who in range(4, 8))):
                await until(lambda: store.read_now(status.status).rolled_back, "the watch takes it back")
                served_bad = len(since)
                await until(lambda: len(since) >= served_bad + 50, "people go on")
            good, bad, good_again = contented(before), contented(since[:served_bad]), contented(since[served_bad:])
            print(
                f"content {good:.2f} before, {bad:.2f} with {served_bad} answers of version 1, {good_again:.2f} after"
            )
            assert bad < good - 0.25
            assert good_again > bad + 0.15
            assert {seen.version for seen in since[served_bad + 4 :]} == {0}  # four were under way
            check_whole(store, people)
            check_taken_back(store, served.data)
        finally:
            await served.stop()


def check_taken_back(store: Store, data: Path) -> None:
    """Version 1 serves no longer, by itself, and whoever looks is told so, and why."""
    found = store.read_now(status.status)
    row = store.read_now(learning.version_row, 1)
    print(row.gate["why"])
    assert found.version == 0
    assert found.rolled_back == (1,)
    assert row.gate["divergence"] <= GateConfig().max_divergence
    assert row.gate["watch"]["e_value"] >= 100
    trained = store.read_now(status.show_version, 1)
    assert found.left_out[SkipReason.VERSION_REJECTED] == trained.row.metrics["turns"] >= 250
    shown = CliRunner().invoke(app, ["versions", "show", "1", "--data", str(data), "--json"])
    version = json.loads(shown.output)
    assert version["state"] == VersionState.ROLLED_BACK
    told = {event["kind"]: event for event in version["history"]}
    assert set(told) == {"promoted", "watch_rolled_back", "rollback_asked"}
    assert "verdicts are good since version 1" in told["watch_rolled_back"]["why"]
