"""The judge's loop, with a real store, and a real endpoint that dies and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from sqlalchemy import select

from nextstate.config import JudgeConfig
from nextstate.judge import loop
from nextstate.judge.breaker import Breaker
from nextstate.judge.judge import EvidenceFirst
from nextstate.judge.sampled import SampledJudge
from nextstate.store import judging, status
from nextstate.store.schema import events, turns
from nextstate.store.store import Store
from nextstate.types import Feedback, SkipReason, Vote
from tests.rows import continued_turn, judged_turn

CONTENT = '{"choices": [{"message": {"content": "HINT: none\\nVERDICT: good"}}]}'


class Endpoint:
    """An OpenAI-compatible judge on loopback that can be switched off and on, on one port."""

    def __init__(self) -> None:
        self.asked = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def up(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        self.asked += 1
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(CONTENT)}\r\n"
            f"Connection: close\r\n\r\n{CONTENT}".encode()
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def judging_goes_on(store: Store, url: str) -> AsyncIterator[None]:
    config = JudgeConfig(deadline_s=5, concurrency=4)
    async with SampledJudge(base_url=url, model="big", votes=1) as sampled:
        task = asyncio.create_task(loop.judge_loop(store, EvidenceFirst(sampled), config, asyncio.Event()))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not so():
            await asyncio.sleep(0.02)


def happened(store: Store, kind: str) -> int:
    return len(store.read_now(lambda db: db.execute(select(events.c.event_id).where(events.c.kind == kind)).all()))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breaker whose waits a test can sit through, and turns that are tried again at once."""
    monkeypatch.setattr(loop, "Breaker", lambda: Breaker(first_wait_s=0.1, longest_wait_s=0.3))
    monkeypatch.setattr(loop, "RETRY_S", 0.05)


@pytest.mark.usefixtures("quick")
async def test_a_judge_that_dies_costs_no_turn_and_is_asked_again_when_it_is_back(store: Store):
    endpoint = Endpoint()
    await endpoint.up()
    waiting = [continued_turn(store, said="and what about Rome?")]
    async with judging_goes_on(store, endpoint.url):
        await until(lambda: store.read_now(status.status).verdicts.get("good") == 1)
        await endpoint.down()
        waiting += [continued_turn(store, said=f"and what about {city}?") for city in ("Oslo", "Bern", "Riga", "Kiel")]
        await until(lambda: store.read_now(status.status).judge_left_alone_since is not None)
        await until(lambda: happened(store, judging.JUDGE_LEFT_ALONE) >= 3)  # trials go on, and fail
        now = store.read_now(status.status)
        assert now.left_out == {}
        assert now.waiting["waits_for_judge"] == 4
        used = store.read_now(lambda db: db.execute(select(turns.c.judge_attempts)).scalars().all())
        assert set(used) == {0}
        await endpoint.up()
        await until(lambda: store.read_now(status.status).verdicts.get("good") == 5)
    after = store.read_now(status.status)
    assert after.judge_left_alone_since is None
    assert after.waiting.get("waits_for_judge", 0) == 0
    assert happened(store, judging.JUDGE_IS_BACK) == 1
    assert after.accounted_for


def test_a_turn_whose_judge_stays_away_too_long_is_left_out_with_the_reason(store: Store):
    turn_id = continued_turn(store)
    for wait_s in (3600.0, 3600.0):
        store.write_now(judging.judge_away, turn_id, "no answer", max_wait_s=wait_s, retry_s=0)
        assert store.read_now(status.show_turn, turn_id).reason is None
    assert happened(store, "judge_away") == 1
    store.write_now(judging.judge_away, turn_id, "no answer", max_wait_s=0.0, retry_s=0)
    row = store.read_now(status.show_turn, turn_id)
    assert row.reason == SkipReason.JUDGE_GAVE_UP
    assert "no answer" in row.detail


def test_the_judge_is_compared_with_feedback_that_came_after_its_verdict(store: Store):
    for verdict, said in ((Vote.BAD, Vote.BAD), (Vote.BAD, Vote.GOOD), (Vote.GOOD, Vote.NEUTRAL), (None, Vote.BAD)):
        turn_id = judged_turn(store, verdict)
        store.write_now(judging.add_feedback, turn_id, Feedback(value=said))
    judged_turn(store, Vote.GOOD)  # nobody said anything about this one
    assert store.read_now(status.status).judge_against_feedback == {
        "right": 1, "wrong": 2, "opposite": 1, "abstained": 1,
    }  # fmt: skip
    found = store.read_now(judging.turns_with_feedback, newest=3)
    assert [value for _, value in found] == [Vote.GOOD, Vote.NEUTRAL, Vote.BAD]
    assert found[0][0].feedback is None  # the head must not be told what it is to learn
