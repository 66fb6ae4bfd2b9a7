"""The trainer's process: `python -m nextstate.learn.process CONFIG_JSON PARENT_PID`, started by the server.

It owns nothing that matters but its place in the store, so it may be killed at any moment. Whatever it was doing is
finished or undone when it starts again, by one question: is the version's folder there?
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch

from nextstate import config as configuration
from nextstate import logs
from nextstate.config import Config
from nextstate.engines.model import LoadedModel, load
from nextstate.errors import AdapterError, NextstateError
from nextstate.learn import checkpoint
from nextstate.learn.batches import unfit
from nextstate.learn.gate import measure_held_out, measure_perplexity, measure_probe, preference_shift
from nextstate.learn.plan import SHORT_TURN, Shape, TrainingRefused, available, gb, make_plan
from nextstate.learn.stress import at_most, killed_in, settle
from nextstate.learn.supervisor import REFUSED_STATUS
from nextstate.learn.trainer import Trainer
from nextstate.store import learning, turns
from nextstate.store.steering import paused_since
from nextstate.store.store import Store, claim_folder, note

log = logging.getLogger(__name__)

POLL_S = 0.2
_NICENESS = 2
"""Serving comes first, but a trainer at 10 got a tenth of a busy machine, and an update took minutes."""
_PAUSE_AFTER_FAILURE_S = 5.0
"""A full disk fails every update, and is not emptied in a moment."""
_FAILURES_IN_A_ROW = 3
"""A turn that was in so many failed updates, with none that succeeded among them, is left out: it would stop all
learning."""


def learn_loop(store: Store, trainer: Trainer, config: Config, *, parent_pid: int) -> None:
    """Train an update whenever enough turns wait, or one has waited long enough.

    reads    judged turns, oldest first
    writes   updates, a version folder, and the version as a candidate for the publisher
    waits    polls; also while learning is paused, and for the publisher to decide about the candidate before
    crash    `recover` finishes or undoes the update at the next start
    """
    loaded_version = -1
    while os.getppid() == parent_pid:
        count, oldest = store.read_now(learning.waiting_samples)
        due = count >= config.learn.batch_turns or (
            oldest is not None and time.time() - oldest >= config.learn.max_wait_s
        )
        paused = store.read_now(paused_since) is not None
        if not due or paused or store.read_now(learning.candidate) is not None:
            time.sleep(POLL_S)
            continue
        if config.gate.hold_out_every and store.write_now(learning.hold_out, every=config.gate.hold_out_every):
            continue  # perhaps nothing is left to train
        serving = store.read_now(learning.serving_version)
        if serving != loaded_version:
            load_version(store, trainer, config, serving)
        # Until the update is a candidate, nobody knows what the weights in memory are.
        loaded_version = -1
        update_id = store.write_now(
            learning.start_update,
            limit=config.learn.max_update_turns,
            session_limit=config.learn.max_session_turns,
            key_limit=config.learn.max_key_turns,
        )
        version = run_update(store, trainer, config, update_id)
        if version is not None:
            loaded_version = version
            make_room(store, config)
        elif store.read_now(learning.update_row, update_id).state == "failed":
            time.sleep(_PAUSE_AFTER_FAILURE_S)


def load_version(store: Store, trainer: Trainer, config: Config, version: int) -> None:
    """Make the trainer's weights those of a version."""
    if version == 0:
        trainer.start_over()
    else:
        checkpoint.restore(trainer, checkpoint.version_dir(config.versions_dir, version))


def run_update(store: Store, trainer: Trainer, config: Config, update_id: int) -> int | None:
    """Train one update that `start_update` has taken. Returns the version it made, or None."""
    try:
        update = store.read_now(learning.load_update, update_id)
        oldest = store.read_now(learning.ancestor, update.parent_version, steps=config.learn.lag_versions)
        limit = min(config.learn.max_turn_tokens, trainer.loaded.context_tokens)
        samples = []
        for sample in update.samples:
            skip = unfit(sample, oldest_version=oldest, max_tokens=limit)
            if skip:
                store.write_now(turns.leave_out, [sample.turn.turn_id], *skip)
            else:
                samples.append(sample)
        if not samples:
            store.write_now(learning.abandon_update, update_id, "no turn of it could be trained", state="empty")
            return None
        metrics = trainer.update(samples, oldest_version=oldest)
        if len(metrics["off_policy"]) == len(samples):
            store.write_now(learning.leave_out_off_policy, metrics["off_policy"])
            store.write_now(learning.abandon_update, update_id, "no turn of it could be trained", state="empty")
            return None
        probe = measure(store, trainer, config, update.parent_version)
        metrics["divergence"] = probe["divergence"]
        folder = checkpoint.save(trainer, config.versions_dir, update.version, probe=probe, metrics=metrics)
        artifact = str(folder.relative_to(config.data))
        store.write_now(learning.finish_update, update_id, artifact=artifact, metrics=metrics)
    except learning.UpdateStopped as stopped:
        remove_stopped(store, config)
        log.info("%s", stopped)
        return None
    except Exception as error:  # a row with the reason is written, and serving does not notice
        log.exception("update %d failed", update_id, extra={"update_id": update_id})
        store.write_now(learning.abandon_update, update_id, f"{type(error).__name__}: {error}")
        give_up_repeated_failures(store)
        return None
    log.info("update %d made version %d from %d turns: %s", update_id, update.version, len(samples), metrics)
    return update.version


def make_room(store: Store, config: Config) -> None:
    """Remove full weights that nobody can go back to. An adapter takes megabytes, and stays."""
    if config.learn.weights == "full":
        for artifact in store.write_now(learning.retire_for_good, keep=config.learn.keep_versions):
            checkpoint.remove_weights(config.data / artifact)


def measure(store: Store, trainer: Trainer, config: Config, parent_version: int) -> dict[str, Any]:
    """What the gate is to know about the weights that an update has just made."""
    limit = min(config.learn.max_turn_tokens, trainer.loaded.context_tokens)
    held_out = store.read_now(learning.held_out_turns, limit=config.gate.max_held_out, max_tokens=limit)
    rewards = {str(turn.turn_id): reward for turn, reward in held_out}
    scores = measure_held_out(trainer, [turn for turn, _ in held_out])
    # The parent's were taken when it was made; of a turn held out since there is nothing to compare yet.
    before = checkpoint.held_out_scores(checkpoint.version_dir(config.versions_dir, parent_version))
    return {
        **measure_probe(trainer),
        "perplexity_ratio": measure_perplexity(trainer),
        "held_out": scores,
        "preference_shift": preference_shift(rewards, scores, before, fewest=config.gate.min_held_out),
    }


def recover(store: Store, config: Config) -> None:
    """Settle what a trainer that was killed left behind."""
    checkpoint.remove_leftovers(config.versions_dir)
    remove_stopped(store, config)
    for row in store.read_now(learning.running_updates):
        folder = checkpoint.version_dir(config.versions_dir, row.version)
        if folder.exists():
            metrics = json.loads((folder / "trainer.json").read_text())["metrics"]
            artifact = str(folder.relative_to(config.data))
            store.write_now(learning.finish_update, row.update_id, artifact=artifact, metrics=metrics)
        elif store.read_now(learning.server_started_since, row.started_at):
            why = "the server stopped in the middle of it"
            store.write_now(learning.abandon_update, row.update_id, why, state="interrupted")
        else:
            # The trainer alone ended: perhaps somebody killed it, perhaps the update takes more memory than there is.
            store.write_now(learning.abandon_update, row.update_id, "the trainer stopped in the middle of it")
            give_up_repeated_failures(store)


def remove_stopped(store: Store, config: Config) -> None:
    """Remove what an update had already written when it was found that a turn of it had been forgotten."""
    for version in store.read_now(learning.stopped_versions):
        shutil.rmtree(checkpoint.version_dir(config.versions_dir, version), ignore_errors=True)


def give_up_repeated_failures(store: Store) -> None:
    """Leave out the turns with which every update fails."""
    left = store.write_now(learning.give_up_failing, tries=_FAILURES_IN_A_ROW)
    if left:
        log.error(
            "%d turns were in each of %d updates that failed in a row, and are left out", left, _FAILURES_IN_A_ROW
        )


def main() -> None:
    options, parent_pid = json.loads(sys.argv[1]), int(sys.argv[2])
    config = configuration.Config.model_validate(options)
    logs.configure(config.log, process="trainer")
    os.nice(_NICENESS)
    torch.set_num_threads(config.learn.threads or max(1, (os.cpu_count() or 2) - config.engine.threads))
    try:
        lock = _claim(config.data, parent_pid)
        store = Store.open(config.database_url)
        recover(store, config)
        make_room(store, config)
        loaded = load(config.model, dtype=config.engine.dtype, device=config.engine.device)
        try:
            trainer, config = prepare(store, loaded, config)
        except TrainingRefused as error:
            store.write_now(note, "trainer_refused", why=str(error))
            log.error("%s", error)
            sys.exit(REFUSED_STATUS)
        store.write_now(note, "trainer_started", pid=os.getpid())
        learn_loop(store, trainer, config, parent_pid=parent_pid)
    except (NextstateError, AdapterError) as error:
        log.error("%s", error)
        sys.exit(1)
    lock.close()


def prepare(store: Store, loaded: LoadedModel, config: Config) -> tuple[Trainer, Config]:
    """A trainer that fits into memory, and the configuration with the lengths that do.

    Raises:
        TrainingRefused: there is none.
    """
    device = next(loaded.model.parameters()).device
    found = available(config.learn, device)
    learn = config.learn
    killed = store.read_now(killed_in)
    if killed is not None:
        # Once: whoever stopped other programs since is not to wait for ever.
        store.write_now(note, "stress_killed", tokens=killed)
        log.warning(
            "the system killed the trainer in a pass of %d tokens; longer ones than half of it are not tried", killed
        )
        learn = at_most(learn, max(2, killed // 2))
        if learn.max_turn_tokens < SHORT_TURN <= min(config.learn.max_turn_tokens, loaded.context_tokens):
            raise TrainingRefused(
                f"the system killed the trainer in a pass of {killed} tokens, though {gb(found.bytes)} seemed "
                f"available ({found.source}): nothing is learned, and serving goes on. Free memory, or set "
                "learn.memory_gb to what the trainer may take."
            )
    shape = Shape.of(loaded.model, learn, context=loaded.context_tokens)
    plan = make_plan(shape, learn, found, device=device.type)
    store.write_now(note, "memory_plan", **plan.as_json())
    log.info("%s", plan)
    if plan.refusal is not None:
        raise TrainingRefused(plan.refusal)
    for message in plan.messages:
        log.warning("%s", message)
    trainer = Trainer(loaded, plan.applied(learn))
    settled = settle(trainer, shape, plan, found, lambda kind, **data: store.write_now(note, kind, **data))
    if settled != plan:
        store.write_now(note, "memory_plan", **settled.as_json())
        for message in settled.messages:
            log.warning("%s", message)
    trainer.config = settled.applied(learn)
    return trainer, config.model_copy(update={"learn": trainer.config})


def _claim(data: Path, parent_pid: int) -> IO[str]:
    """The trainer's lock. One that outlived its server ends by itself within a moment: wait for it."""
    for _ in range(100):
        try:
            return claim_folder(data, "trainer")
        except NextstateError:
            if os.getppid() != parent_pid:
                raise
            time.sleep(POLL_S)
    return claim_folder(data, "trainer")


if __name__ == "__main__":
    main()
