"""Learn from live conversations: the four loops, around one store, in the order in which they start.

serve and collect   one process, this one: HTTP, the engine's thread, the store
judge               a task of this process; it votes with the engine's base weights, or asks an endpoint
learn               a process of its own, kept running from here
publish and watch   tasks of this process: candidate, gate, the engine's next decoding step; verdicts, and back again
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from nextstate.config import Config, StoreConfig
from nextstate.engines.adapters import lora_config
from nextstate.engines.builtin import cache_dir
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import LoadedModel, load, resolve
from nextstate.judge.judge import EvidenceFirst
from nextstate.judge.loop import feedback_loop, judge_loop
from nextstate.judge.sampled import SampledJudge
from nextstate.judge.scored import ScoredJudge
from nextstate.learn.publish import publish_loop, serve_newest
from nextstate.learn.supervisor import keep_trainer_running
from nextstate.learn.watch import watch_loop
from nextstate.serve.app import create_app
from nextstate.serve.auth import check_bind, has_key
from nextstate.serve.run import bind, serve_http
from nextstate.store import forgetting, judging, turns
from nextstate.store.store import Store, bind_to_model, bind_to_weights, check_free, claim_folder, note

log = logging.getLogger(__name__)

_EXPIRED_AT_ONCE = 20
"""Sessions whose texts are removed in one transaction, which others wait for."""
_EXPIRE_EVERY_S, _EXPIRE_AGAIN_S = 600.0, 0.2


async def run(config: Config, say: Callable[[str], None]) -> None:
    """Serve and learn until cancelled.

    Everything that can be wrong with the configuration, the port, the folder or the model is found out first, in the
    order of how cheap it is to check.

    Raises:
        NextstateError: something of that is wrong; nothing has been changed.
    """
    check_bind(config.serve, stored_key=has_key(config.data, config.database_url))
    with bind(config.serve.host, config.serve.port) as listener:
        check_free(config.data, "server")
        resolve(config.model, say)
        say(f"loading {config.model}")
        loaded = load(config.model, dtype=config.engine.dtype, device=config.engine.device)
        # Only now, so that a model which cannot be had leaves no folder behind.
        with claim_folder(config.data, "server"):
            store = Store.open(config.database_url)
            try:
                await _run(config, loaded, store, listener, say)
            finally:
                store.close()


async def _run(
    config: Config, loaded: LoadedModel, store: Store, listener: socket.socket, say: Callable[[str], None]
) -> None:
    await store.write(bind_to_model, loaded.name, loaded.fingerprint)
    await store.write(bind_to_weights, config.learn.weights)
    engine = make_engine(loaded, config)
    version = await serve_newest(store, engine, config.data)
    interrupted = await store.write(turns.close_interrupted)
    await store.write(judging.release_claims)
    await store.write(note, "server_started", model=loaded.name, interrupted_turns=interrupted)
    engine.start()
    try:
        wake_judge = asyncio.Event()
        app = create_app(
            store=store,
            engine=engine,
            config=config,
            learning=config.learn.enabled,
            ready=lambda: (True, "ready") if engine.alive else (False, "the engine has stopped; see the log"),
            wake_judge=wake_judge.set,
        )
        loops: list[Coroutine[Any, Any, None]] = [serve_http(app, listener), end_idle_sessions(store, config)]
        if config.store.max_age_days is not None or config.store.max_gb is not None:
            loops.append(keep_going(store, "expire", lambda: expire_loop(store, config.store)))
        if config.learn.enabled:
            judge = make_judge(engine, loaded, config)
            exact = next(loaded.model.parameters()).dtype == torch.float32
            loops += [
                keep_going(store, "judge", lambda: judge_loop(store, judge, config.judge, wake_judge)),
                keep_going(
                    store, "publish", lambda: publish_loop(store, engine, config.data, config.gate, exact=exact)
                ),
                keep_trainer_running(store, config),
            ]
            voter = judge.inner
            if isinstance(voter, ScoredJudge):
                loops.append(keep_going(store, "feedback", lambda: feedback_loop(store, voter)))
            if config.watch.enabled:
                loops.append(keep_going(store, "watch", lambda: watch_loop(store, config.watch)))
        host, port = listener.getsockname()[:2]
        learning = "learning" if config.learn.enabled else "not learning"
        say(f"serving {loaded.name}, version {version}, on http://{host}:{port}/v1 ({learning})")
        await first_to_end(loops)
    finally:
        engine.stop()
        await store.write(note, "server_stopped")


async def first_to_end(loops: list[Coroutine[Any, Any, None]]) -> None:
    """Run loops side by side. When one returns (the HTTP server, on a signal) or raises, all end."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_going(store: Store, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a learning loop again whenever it fails: serving does not end with it.

    reads    nothing itself
    writes   an event for each failure
    waits    a second after each
    """
    while True:
        try:
            await loop()
        except Exception as error:  # an event with the reason is written, and the loop starts afresh from the store
            log.exception("the %s loop failed; it starts again, serving goes on", name)
            await store.write(note, "loop_failed", loop=name, error=repr(error))
        await asyncio.sleep(1.0)


def make_engine(loaded: LoadedModel, config: Config) -> LocalEngine:
    """The local engine with slots for the versions to come."""
    engine = LocalEngine(
        loaded,
        max_streams=config.engine.max_streams,
        prefix_cache_tokens=config.engine.prefix_cache_tokens,
        threads=config.engine.threads,
    )
    if config.learn.weights == "full":
        engine.prepare_full_weights()
    else:
        engine.prepare_adapters(lora_config(config.learn.rank, config.learn.alpha, config.learn.targets))
    return engine


def make_judge(engine: LocalEngine | None, loaded: LoadedModel | None, config: Config) -> EvidenceFirst:
    """Facts first, then votes: of an endpoint where one is configured, else of the local base weights.

    Args:
        engine: with its model; None where an endpoint is configured and no model was loaded.
    """
    if config.judge.base_url is not None or engine is None or loaded is None:
        key = config.judge.api_key
        inner: SampledJudge | ScoredJudge = SampledJudge(
            base_url=config.judge.base_url or "",
            model=config.judge.model,
            api_key=key.get_secret_value() if key is not None else "",
            votes=config.judge.votes,
            deadline_s=config.judge.deadline_s,
            max_concurrency=config.judge.concurrency,
        )
    else:
        inner = ScoredJudge(
            engine,
            loaded.tokenizer,
            model=loaded.name,
            heads=heads_dir(),
            learned=config.data / "judge-head.safetensors",
        )
    return EvidenceFirst(inner, data_results=config.judge.data_results)


def heads_dir() -> Path:
    """Where heads are kept that `nextstate judge fit` has made."""
    return cache_dir() / "judge-heads"


async def expire_loop(store: Store, limits: StoreConfig) -> None:
    """Keep conversations no longer, and no more of them, than the configuration says.

    reads    the sessions that have been quiet longest
    writes   tombstones in the place of their turns, and an event
    waits    ten minutes, unless there was much to do
    crash    what is left expires a little later
    """
    while True:
        expired = 0
        if limits.max_age_days is not None:
            since = time.time() - limits.max_age_days * 86_400
            expired += await store.write(forgetting.expire_old, quiet_since=since, limit=_EXPIRED_AT_ONCE)
        if limits.max_gb is not None and await store.read(forgetting.stored_bytes) > limits.max_gb * 1e9:
            expired += await store.write(forgetting.expire_old, quiet_since=time.time(), limit=_EXPIRED_AT_ONCE)
        await asyncio.sleep(_EXPIRE_AGAIN_S if expired else _EXPIRE_EVERY_S)


async def end_idle_sessions(store: Store, config: Config) -> None:
    """End sessions that have gone quiet, so that their last turns have a reason and nothing waits for ever.

    reads    sessions without a recent request
    writes   their end; their last turns are left out
    waits    a tenth of the idle time
    crash    they end a little later
    """
    while True:
        await store.write(turns.end_sessions, idle_before=time.time() - config.collect.idle_s)
        await asyncio.sleep(min(60.0, config.collect.idle_s / 10))
