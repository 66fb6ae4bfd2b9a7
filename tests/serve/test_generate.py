"""Tokens in, tokens out."""

from __future__ import annotations

import json

import pytest
from tests.conftest import NEVER_ENDS

from nextstate.store.turns import load_turn

PROMPT = [60, 61, 62, 63]


async def generate(server, **options):
    return await server.http.post(
        "/v1/generate", json={"prompt_ids": PROMPT, "seed": 3, "max_tokens": 12, **NEVER_ENDS, **options}
    )


async def test_the_reply_is_what_the_store_holds(server):
    body = (await generate(server)).json()
    turn = await server.store.read(load_turn, body["turn_id"])
    assert turn.prompt_ids == tuple(PROMPT)
    assert (tuple(body["ids"]), tuple(body["versions"])) == (turn.reply_ids, turn.reply_versions)
    assert body["logprobs"] == pytest.approx(list(turn.reply_logprobs))
    assert body["prompt_tokens"] == len(PROMPT)
    assert body["finish_reason"] == "length"


async def test_streamed_tokens_come_once_each_and_the_last_event_says_why_it_ended(server):
    whole = (await generate(server)).json()
    lines = (await generate(server, stream=True)).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    assert len(events) > 2
    for field in ("ids", "logprobs", "versions"):
        assert [item for event in events for item in event[field]] == whole[field]
    assert [event["finish_reason"] for event in events] == [None] * (len(events) - 1) + [whole["finish_reason"]]


async def test_tokens_that_do_not_exist_are_refused(server):
    for prompt in ([], [10**9], [-1], ["a"], None):
        response = await generate(server, prompt_ids=prompt)
        assert response.status_code == 400, prompt
        assert response.json()["error"]["param"].startswith("prompt")
    assert (await generate(server, n=2)).json()["error"]["param"] == "n"
    too_long = (await generate(server, prompt_ids=[60] * 3000)).json()["error"]
    assert (too_long["param"], too_long["code"]) == ("prompt_ids", "context_length_exceeded")
    assert await server.turns() == []


async def test_the_next_request_with_the_tokens_of_the_first_shares_them(server):
    first = (await generate(server, session_id="s")).json()
    longer = [*PROMPT, *first["ids"], 64, 65]
    second = (await generate(server, prompt_ids=longer, session_id="s")).json()
    turn = await server.store.read(load_turn, second["turn_id"])
    assert turn.prompt_ids == tuple(longer)
    assert {row.session for row in await server.turns()} == {"s"}
