import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from nextstate.people.drive import TurnLog, ask, question_seed, talk
from nextstate.people.questions import Question
from nextstate.people.simulated import Habits, SimulatedUser

LONG = "So many words about coal. " * 8
GOOD = "Coal is black."


@dataclass
class Scripted:
    """A server that answers from a script, word by word, and remembers what it was asked."""

    replies: list[str]
    finish_reason: str = "stop"
    names_turns: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> StreamingResponse:
            turn = len(self.bodies)
            self.bodies.append(await request.json())
            self.headers.append(dict(request.headers))
            names = {"x-nextstate-turn-id": f"turn-{turn}", "x-nextstate-policy-version": str(turn + 3)}
            return StreamingResponse(
                self.events(self.replies[turn % len(self.replies)]),
                media_type="text/event-stream",
                headers=names if self.names_turns else {},
            )

        return app

    async def events(self, reply: str) -> AsyncIterator[str]:
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        deltas: list[dict[str, str]] = [{"role": "assistant"}, *({"content": word + " "} for word in reply.split())]
        for delta in deltas:
            await asyncio.sleep(0.002)
            yield event({"index": 0, "delta": delta, "finish_reason": None})
        self.open_now -= 1
        yield event({"index": 0, "delta": {}, "finish_reason": self.finish_reason})
        yield "data: [DONE]\n\n"


def event(choice: dict[str, Any]) -> str:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "policy", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n"


@contextlib.asynccontextmanager
async def serving(script: Scripted) -> AsyncIterator[openai.AsyncOpenAI]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(script.app(), log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client
    server.should_exit = True
    await task


def a_user(**habits: Any) -> SimulatedUser:
    coal = Question(text="What color is coal?", topic="colors", subject="coal")
    return SimulatedUser([coal], seed=1, habits=Habits(session_replies=(1.0, 0.0, 0.0), **habits))


ALWAYS_COMPLAINS = {"complain": 1.0, "ask_on_after_miss": 0.0, "off_topic": 0.0, "complain_and_repeat": 1.0}


async def test_a_session_is_one_growing_conversation():
    script = Scripted([LONG, GOOD])
    async with serving(script) as client:
        log = await talk(
            client, a_user(**ALWAYS_COMPLAINS, complain_and_ask_on=0.0), model="policy", max_tokens=50, temperature=0.7
        )
    first, second = (body["messages"] for body in script.bodies)
    assert first == [{"role": "user", "content": "What color is coal?"}]
    assert second == [
        *first,
        {"role": "assistant", "content": log.turns[0].answer.reply},
        {"role": "user", "content": log.turns[0].reaction},
    ]
    assert [(turn.index, turn.met) for turn in log.turns] == [(0, False), (1, True)]
    assert log.turns[1].answer.question == log.turns[0].reaction
    assert log.turns[1].reaction is None


async def test_a_turn_carries_what_the_server_says_about_it():
    async with serving(Scripted([GOOD])) as client:
        log = await talk(
            client, a_user(praise=0.0, ask_on_after_hit=0.0), model="policy", max_tokens=50, temperature=0.7
        )
    answer = log.turns[0].answer
    assert (answer.reply.strip(), answer.finish_reason) == (GOOD, "stop")
    assert (answer.turn_id, answer.policy_version) == ("turn-0", 3)
    assert answer.first_token_s is not None
    assert answer.first_token_s > 0
    assert len(answer.gaps_s) == 2  # "Coal is black." comes in three pieces, with two gaps


async def test_an_unknown_server_that_names_no_turn_is_no_error():
    async with serving(Scripted([""], names_turns=False)) as client:
        [answer] = await ask(client, ["Why?"], model="policy", max_tokens=5, temperature=0.7)
    assert (answer.turn_id, answer.policy_version) == (None, None)
    assert (answer.reply, answer.first_token_s, answer.gaps_s) == ("", None, ())


async def test_turns_are_heard_of_as_they_end():
    heard: list[TurnLog] = []
    async with serving(Scripted([LONG])) as client:
        log = await talk(
            client,
            a_user(**ALWAYS_COMPLAINS, complain_and_ask_on=0.0),
            model="policy",
            max_tokens=50,
            temperature=0.7,
            on_turn=heard.append,
        )
    assert tuple(heard) == log.turns


async def test_a_session_sends_what_a_stock_client_sends():
    script = Scripted([GOOD])
    async with serving(script) as client:
        await talk(client, a_user(), model="policy", max_tokens=50, temperature=0.7)
    assert set(script.bodies[0]) == {"model", "messages", "max_tokens", "temperature", "stream"}
    assert not [name for name in script.headers[0] if "nextstate" in name or "session" in name]


async def test_answers_come_in_the_order_of_the_questions_with_a_seed_for_each():
    script = Scripted([GOOD], finish_reason="length")
    async with serving(script) as client:
        answers = await ask(
            client, ["a?", "b?", "c?"], model="policy", max_tokens=5, temperature=0.7, seed=9, concurrency=2
        )
    assert [answer.question for answer in answers] == ["a?", "b?", "c?"]
    assert {answer.finish_reason for answer in answers} == {"length"}
    seeds = {body["messages"][0]["content"]: body["seed"] for body in script.bodies}
    assert seeds == {question: question_seed(question, 9) for question in ("a?", "b?", "c?")}
    assert len(set(seeds.values())) == 3


async def test_no_more_questions_are_under_way_than_allowed():
    script = Scripted([LONG])
    async with serving(script) as client:
        await ask(client, [f"{i}?" for i in range(6)], model="policy", max_tokens=5, temperature=0.7, concurrency=2)
    assert script.most_open == 2


def test_a_question_has_the_same_seed_in_every_process():
    assert question_seed("", 0) == 1_486_093_758  # crc32 of "0:"


async def test_an_error_of_the_server_reaches_the_caller():
    async with serving(Scripted([GOOD])) as client:
        with pytest.raises(openai.NotFoundError):
            await ask(
                client.with_options(base_url=f"{client.base_url}nowhere"),
                ["a?"],
                model="m",
                max_tokens=1,
                temperature=1,
            )
