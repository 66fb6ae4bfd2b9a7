"""The learn loop's pieces on a real store and the tiny model; the process itself is killed in tests/test_crash.py."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nextstate.config import Config
from nextstate.engines.adapters import WEIGHTS_FILE
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import load
from nextstate.learn import checkpoint, process
from nextstate.learn.gate import examine
from nextstate.learn.publish import serve_newest
from nextstate.learn.trainer import Trainer
from nextstate.recipes.personal import make_engine
from nextstate.store import forgetting, learning, status
from nextstate.store.store import Store, note
from nextstate.store.turns import Placement
from nextstate.types import SkipReason, TurnState, Vote
from tests.rows import judged_turn, new_turn


@pytest.fixture(params=["lora", "full"])
def kind(request: pytest.FixtureRequest) -> str:
    """What is trained: for the tests that name it, both; for the others, an adapter."""
    return str(request.param)


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path, tiny_model_path: Path) -> Config:
    kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else "lora"
    learn = {"rank": 4, "alpha": 8, "batch_turns": 2, "max_wait_s": 0.01, "weights": kind}
    learn["learning_rate"] = {"lora": 1e-2, "full": 1e-3}[kind]
    return Config(model=str(tiny_model_path), data=tmp_path, learn=learn)


@pytest.fixture
def trainer(config: Config) -> Trainer:
    return Trainer(load(config.model), config.learn)


def trained_version(store: Store, trainer: Trainer, config: Config) -> int:
    judged_turn(store)
    version = process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8))
    assert version is not None
    return version


def state_of(store: Store, turn_id: int) -> tuple[str, str | None]:
    row = store.read_now(status.show_turn, turn_id)
    return row.state, row.reason


def test_an_update_ends_as_a_candidate_with_its_turns_trained(
    store: Store, trainer: Trainer, config: Config, kind: str
):
    turn_id = judged_turn(store)
    version = process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8))
    assert version == 1
    assert state_of(store, turn_id) == (TurnState.TRAINED, None)
    row = store.read_now(learning.candidate)
    assert len(list((config.data / row.artifact).glob("*model.safetensors"))) == 1
    metrics = store.read_now(learning.list_versions)[1].metrics
    assert metrics["turns"] == 1
    assert metrics["divergence"] > 0


def test_a_lone_turn_is_trained_after_the_longest_wait(
    store: Store, trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch
):
    turn_id = judged_turn(store)
    alive = iter([1, 1, 0])
    monkeypatch.setattr(os, "getppid", lambda: next(alive))
    process.learn_loop(store, trainer, config, parent_pid=1)
    assert state_of(store, turn_id)[0] == TurnState.TRAINED


def test_a_killed_update_whose_version_is_on_disk_is_finished(
    store: Store, trainer: Trainer, config: Config, kind: str
):
    turn_id, far = judged_turn(store), judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    metrics = {"turns": 1, "off_policy": {str(far): 3.0}}
    checkpoint.save(trainer, config.versions_dir, 1, probe={}, metrics=metrics)
    process.recover(store, config)
    assert store.read_now(learning.running_updates) == []
    assert state_of(store, turn_id) == (TurnState.TRAINED, None)
    assert state_of(store, far) == (TurnState.LEFT_OUT, SkipReason.OFF_POLICY)
    assert store.read_now(learning.candidate).update_id == update_id


def test_a_killed_update_without_a_version_gives_its_turns_back(store: Store, config: Config):
    turn_id = judged_turn(store)
    store.write_now(learning.start_update, limit=8)
    half = config.versions_dir / "000001.part"
    half.mkdir(parents=True)
    process.recover(store, config)
    assert state_of(store, turn_id) == (TurnState.JUDGED, None)
    assert not half.exists()


def test_an_update_that_the_server_took_down_with_it_is_no_failure(store: Store, config: Config):
    turn_id = judged_turn(store)
    for _ in range(5):
        store.write_now(learning.start_update, limit=8)
        store.write_now(note, "server_started")
        process.recover(store, config)
    assert state_of(store, turn_id) == (TurnState.JUDGED, None)
    assert store.read_now(status.status).updates == {"interrupted": 5}


def test_an_update_in_which_the_trainer_alone_dies_three_times_is_given_up(store: Store, config: Config):
    turn_id = judged_turn(store)
    store.write_now(note, "server_started")
    for _ in range(3):
        assert state_of(store, turn_id) == (TurnState.JUDGED, None)
        store.write_now(learning.start_update, limit=8)
        process.recover(store, config)
    assert state_of(store, turn_id) == (TurnState.LEFT_OUT, SkipReason.UPDATE_FAILED)


def test_numbers_of_updates_that_came_to_nothing_do_not_make_turns_stale(
    store: Store, trainer: Trainer, config: Config
):
    turn_id = judged_turn(store)
    for _ in range(config.learn.lag_versions + 2):
        update_id = store.write_now(learning.start_update, limit=8)
        store.write_now(learning.abandon_update, update_id, "killed", state="interrupted")
    store.write_now(learning.promote, trained_version(store, trainer, config), {})
    late = judged_turn(store)  # answered by version 0, one publish ago
    process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8))
    assert [state_of(store, id)[0] for id in (turn_id, late)] == [TurnState.TRAINED, TurnState.TRAINED]


def test_turns_whose_update_fails_three_times_are_left_out_with_the_reason(
    store: Store, trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch
):
    def breaks(*_, **__):
        raise FloatingPointError("the loss became nan")

    monkeypatch.setattr(Trainer, "update", breaks)
    turn_id = judged_turn(store)
    for _ in range(3):
        assert state_of(store, turn_id) == (TurnState.JUDGED, None)
        process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8))
    assert state_of(store, turn_id) == (TurnState.LEFT_OUT, SkipReason.UPDATE_FAILED)
    assert store.read_now(status.status).updates == {"failed": 3}


def test_a_turn_too_long_for_memory_is_left_out_and_the_others_train(store: Store, trainer: Trainer, config: Config):
    long, short = judged_turn(store, reply_ids=tuple(range(60, 80))), judged_turn(store)
    small = config.model_copy(update={"learn": config.learn.model_copy(update={"max_turn_tokens": 10})})
    process.run_update(store, trainer, small, store.write_now(learning.start_update, limit=8))
    assert state_of(store, long) == (TurnState.LEFT_OUT, SkipReason.TOO_LONG)
    assert state_of(store, short) == (TurnState.TRAINED, None)


def test_an_update_whose_turns_are_all_off_policy_makes_no_version_and_they_say_why(
    store: Store, trainer: Trainer, config: Config
):
    turn_id = judged_turn(store, reply_logprobs=(-30.0, -30.0))
    update_id = store.write_now(learning.start_update, limit=8)
    assert process.run_update(store, trainer, config, update_id) is None
    assert state_of(store, turn_id) == (TurnState.LEFT_OUT, SkipReason.OFF_POLICY)
    assert store.read_now(status.status).updates == {"empty": 1}
    assert store.read_now(learning.candidate) is None


def test_a_turn_that_is_off_policy_is_left_out_and_the_others_train(store: Store, trainer: Trainer, config: Config):
    far, near = judged_turn(store, reply_logprobs=(-30.0, -30.0)), judged_turn(store)
    assert process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8)) == 1
    assert state_of(store, far) == (TurnState.LEFT_OUT, SkipReason.OFF_POLICY)
    assert state_of(store, near) == (TurnState.TRAINED, None)
    assert store.read_now(learning.list_versions)[1].metrics["turns_off_policy"] == 1


def test_the_loop_takes_no_more_of_one_session_than_its_share(
    store: Store, trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch
):
    share = config.learn.model_copy(update={"max_session_share": 0.25})  # of 4
    first = judged_turn(store)
    session = store.read_now(status.show_turn, first).session_id
    place = Placement(session_id=session, session_key=None, parent_turn_id=None, kind="branch", because="a test")
    second, other = judged_turn(store, new=new_turn(placement=place)), judged_turn(store)
    alive = iter([1, 1, 0])
    monkeypatch.setattr(os, "getppid", lambda: next(alive))
    process.learn_loop(store, trainer, config.model_copy(update={"learn": share}), parent_pid=1)
    trained = [state_of(store, id)[0] for id in (first, second, other)]
    assert trained == [TurnState.TRAINED, TurnState.JUDGED, TurnState.TRAINED]


def test_an_update_without_a_turn_that_fits_is_no_failure_and_the_next_one_does_not_wait(
    store: Store, trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch
):
    short = config.model_copy(update={"learn": config.learn.model_copy(update={"max_turn_tokens": 10})})
    judged_turn(store, reply_ids=tuple(range(60, 80)))
    judged_turn(store, reply_ids=tuple(range(60, 80)))
    alive = iter([1, 1, 0])
    monkeypatch.setattr(os, "getppid", lambda: next(alive))
    slept = []
    monkeypatch.setattr(process.time, "sleep", slept.append)
    process.learn_loop(store, trainer, short, parent_pid=1)
    assert store.read_now(status.status).updates == {"empty": 1}
    assert process._PAUSE_AFTER_FAILURE_S not in slept


def test_the_loop_takes_no_more_of_one_key_than_its_share_where_others_wait(
    store: Store, trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch
):
    share = config.learn.model_copy(update={"max_key_share": 0.25})  # of 4
    ids = [judged_turn(store, new=new_turn(user=user)) for user in ("mallory/1", "mallory/2", "ann")]
    alive = iter([1, 1, 0])
    monkeypatch.setattr(os, "getppid", lambda: next(alive))
    process.learn_loop(store, trainer, config.model_copy(update={"learn": share}), parent_pid=1)
    assert [state_of(store, id)[0] for id in ids] == [TurnState.TRAINED, TurnState.JUDGED, TurnState.TRAINED]


async def examined(config: Config, version: int):
    loaded = load(config.model)
    engine = make_engine(loaded, config)
    engine.start()
    try:
        folder = checkpoint.version_dir(config.versions_dir, version)
        return await examine(engine, version, folder, config.gate, exact=True)
    finally:
        engine.stop()


async def test_a_version_that_serves_what_was_trained_passes(store: Store, trainer: Trainer, config: Config, kind: str):
    result = await examined(config, trained_version(store, trainer, config))
    assert result.passed, result.why
    assert result.measured["probe_difference"] < 1e-4


async def test_a_version_whose_weights_are_not_those_that_were_trained_does_not_pass(
    store: Store, trainer: Trainer, config: Config, kind: str
):
    trained_version(store, trainer, config)
    other = trained_version(store, trainer, config)
    folders = [checkpoint.version_dir(config.versions_dir, v) for v in (other - 1, other)]
    [weights] = folders[0].glob("*model.safetensors")
    shutil.copy(weights, folders[1] / weights.name)
    result = await examined(config, other)
    assert not result.passed
    assert "served is not trained" in result.why


async def test_a_version_that_drifted_beyond_the_budget_does_not_pass(store: Store, trainer: Trainer, config: Config):
    strict = config.model_copy(update={"gate": config.gate.model_copy(update={"max_divergence": 1e-9})})
    result = await examined(strict, trained_version(store, trainer, config))
    assert not result.passed
    assert "drifted" in result.why


async def test_at_start_a_damaged_version_makes_way_for_the_one_before(
    store: Store, trainer: Trainer, config: Config, kind: str
):
    for _ in range(2):
        version = trained_version(store, trainer, config)
        store.write_now(learning.promote, version, {})
    [weights] = checkpoint.version_dir(config.versions_dir, 2).glob("*model.safetensors")
    weights.write_bytes(b"half")
    engine: LocalEngine = make_engine(load(config.model), config)
    assert await serve_newest(store, engine, config.data) == 1
    assert engine.version == 1
    assert store.read_now(learning.serving_version) == 1
    assert "cannot be read" in store.read_now(learning.version_row, 2).gate["why"]


def test_the_loop_removes_full_weights_that_nobody_can_go_back_to(
    store: Store, trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch, kind: str
):
    few = config.model_copy(update={"learn": config.learn.model_copy(update={"keep_versions": 1})})
    for _ in range(4):
        judged_turn(store)
        alive = iter([1, 1, 0])
        monkeypatch.setattr(os, "getppid", lambda alive=alive: next(alive))
        process.learn_loop(store, trainer, few, parent_pid=1)
        store.write_now(learning.promote, store.read_now(learning.candidate).version, {})
    folders = [checkpoint.version_dir(config.versions_dir, version) for version in (1, 2, 3, 4)]
    held = [len(list(folder.glob("*model.safetensors"))) for folder in folders]
    # When 4 was made, 3 served and 2 was the last before it.
    assert held == {"lora": [1, 1, 1, 1], "full": [0, 1, 1, 1]}[kind]
    assert all((folder / checkpoint.PROBE_FILE).exists() for folder in folders)


def test_an_update_is_measured_on_turns_kept_out_of_it_against_its_parent(
    store: Store, trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch
):
    eager = config.gate.model_copy(update={"hold_out_every": 2, "min_held_out": 2})
    config = config.model_copy(update={"gate": eager})
    probes = []
    for _ in range(2):
        for vote in (Vote.GOOD, Vote.BAD, Vote.GOOD, Vote.BAD):
            judged_turn(store, vote)
        alive = iter([1, 1, 1, 0])
        monkeypatch.setattr(os, "getppid", lambda alive=alive: next(alive))
        process.learn_loop(store, trainer, config, parent_pid=1)
        row = store.read_now(learning.candidate)
        probes.append(json.loads((config.data / row.artifact / checkpoint.PROBE_FILE).read_text()))
        store.write_now(learning.promote, row.version, {})
    first, second = probes
    assert len(first["held_out"]) == 2
    assert first["preference_shift"] is None  # the base was never measured
    assert len(second["held_out"]) == 4
    [(good, _), (bad, _)] = sorted(
        ((id, reward) for id, reward in held_rewards(store).items() if id in first["held_out"]), key=lambda one: -one[1]
    )
    moved = {id: second["held_out"][id] - first["held_out"][id] for id in (good, bad)}
    assert second["preference_shift"] == pytest.approx(moved[good] - moved[bad])
    assert second["perplexity_ratio"] > 0


def held_rewards(store: Store) -> dict[str, int]:
    found = store.read_now(learning.held_out_turns, limit=100, max_tokens=1000)
    return {str(turn.turn_id): reward for turn, reward in found}


def test_a_turn_that_is_forgotten_while_it_is_trained_leaves_nothing_on_disk(
    store: Store, trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch
):
    turn_id, other = judged_turn(store), judged_turn(store)
    measured = process.measure

    def forget_then_measure(*args: Any) -> dict[str, Any]:
        store.write_now(forgetting.forget, [turn_id])
        return measured(*args)

    monkeypatch.setattr(process, "measure", forget_then_measure)
    assert process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8)) is None
    assert list(config.versions_dir.iterdir()) == []
    assert state_of(store, turn_id) == (TurnState.LEFT_OUT, SkipReason.FORGOTTEN)
    assert state_of(store, other) == (TurnState.JUDGED, None)
    assert store.read_now(status.status).updates == {"stopped": 1}


def test_after_starting_over_the_other_turns_are_trained_again_on_the_clean_version(
    store: Store, trainer: Trainer, config: Config
):
    clean = trained_version(store, trainer, config)
    store.write_now(learning.promote, clean, {})
    before = (config.versions_dir / "000001" / WEIGHTS_FILE).read_bytes()
    forgotten, other = judged_turn(store, reply_ids=(70, 71, 72)), judged_turn(store)
    process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8))
    store.write_now(learning.promote, 2, {})
    store.write_now(forgetting.forget, [forgotten])
    store.write_now(forgetting.start_over)
    store.write_now(learning.promote, clean, {})
    process.load_version(store, trainer, config, store.read_now(learning.serving_version))
    again = process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8))
    assert again == 3
    row = store.read_now(status.show_version, 3)
    assert (row.row.parent_version, [turn.turn_id for turn in row.turns]) == (clean, [other])
    assert state_of(store, other) == (TurnState.TRAINED, None)
    assert store.read_now(forgetting.marked_versions) == (2,)
    # Other weights than those that the forgotten turn had a part in.
    weights = [load_file(config.versions_dir / name / WEIGHTS_FILE) for name in ("000002", "000003")]
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert (config.versions_dir / "000001" / WEIGHTS_FILE).read_bytes() == before
