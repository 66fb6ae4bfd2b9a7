"""Loop 3: turns with a next state in, verdicts out. The one file here that touches the store."""

from __future__ import annotations

import asyncio
import logging

from nextstate.config import JudgeConfig
from nextstate.judge.breaker import Breaker
from nextstate.judge.errors import JudgeUnavailable
from nextstate.judge.evidence import evidence
from nextstate.judge.judge import Judge
from nextstate.judge.prompts import reply_of
from nextstate.judge.scored import ScoredJudge
from nextstate.store import judging
from nextstate.store.judging import JUDGE_IS_BACK, JUDGE_LEFT_ALONE
from nextstate.store.store import Store, note
from nextstate.types import TurnToJudge

log = logging.getLogger(__name__)

_POLL_S = 2.0
"""Longest wait without being woken; also when turns whose lease ran out are seen again."""

RETRY_S = 30.0
"""After which a turn that could not be judged is tried again, behind the others."""


async def judge_loop(store: Store, judge: Judge, config: JudgeConfig, wake: asyncio.Event) -> None:
    """Give each turn that has a next state or feedback a verdict.

    reads    continued turns, oldest first, under a lease
    writes   a verdict with its votes and hints; a sample where it is signed, the reason where it is not
    waits    until such a turn exists; serve wakes it when a session goes on. Where the judge is down, turns wait
             unclaimed until a trial shows that it is back
    crash    the lease runs out and the turns are claimed again
    """
    lease_s = 2 * config.deadline_s + 60
    breaker = Breaker()
    while True:
        if breaker.wait_s > 0:
            # A turn that comes meanwhile does not bring the judge back, so nothing wakes this.
            await asyncio.sleep(min(_POLL_S, breaker.wait_s))
            continue
        limit = breaker.may_try(config.concurrency)
        claimed = await store.write(judging.claim_unjudged, limit=limit, lease_s=lease_s)
        if claimed:
            await asyncio.gather(*(_judge_one(store, judge, config, breaker, turn) for turn in claimed))
            continue
        wake.clear()
        try:
            await asyncio.wait_for(wake.wait(), _POLL_S)
        except TimeoutError:
            continue


async def _judge_one(store: Store, judge: Judge, config: JudgeConfig, breaker: Breaker, turn: TurnToJudge) -> None:
    try:
        async with asyncio.timeout(config.deadline_s):
            verdict = await judge.verdict(turn)
    except (JudgeUnavailable, TimeoutError) as error:
        why = str(error) or f"The judge gave no verdict within {config.deadline_s:g} s; the turn waits."
        await _not_now(store, config, breaker, turn, why)
        return
    except Exception as error:  # a row with the reason is written; the other turns go on
        log.exception("judging turn %d failed", turn.turn_id, extra={"turn_id": turn.turn_id})
        why = f"{type(error).__name__}: {error}"
        await store.write(judging.judge_failed, turn.turn_id, why, max_attempts=config.max_attempts, retry_s=RETRY_S)
        return
    # Evidence decides without asking anybody, and so says nothing of whether the judge is back.
    if verdict.votes and breaker.succeeded():
        await store.write(note, JUDGE_IS_BACK, judge=verdict.judge)
    if not await store.write(judging.write_verdict, verdict, turn.lease_until):
        await store.write(note, "verdict_came_late", turn.turn_id, judge=verdict.judge)


async def _not_now(store: Store, config: JudgeConfig, breaker: Breaker, turn: TurnToJudge, why: str) -> None:
    """Let a turn wait whose judge is down or late. It costs the turn nothing but time."""
    # Behind the others for a while, so that the next trial is made with another turn: this one may be too much for it.
    await store.write(judging.judge_away, turn.turn_id, why, max_wait_s=config.max_wait_s, retry_s=RETRY_S)
    wait_s = breaker.failed()
    if wait_s is not None:
        log.warning("the judge is left alone for %.0f s: %s", wait_s, why)
        await store.write(note, JUDGE_LEFT_ALONE, why=why, for_s=wait_s)


FIRST_FEEDBACK = 8
"""Turns with explicit feedback after which the judge's head first learns from them; then for each quarter more."""

_MOST_FEEDBACK = 500
"""Newest turns with explicit feedback that the head learns from."""

_LOOK_S = 60.0


async def feedback_loop(store: Store, judge: ScoredJudge) -> None:
    """Let the head of the local judge learn from explicit feedback.

    reads    turns with explicit feedback behind which the user also said something
    writes   the head's file in the data folder, and an event
    waits    until there are enough that it has not learned from
    crash    the head is fitted again, from the same turns
    """
    while True:
        given = await store.read(judging.turns_with_feedback, newest=_MOST_FEEDBACK)
        rows = [(turn, value) for turn, value in given if reply_of(turn) and evidence(turn) is None]
        try:
            known = (await judge.head()).feedback
            if len(rows) >= max(FIRST_FEEDBACK, known + known // 4 + 1):
                await judge.learn([turn for turn, _ in rows], [value for _, value in rows])
                await store.write(note, "judge_learned", judge=judge.name, turns=len(rows))
        except JudgeUnavailable as error:
            log.warning("the judge's head could not learn from feedback now: %s", error)
        await asyncio.sleep(_LOOK_S)
