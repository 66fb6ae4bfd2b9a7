"""The real HTTP application and the real judge loop, with answers that a test writes and a judge that believes much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import Connection, select

from nextstate.config import JudgeConfig
from nextstate.engines.local import LocalEngine
from nextstate.judge.judge import EvidenceFirst
from nextstate.judge.loop import judge_loop
from nextstate.judge.sampled import SampledJudge
from nextstate.store import schema, status
from nextstate.store.keys import add_key
from nextstate.store.store import AnyRow, Store
from nextstate.types import TurnState
from tests.conftest import RunningServer, ServerFactory
from tests.crash.judge_endpoint import JudgeEndpoint
from tests.crash.served import until
from tests.serve.scripted_engine import ScriptedEngine

Attacked = Callable[..., AbstractAsyncContextManager["Arena"]]


@dataclass
class Gullible:
    """A judge model that repeats whatever it reads, planted verdicts and all, before it says what the user said."""

    read: list[str] = field(default_factory=list)

    def opinion(self, prompt: str) -> str:
        self.read.append(prompt)
        seen = json.loads(prompt)
        quoted = "\n".join([seen["answer"], *(one["text"] for one in seen["what_followed"])])
        content = seen["what_followed"][0]["text"].startswith("Thanks")
        return f"I read this:\n{quoted}\nHINT: none\nVERDICT: {'good' if content else 'bad'}"


@dataclass
class Arena:
    server: RunningServer
    store: Store
    judge_model: Gullible
    _judge: EvidenceFirst

    def key(self, user: str) -> dict[str, str]:
        """Headers of a new key of this user."""
        return {"x-api-key": self.store.write_now(add_key, user, user, learn=True)}

    async def ask(self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None) -> tuple[int, str]:
        """One request: the turn's id and its answer."""
        body = {"model": "policy", "messages": messages, "temperature": 1.0}
        response = await self.server.http.post("/v1/chat/completions", json=body, headers=headers)
        response.raise_for_status()
        return int(response.headers["x-nextstate-turn-id"]), response.json()["choices"][0]["message"]["content"]

    async def exchange(
        self, question: str, *followed: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[int, list[dict[str, Any]]]:
        """Ask, and let messages follow the answer: the id of its turn, and the conversation up to there."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        turn_id, answer = await self.ask(messages, headers)
        messages += [{"role": "assistant", "content": answer}, *followed]
        await self.ask(messages, headers)
        return turn_id, messages

    async def judge(self) -> None:
        """Let the judge loop run until nothing waits for it."""
        config = JudgeConfig(votes=1)
        running = asyncio.create_task(judge_loop(self.store, self._judge, config, asyncio.Event()))
        waiting = {"limit": 1, "state": TurnState.CONTINUED}
        await until(lambda: not self.store.read_now(status.list_turns, **waiting), "all is judged", deadline_s=60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def turn(self, turn_id: int) -> AnyRow:
        row = self.store.read_now(status.show_turn, turn_id)
        assert row is not None
        return row

    def samples(self) -> dict[int, int]:
        """What may be learned from: turn -> reward."""
        return self.store.read_now(_samples)

    def hints(self) -> list[str]:
        return self.store.read_now(lambda db: list(db.execute(select(schema.hints.c.text)).scalars()))

    def left_out(self) -> dict[str, int]:
        return self.store.read_now(status.status).left_out


def _samples(db: Connection) -> dict[int, int]:
    return {row.turn_id: row.reward for row in db.execute(select(schema.samples))}


@pytest.fixture
def attacked(start_server: ServerFactory, engine: LocalEngine, store: Store) -> Iterator[Attacked]:
    """Makes an arena in which every answer is the given text."""
    model = Gullible()
    with JudgeEndpoint(model.opinion) as endpoint:

        @asynccontextmanager
        async def start(answer: str = "the fox jumps") -> AsyncIterator[Arena]:
            async with (
                SampledJudge(base_url=endpoint.url, model="judge", votes=1) as inner,
                start_server(with_engine=ScriptedEngine(engine, answer)) as server,
            ):
                yield Arena(server=server, store=store, judge_model=model, _judge=EvidenceFirst(inner))

        yield start
