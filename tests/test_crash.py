"""SIGKILL at fifty points: nothing that a client saw is lost, nothing is trained twice, and learning goes on as if
nothing had happened.

The real server and the real trainer on the tiny model, real clients, and a judge on an endpoint. A killed process
cannot clean up, so what these tests find in the store is what a power cut would leave, apart from the disk's own cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import Connection, select
from sqlalchemy import update as sql_update

from nextstate import config as configuration
from nextstate.config import Config
from nextstate.engines.adapters import CONFIG_FILE, WEIGHTS_FILE, lora_config, read_adapter
from nextstate.engines.model import load
from nextstate.learn.gate import PROBE_FILE, measure_probe
from nextstate.learn.trainer import Trainer
from nextstate.store import learning, schema, status, watching
from nextstate.store.store import AnyRow, Store
from nextstate.types import SkipReason, TurnState, VersionState
from tests.crash.judge_endpoint import JudgeEndpoint
from tests.crash.people import People
from tests.crash.served import ENVIRONMENT, Served, is_locked, spawn, talkative, until, write_config
from tests.crash.warm import Template

COLLECT = (
    *("before _open", "in _open", "after _open"),
    *("before _close", "in _close", "after _close"),
    *("before _add", "in _add", "after _add"),
    *("after _open ..",) * 3,
)
JUDGE = (
    *("in claim_unjudged", "after claim_unjudged"),
    *("before write_verdict", "in write_verdict", "after write_verdict"),
    *("after claim_unjudged ..",) * 5,
)
TRAIN = (
    *("before start_update", "in start_update", "after start_update"),
    *("after start_update ..",) * 9,
    *("before abandon_update", "in abandon_update"),
)
PUBLISH = (
    *("before fsync",) * 3,
    *("before rename", "after rename"),
    *("before finish_update", "in finish_update", "after finish_update"),
    *("read candidate", "read candidate ..", "read candidate ..", "before promote", "in promote", "after promote"),
)
PHASES = {"collect": COLLECT, "judge": JUDGE, "train": TRAIN, "publish": PUBLISH}
"""Fifty spots by phase, see tests/crash/spots.py; two dots: at a random moment after it. Turns are opened and closed,
and feedback is added, by `serve`. `fsync` is passed at random, so that any part of a version may be on disk."""

_WRITES_VERSIONS = tuple(spot for spot in PUBLISH if spot.endswith(("fsync", "rename", "finish_update")))
IN_TRAINER = frozenset(TRAIN + _WRITES_VERSIONS)

WAITING = (TurnState.GENERATING, TurnState.CONTINUED, TurnState.JUDGED, TurnState.TRAINING)
"""What is still under way. A finished turn that nothing has followed may wait for ever."""


@pytest.fixture
def judge() -> Iterator[JudgeEndpoint]:
    with JudgeEndpoint() as endpoint:
        yield endpoint


@pytest.fixture
def template() -> Iterator[Template]:
    made = Template(ENVIRONMENT)
    yield made
    made.close()


@pytest.fixture
async def served(
    tmp_path: Path, tiny_model_path: Path, judge: JudgeEndpoint, template: Template
) -> AsyncIterator[Served]:
    """Not started. Answers are of 25 tokens or so, and an update takes half a second."""
    model = talkative(tiny_model_path, tmp_path / "tiny", ends=16)
    # Stale turns would be left out, and here it is to be seen that nothing happens to those that are trained.
    learn = {"batch_turns": 4, "steps": 5, "learning_rate": 1e-3, "lag_versions": 100}
    config = write_config(tmp_path / "config.toml", model=model, judge_url=judge.url, learn=learn)
    server = Served(tmp_path / "data", "--config", str(config), template=template)
    yield server
    await server.stop()


@asynccontextmanager
async def talking(people: People, count: int = 4) -> AsyncIterator[None]:
    """People who talk while the block runs. One who fails fails the test."""
    tasks = [asyncio.create_task(people.talk(who)) for who in range(count)]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def the_seed() -> int:
    """Printed, so that a failure can be looked at again: NEXTSTATE_TEST_SEED=... gives the same moments."""
    seed = int(os.environ.get("NEXTSTATE_TEST_SEED") or random.randrange(10**6))
    print(f"NEXTSTATE_TEST_SEED={seed}")
    return seed


def update_seconds(store: Store) -> float:
    """How long an update takes here, from its start to the version on disk; a guess until one is done."""
    done = [row for row in store.read_now(learning.list_versions) if row.started_at]
    return min((row.finished_at - row.started_at for row in done[-5:]), default=1.0)


def under_way(store: Store) -> Counter[str]:
    """What a kill has left unfinished."""
    return Counter({name: 1 for name, query in UNDER_WAY.items() if store.read_now(query)})


UNDER_WAY: dict[str, Callable[[Connection], object]] = {
    "an answer": lambda db: status.list_turns(db, limit=1, state=TurnState.GENERATING),
    "a claim of the judge": lambda db: db.execute(
        select(schema.turns.c.turn_id).where(
            schema.turns.c.state == TurnState.CONTINUED, schema.turns.c.lease_until > time.time()
        )
    ).first(),
    "an update": learning.running_updates,
    "a candidate": learning.candidate,
}


def schedule(chance: random.Random) -> list[tuple[str, str]]:
    """(phase, spot) of all kills, in an order that no two lives share; no two of the trainer in a row.

    A trainer that dies again and again is started after longer and longer pauses, and none of its turns would last.
    """
    kills = [(phase, spot) for phase, spots in PHASES.items() for spot in spots]
    trainers = [kill for kill in kills if kill[1] in IN_TRAINER]
    order = [kill for kill in kills if kill[1] not in IN_TRAINER]
    chance.shuffle(trainers)
    chance.shuffle(order)
    for at in sorted(chance.sample(range(len(order) + 1), len(trainers)), reverse=True):
        order.insert(at, trainers.pop())
    return order


@pytest.mark.slow
async def test_fifty_kills_lose_nothing_and_change_nothing_that_is_learned(served: Served, tmp_path: Path):
    chance = random.Random(seed := the_seed())
    order = schedule(chance)
    assert len(order) == 50
    started = time.monotonic()
    await served.start()
    people = People(served, seed, think_s=1.0, thumbs=0.2)
    broken_off: Counter[str] = Counter()
    async with talking(people):
        for phase, spot in order:
            await kill(served, spot, chance)
            left = under_way(served.store)
            broken_off += left
            check_folders(served.data)
            print(f"{time.monotonic() - started:4.0f} s, {phase}: {spot} [{', '.join(left)}]")
            if spot not in IN_TRAINER:
                await served.start()
    print(f"by phase: {Counter(phase for phase, _ in order)}; broken off: {broken_off}")
    await settled_and_whole(served, people)
    await served.stop()
    copy = shutil.copytree(served.data, tmp_path / "again")
    check_losses(configuration.load(tmp_path / "config.toml", data=copy))


async def kill(served: Served, spot: str, chance: random.Random) -> None:
    """Let the process that reaches a spot die; a server takes its trainer along, or leaves it to find out by itself."""
    where = spot.removesuffix(" ..")
    longest = {"after _open": 0.2, "after claim_unjudged": 0.05, "read candidate": 0.1}
    longest["after start_update"] = 1.1 * update_seconds(served.store)
    delay_s = chance.uniform(0, longest[where]) if spot.endswith("..") else 0.0
    skip = chance.randrange(7) if where == "before fsync" else 0
    if "abandon_update" in spot:  # it dies while it clears up after the death before
        await served.die_at("trainer: after start_update")
    role = "trainer" if spot in IN_TRAINER else "server"
    await served.die_at(f"{role}: {where}", skip=skip, delay_s=delay_s, orphan=chance.random() < 0.2)


async def test_a_trainer_whose_server_was_killed_ends_by_itself(tmp_path: Path, tiny_model_path: Path):
    data = tmp_path / "data"
    options = Config(model=str(tiny_model_path), data=data).model_dump_json(
        include={"model", "data", "engine", "learn", "gate"}
    )
    # The shell stands for a server: the trainer is its child, and is told its process id.
    command = '"$0" -m nextstate.learn.process "$1" $$ & wait'
    parent = spawn(["sh", "-c", command, sys.executable, options])
    try:
        await until(lambda: is_locked(data / "trainer.lock"), "the trainer runs")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    await until(lambda: not is_locked(data / "trainer.lock"), "the orphan ends")


# -- what must hold afterwards ----------------------------------------------------------------------------------------


async def settled_and_whole(served: Served, people: People) -> None:
    """Stop, start once more, let everything come to rest, look at all of it; then learn once more."""
    assert await served.stop() == 0
    await served.start()
    await settle(served.store)
    found = served.store.read_now(status.status)
    print(f"{len(people.seen)} answers seen, {people.broken} broken off; {found}")
    assert len(people.seen) > 50
    check_answers(served.store, people)
    check_turns(served.store)
    check_versions(served.store, served.data)
    await learn_once_more(served, people)


async def settle(store: Store) -> None:
    def at_rest() -> bool:
        waiting = any(store.read_now(status.list_turns, limit=1, state=state) for state in WAITING)
        return (
            not waiting and not store.read_now(learning.running_updates) and store.read_now(learning.candidate) is None
        )

    await until(at_rest, "everything that waits is trained or left out", poll_s=0.1)


def check_answers(store: Store, people: People) -> None:
    """What a client saw is in the store, to the letter."""
    for seen in people.seen:
        row = store.read_now(status.show_turn, seen.turn_id)
        assert row is not None, f"turn {seen.turn_id} was seen and is gone"
        assert (row.answer, row.finish_reason) == (seen.text, seen.finish)
    assert len({seen.turn_id for seen in people.seen}) == len(people.seen)


def check_turns(store: Store) -> None:
    """Each turn is trained by one update that is done, or waits, or has a reason; updates count their turns right."""
    turns, updates = store.read_now(_all_turns_and_updates)
    found = store.read_now(status.status)
    assert found.accounted_for
    assert found.turns == len(turns)
    trained = Counter[int]()
    for turn in turns:
        if turn.state == TurnState.TRAINED:
            assert updates[turn.update_id].state == "done", f"turn {turn.turn_id}"
            assert turn.reason is None
            trained[turn.update_id] += 1
        elif turn.state == TurnState.LEFT_OUT:
            assert turn.detail, f"turn {turn.turn_id} was left out ({SkipReason(turn.reason)}) without a sentence"
            # The update has counted it, before its version was turned down.
            trained[turn.update_id] += turn.reason == SkipReason.VERSION_REJECTED
        else:
            assert turn.state == TurnState.FINISHED, f"turn {turn.turn_id} is {turn.state}"
    # A turn that was trained twice would have been counted by two updates, and belong to one.
    for update_id, update in updates.items():
        assert update.state in ("done", "failed", "interrupted", "empty")
        counted = update.metrics["turns"] if update.state == "done" else 0
        assert trained[update_id] == counted, f"update {update_id} counted {counted} turns and has {trained[update_id]}"


def _all_turns_and_updates(db: Connection) -> tuple[list[AnyRow], dict[int, AnyRow]]:
    updates = {row.update_id: row for row in db.execute(select(schema.updates))}
    return list(db.execute(select(schema.turns))), updates


def check_versions(store: Store, data: Path) -> None:
    """Each version that has a row has a folder that loads, each folder has a row, and nothing is half-written."""
    rows = {row.version: row for row in store.read_now(learning.list_versions) if row.version > 0}
    folders = {path.name: path for path in (data / "versions").iterdir()}
    assert set(folders) == {f"{version:06d}" for version in rows}
    newest = sorted(folders)[-3:]
    for version, row in rows.items():
        folder = data / row.artifact
        assert folder == folders[f"{version:06d}"]
        assert read_adapter(folder, lora_config(4, 8, "all-linear"))
        files = {path.name for path in folder.iterdir()} - {"optimizer.pt"}
        assert files == {WEIGHTS_FILE, CONFIG_FILE, PROBE_FILE, "trainer.json"}
        assert (folder / "optimizer.pt").exists() == (folder.name in newest)
    states = Counter(row.state for row in store.read_now(learning.list_versions))
    assert states[VersionState.SERVING] == 1
    assert states[VersionState.CANDIDATE] == 0


def check_folders(data: Path) -> None:
    """At any moment: a folder with a version's name is whole."""
    for folder in (data / "versions").glob("*"):
        if folder.suffix != ".part":
            files = {path.name for path in folder.iterdir()}
            assert files >= {WEIGHTS_FILE, CONFIG_FILE, PROBE_FILE, "trainer.json"}, (
                f"{folder} is half-written: {files}"
            )


def check_losses(config: Config) -> None:
    """Each update on the line that serves, whatever was killed around it, is the one that a single trainer makes which
    is never stopped: the same losses, counts and baselines, and the same log-probs of the probe, to the last digit."""
    store = Store.open(config.database_url)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.learn.threads)
    try:
        trainer = Trainer(load(config.model, dtype="float32", device="cpu"), config.learn)
        line = store.read_now(watching.serving_line)[-2::-1]
        for version in (one.version for one in line):
            row = store.read_now(learning.version_row, version)
            done = store.write_now(_begin_again, row.update_id)
            update = store.read_now(learning.load_update, row.update_id)
            oldest = store.read_now(learning.ancestor, update.parent_version, steps=config.learn.lag_versions)
            metrics = trainer.update(update.samples, oldest_version=oldest)
            for name in metrics.keys() - {"seconds"}:
                assert metrics[name] == done[name], f"version {version} was made with another {name}"
            folder = config.data / row.artifact
            assert measure_probe(trainer)["logprobs"] == json.loads((folder / PROBE_FILE).read_text())["logprobs"]
            assert trainer.baselines == json.loads((folder / "trainer.json").read_text())["baselines"]
        print(f"{len(line)} updates, done again without a stop, are the same to the last digit")
        assert len(line) >= 10
    finally:
        torch.set_num_threads(threads)
        store.close()


def _begin_again(db: Connection, update_id: int) -> dict[str, Any]:
    """Give a finished update its turns back, those that it found off policy included; what it had measured."""
    turns = schema.turns
    took_part = (turns.c.state == TurnState.TRAINED) | (turns.c.reason == SkipReason.OFF_POLICY)
    db.execute(sql_update(turns).where(turns.c.update_id == update_id, took_part).values(state=TurnState.TRAINING))
    metrics: dict[str, Any] = db.execute(
        select(schema.updates.c.metrics).where(schema.updates.c.update_id == update_id)
    ).scalar_one()
    return metrics


async def learn_once_more(served: Served, people: People) -> None:
    """A conversation leads to an update, and its version answers."""
    before = served.store.read_now(learning.serving_version)
    turn_id = 0
    for n in range(20):  # until an answer ends by itself: a truncated one is not learned from
        messages = [{"role": "user", "content": f"and afterwards? {n}"}]
        answer = await people.ask(messages)
        assert answer is not None
        if answer.finish == "stop":
            turn_id = answer.turn_id
            remark = {"role": "user", "content": "Shorter, please."}
            assert await people.ask([*messages, {"role": "assistant", "content": answer.text}, remark])
            break
    assert turn_id
    state = lambda: served.store.read_now(status.show_turn, turn_id).state  # noqa: E731
    await until(lambda: state() == TurnState.TRAINED, "the turn is trained")
    await until(lambda: served.store.read_now(learning.serving_version) > before, "its version serves")
    answer = await people.ask([{"role": "user", "content": "who answers?"}])
    assert answer is not None
    assert answer.version > before
