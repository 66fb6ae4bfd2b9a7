"""Anthropic's official client against a real server over loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import pytest
from gated_engine import GatedEngine, eventually
from scripted_engine import CALL, ScriptedEngine
from tests.conftest import NEVER_ENDS

from nextstate.errors import EngineFault
from nextstate.store.turns import load_messages, load_turn

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
THINKS = {"reasoning_form": "think"}
ANSWER = f"<think>\nRome, so\nask.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


@asynccontextmanager
async def client_of(server) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        anthropic.DefaultAsyncHttpxClient(verify=False) as transport,
        anthropic.AsyncAnthropic(
            base_url=server.url, api_key="unused", max_retries=0, timeout=10, http_client=transport
        ) as client,
    ):
        yield client


async def create(server, messages=HI, **options):
    async with client_of(server) as client:
        return await client.messages.create(
            **{"model": "policy", "messages": messages, "max_tokens": 60, "extra_body": {"seed": 1}} | options
        )


async def stream(server, messages=HI, **options):
    """The message as the client puts it together from a stream, and all its raw events."""
    async with client_of(server) as client:
        options = {"model": "policy", "messages": messages, "max_tokens": 60, "extra_body": {"seed": 1}} | options
        async with client.messages.stream(**options) as events:
            raw = [event async for event in events]
            return await events.get_final_message(), raw


def without_id(message) -> dict:
    return message.to_dict(exclude_unset=False) | {"id": None}


def types_of(events) -> list[str]:
    """The dialect's own events, in a row only once; the client adds some of its own."""
    kinds = [event.type for event in events if event.type not in ("text", "thinking", "signature", "input_json")]
    return [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_a_streamed_answer_is_the_unstreamed_one(server, seed):
    whole = await create(server, extra_body={"seed": seed})
    streamed, _ = await stream(server, extra_body={"seed": seed})
    assert without_id(streamed) == without_id(whole)
    assert whole.stop_reason in ("end_turn", "max_tokens")


async def test_thoughts_text_and_calls_come_as_blocks_streamed_or_not(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, ANSWER), engine_config=THINKS) as server:
        whole = await create(server, tools=[TOOL], max_tokens=500)
        streamed, events = await stream(server, tools=[TOOL], max_tokens=500)
        [turn, _] = await server.turns()
    thinking, text, first, second = whole.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Rome, so\nask.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (first.name, first.input) == (second.name, second.input) == ("get_weather", {"city": "Rome"})
    assert [call["id"] for call in turn.tool_calls] == [first.id, second.id]
    assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
    for block in streamed.content:
        if block.type == "tool_use":
            assert block.id not in (first.id, second.id)
            block.id = first.id
    second.id = first.id
    assert without_id(streamed) == without_id(whole)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert types_of(events) == ["message_start", *block * 4, "message_delta", "message_stop"]


async def test_text_behind_a_call_stays_behind_it(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, f"One.\n{CALL}\nTwo.")) as server:
        whole = await create(server, tools=[TOOL], max_tokens=500)
        streamed, _ = await stream(server, tools=[TOOL], max_tokens=500)
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["text", "tool_use", "text"]
        assert [message.content[0].text, message.content[2].text] == ["One.", "Two."]


async def test_a_tool_loop_is_one_session_and_the_result_is_what_followed(start_server, engine):
    scripted = ScriptedEngine(engine, ANSWER)
    async with start_server(with_engine=scripted, engine_config=THINKS) as server:
        answer = await create(server, tools=[TOOL], max_tokens=500)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "25C"}]}
            for block in answer.content
            if block.type == "tool_use"
        ]
        results[1]["is_error"] = True
        scripted.script = "Sunny."
        messages = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        await create(server, messages, tools=[TOOL])
        one, two = await server.turns()
        stored = await server.store.read(load_messages, two.turn_id)
    assert (two.kind, two.parent_turn_id, two.session_id) == ("continuation", one.turn_id, one.session_id)
    assert (one.state, one.dialect) == ("continued", "messages")
    assert [message["role"] for message in stored] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [message.get("is_error") for message in stored[2:4]] == [None, True]
    assert stored[1]["reasoning_content"] == "Rome, so\nask."


async def test_what_a_call_needs_is_asked_for_and_no_more_calls_than_wanted(start_server, engine):
    scripted = ScriptedEngine(engine, ANSWER)
    async with start_server(with_engine=scripted) as server:
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}, {"type": "auto"}):
            await create(server, tools=[TOOL], tool_choice=choice, max_tokens=500)
        one = await create(
            server, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, max_tokens=500
        )
        none = await create(server, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=500)
        turns = await server.turns()
    held = [sampling.grammar is not None for sampling in scripted.sampling]
    assert held == [True, True, False, False, False]
    assert [block.type for block in one.content].count("tool_use") == 1
    assert [block.type for block in none.content] == ["text"]
    assert "<tool_call>" in none.content[0].text
    assert none.usage.input_tokens < one.usage.input_tokens
    assert turns[-1].tool_set is None


async def test_a_schema_holds_the_answer(start_server, engine):
    scripted = ScriptedEngine(engine, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    async with start_server(with_engine=scripted) as server:
        await create(server, output_config={"format": form})
        await create(server, extra_body={"output_format": form})
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            await create(server, output_config={"format": form}, tools=[TOOL])
    assert [sampling.grammar is not None and "integer" in sampling.grammar for sampling in scripted.sampling] == [
        True,
        True,
    ]


async def test_a_stop_sequence_ends_the_answer_and_is_named(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, "one two three")) as server:
        whole = await create(server, stop_sequences=["never", "two"])
        streamed, _ = await stream(server, stop_sequences=["never", "two"])
    for message in (whole, streamed):
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one ", "stop_sequence", "two")


async def test_an_answer_that_is_cut_off_says_so(server):
    answer = await create(server, max_tokens=3, extra_body=NEVER_ENDS)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


async def test_usage_counts_the_stored_tokens_and_the_headers_name_the_turn(server):
    async with client_of(server) as client:
        raw = await client.messages.with_raw_response.create(model="policy", messages=HI, max_tokens=20)
    message = await raw.parse()
    turn = await server.store.read(load_turn, 1)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(turn.prompt_ids), len(turn.reply_ids))
    assert (message.id, message.role, message.model) == ("msg_1", "assistant", "policy")
    assert raw.headers["x-nextstate-turn-id"] == "1"
    assert raw.headers["x-nextstate-policy-version"] == "0"


async def test_every_way_of_writing_messages_is_read(server):
    cached = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "system", "content": "The date is gone."},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Ho"}]},
        {"role": "assistant", "content": []},
        {"role": "user", "content": "Well?"},
    ]
    body = {"model": "policy", "max_tokens": 4, "messages": messages, "system": [cached, cached]}
    assert (await server.http.post("/v1/messages?beta=true", json=body)).status_code == 200
    stored = await server.store.read(load_messages, 1)
    assert [(m["role"], m["content"]) for m in stored[:-1]] == [
        ("system", "Be kind.\n\nBe kind."),
        ("user", "Hi"),
        ("system", "The date is gone."),
        ("assistant", "Ho"),
        ("assistant", ""),
        ("user", "Well?"),
    ]


async def test_a_session_is_known_by_what_claude_code_sends(server):
    header = {"X-Claude-Code-Session-Id": "d9b2d63d-a233-4123-847a-7c7d0a3e6c55"}
    await create(server, max_tokens=4, extra_headers=header)
    user_id = json.dumps({"device_id": "d", "session_id": header["X-Claude-Code-Session-Id"]})
    await create(server, [{"role": "user", "content": "Else"}], max_tokens=4, metadata={"user_id": user_id})
    one, two = await server.turns()
    assert one.session == two.session == header["X-Claude-Code-Session-Id"]


# -- counting ----------------------------------------------------------------------------------------------------------


async def test_counted_tokens_are_those_of_the_same_request_and_leave_no_turn(start_server, engine):
    messages = [*HI, {"role": "assistant", "content": "Ho"}, *HI]
    none = {"type": "none"}
    async with start_server(with_engine=ScriptedEngine(engine, "ok")) as server, client_of(server) as client:
        for more in ({}, {"system": "Be kind."}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": none}):
            before = len(await server.turns())
            counted = await client.messages.count_tokens(model="policy", messages=messages, **more)
            assert len(await server.turns()) == before
            assert counted.input_tokens == (await create(server, messages, **more)).usage.input_tokens


# -- answers that end early --------------------------------------------------------------------------------------------


async def test_closing_a_stream_frees_the_engine_and_keeps_the_turn_as_aborted(start_server, engine):
    gate = GatedEngine(engine, tokens_before=3)
    async with start_server(with_engine=gate) as server:
        async with client_of(server) as client:
            events = await client.messages.create(
                model="policy", messages=HI, max_tokens=400, stream=True, extra_body=NEVER_ENDS
            )
            await eventually(lambda: gate.passed == 3)
            await events.close()
        await eventually(lambda: engine.load == (0, 0) and gate.closed == 1)

        async def aborted() -> bool:
            return [turn.reason for turn in await server.turns()] == ["aborted"]

        await eventually(aborted)


@pytest.mark.parametrize(
    ("tokens_before", "expected"),
    [(0, {"type": "ping"}), (12, {"type": "thinking_delta", "thinking": ""}), (60, {"type": "text_delta", "text": ""})],
)
async def test_silence_is_filled_with_what_fits_in(start_server, engine, monkeypatch, tokens_before, expected):
    monkeypatch.setattr("nextstate.serve.streaming.KEEP_ALIVE_S", 0.05)
    script = "<think>\nSo it is, so it will be.\n</think>\n\nYes, this is the text of the answer."
    gate = GatedEngine(ScriptedEngine(engine, script), tokens_before=tokens_before)
    body = {"model": "policy", "messages": HI, "max_tokens": 200, "stream": True}
    async with (
        start_server(with_engine=gate, engine_config=THINKS) as server,
        server.http.stream("POST", "/v1/messages", json=body) as response,
    ):
        empty, lines = 0, []
        async for line in response.aiter_lines():
            lines.append(line)
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            empty += event.get("delta", event) == expected
            if empty == 3:
                gate.go_on.set()
    assert empty >= 3
    assert lines[-3:-1] == ["event: message_stop", 'data: {"type":"message_stop"}']


async def test_the_client_reads_over_silence(start_server, engine, monkeypatch):
    monkeypatch.setattr("nextstate.serve.streaming.KEEP_ALIVE_S", 0.02)
    gate = GatedEngine(ScriptedEngine(engine, "Quiet."), tokens_before=2)
    async with start_server(with_engine=gate) as server:
        reading = asyncio.create_task(stream(server))
        await asyncio.sleep(0.2)
        gate.go_on.set()
        message, _ = await reading
    assert message.content[0].text == "Quiet."


class FaultyEngine(GatedEngine):
    async def generate(self, prompt, sampling, policy):
        async for chunk in self._engine.generate(prompt, sampling, policy):
            yield chunk
            raise EngineFault("the engine failed while it computed this request: out of memory")


async def test_an_engine_fault_is_an_api_error_in_both_ways(start_server, engine):
    async with start_server(with_engine=FaultyEngine(engine)) as server:
        with pytest.raises(anthropic.InternalServerError) as whole:
            await create(server, extra_body=NEVER_ENDS)
        with pytest.raises(anthropic.APIStatusError) as streamed:
            await stream(server, extra_body=NEVER_ENDS)
        assert [turn.reason for turn in await server.turns()] == ["engine_fault"] * 2
    for error in (whole.value, streamed.value):
        assert error.body["type"] == "error"
        assert error.body["error"]["type"] == "api_error"
        assert "out of memory" in error.body["error"]["message"]
    assert whole.value.response.headers["x-nextstate-turn-id"] == "1"


async def test_more_requests_than_may_wait_are_answered_429(start_server, gated):
    limits = {"serve": {"max_queue": 1}, "engine_config": {"max_streams": 1}}
    async with start_server(with_engine=gated, **limits) as server:
        first = [asyncio.create_task(create(server, max_tokens=5, extra_body=NEVER_ENDS)) for _ in range(2)]

        async def both_began() -> bool:
            return len(await server.turns()) == 2

        await eventually(both_began)
        with pytest.raises(anthropic.RateLimitError) as refused:
            await create(server, max_tokens=5)
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.type == "rate_limit_error"
        gated.go_on.set()
        await asyncio.gather(*first)


# -- bad input ---------------------------------------------------------------------------------------------------------


async def test_a_prompt_longer_than_the_context_is_refused_in_the_words_that_clients_know(server):
    for ask in (create, stream):
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: 25\d\d tokens > 2048 maximum"
        ) as error:
            await ask(server, [{"role": "user", "content": "x" * 2500}])
        assert error.value.type == "invalid_request_error"
    assert await server.turns() == []


def user(block):
    return {"messages": [{"role": "user", "content": [block]}], "max_tokens": 5}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": HI}, ["max_tokens", "required"]),
        ({"messages": HI, "max_tokens": 0}, ["max_tokens", "greater than 0"]),
        ({"messages": [], "max_tokens": 5}, ["messages", "at least 1"]),
        ({"messages": [{"role": "king", "content": "Hi"}], "max_tokens": 5}, ["messages[0].role"]),
        ({"messages": [{"role": "user"}], "max_tokens": 5}, ["messages[0].content", "required"]),
        (
            {"messages": [{"role": "user", "content": 7}], "max_tokens": 5},
            ["messages[0].content", "a string or a list"],
        ),
        (user("Hi"), ["messages[0].content", "block 0"]),
        (user({"type": "text"}), ["messages[0].content", "'text', a string"]),
        (user({"type": "tool_result", "content": "25C"}), ["messages[0].content", "'tool_use_id'"]),
        (user({"type": "image", "source": {}}), ["messages", "part 'image'", "text only"]),
        ({"messages": HI, "max_tokens": 5, "system": 7}, ["system"]),
        ({"messages": HI, "max_tokens": 5, "tools": [{"input_schema": {}}]}, ["tools[0]", "'name'"]),
        ({"messages": HI, "max_tokens": 5, "tool_choice": {"type": "tool"}}, ["tool_choice", "name"]),
        ({"messages": HI, "max_tokens": 5, "tool_choice": {"type": "any"}}, ["tool_choice", "tools"]),
        ({"messages": HI, "max_tokens": 5, "stop_sequences": [""]}, ["stop_sequences[0]"]),
        ({"messages": HI, "max_tokens": 5, "temperature": 3}, ["temperature"]),
        ({"messages": [*HI, {"role": "assistant", "content": "It"}], "max_tokens": 5}, ["ends with", "assistant"]),
        ({"messages": HI, "max_tokens": 5, "mcp_servers": [{"type": "url"}]}, ["'mcp_servers'"]),
        ({"messages": HI, "max_tokens": 5, "container": "c1"}, ["'container'"]),
    ],
)
async def test_wrong_input_is_refused_by_the_name_of_its_field(server, body, says):
    response = await server.http.post("/v1/messages", json={"model": "policy", **body})
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    for words in says:
        assert words in error["error"]["message"]
    assert await server.turns() == []


async def test_all_errors_below_messages_have_anthropics_shape(start_server):
    async with start_server(serve={"api_key": "secret", "max_body_bytes": 2000}) as server:
        key = {"x-api-key": "secret"}
        body = {"model": "other", "messages": HI, "max_tokens": 5}
        answers = [
            await server.http.post("/v1/messages", json=body),
            await server.http.post("/v1/messages", json=body, headers=key),
            await server.http.post("/v1/messages/count_tokens", json={"model": "other", "messages": HI}, headers=key),
            await server.http.post("/v1/messages/batches", json=body, headers=key),
            await server.http.post("/v1/messages", json=body | {"system": "x" * 3000}, headers=key),
            await server.http.post("/v1/messages", content="{", headers=key | {"content-type": "application/json"}),
            await server.http.post("/v1/messages", content="x", headers=key),
            await server.http.get("/v1/messages", headers=key),
        ]
    seen = [(answer.status_code, answer.json()["error"]["type"]) for answer in answers]
    assert seen == [
        (401, "authentication_error"),
        (404, "not_found_error"),
        (404, "not_found_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (400, "invalid_request_error"),
        (415, "invalid_request_error"),
        (405, "invalid_request_error"),
    ]
    assert {answer.json()["type"] for answer in answers} == {"error"}
    assert "'other'" in answers[1].json()["error"]["message"]


async def test_what_changes_nothing_is_ignored_and_counted(server):
    await create(
        server,
        max_tokens=3,
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        extra_body={"context_management": {}, "zz": 1},
    )
    page = (await server.http.get("/metrics")).text
    for field in ("tool", "thinking", "output_config", "context_management", "other"):
        assert f'nextstate_ignored_fields_total{{field="{field}"}} 1.0' in page
    assert 'nextstate_requests_total{route="/v1/messages",status="200"} 1.0' in page
