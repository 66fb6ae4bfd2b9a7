"""Loop 3: turns with a next state in, verdicts out. The one file here that touches the store."""

from __future__ import annotations

import asyncio
import logging

from nextstate.config import JudgeConfig
from nextstate.judge.errors import JudgeUnavailable
from nextstate.judge.judge import Judge
from nextstate.store import judging
from nextstate.store.store import Store, note
from nextstate.types import TurnToJudge

log = logging.getLogger(__name__)

_POLL_S = 2.0
"""Longest wait without being woken; also when turns whose lease ran out are seen again."""


async def judge_loop(store: Store, judge: Judge, config: JudgeConfig, wake: asyncio.Event) -> None:
    """Give each turn that has a next state or feedback a verdict.

    reads    continued turns, oldest first, under a lease
    writes   a verdict with its votes and hints; a sample where it is signed, the reason where it is not
    waits    until such a turn exists; serve wakes it when a session goes on
    crash    the lease runs out and the turns are claimed again
    """
    lease_s = 2 * config.deadline_s + 60
    while True:
        claimed = await store.write(judging.claim_unjudged, limit=config.concurrency, lease_s=lease_s)
        if claimed:
            await asyncio.gather(*(_judge_one(store, judge, config, turn) for turn in claimed))
            continue
        wake.clear()
        try:
            await asyncio.wait_for(wake.wait(), _POLL_S)
        except TimeoutError:
            continue


async def _judge_one(store: Store, judge: Judge, config: JudgeConfig, turn: TurnToJudge) -> None:
    try:
        async with asyncio.timeout(config.deadline_s):
            verdict = await judge.verdict(turn)
    except (JudgeUnavailable, TimeoutError) as error:
        why = str(error) or f"no verdict within {config.deadline_s:.0f} s"
        await _failed(store, config, turn, why)
    except Exception as error:  # a row with the reason is written; the other turns go on
        log.exception("judging turn %d failed", turn.turn_id, extra={"turn_id": turn.turn_id})
        await _failed(store, config, turn, f"{type(error).__name__}: {error}")
    else:
        if not await store.write(judging.write_verdict, verdict, turn.lease_until):
            await store.write(note, "verdict_came_late", turn.turn_id, judge=verdict.judge)


async def _failed(store: Store, config: JudgeConfig, turn: TurnToJudge, why: str) -> None:
    retry_s = min(60.0, config.deadline_s)
    await store.write(judging.judge_failed, turn.turn_id, why, max_attempts=config.max_attempts, retry_s=retry_s)
