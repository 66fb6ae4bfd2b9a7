"""The official client against a real server over loopback, with the tiny model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
import torch
from gated_engine import GatedEngine, eventually
from scripted_engine import ScriptedEngine
from tests.conftest import NEVER_ENDS
from transformers import AutoModelForCausalLM

from nextstate.errors import EngineFault
from nextstate.judge.evidence import evidence
from nextstate.serve import streaming
from nextstate.store.judging import claim_unjudged
from nextstate.store.turns import load_messages, load_turn
from nextstate.types import Vote

HI = [{"role": "user", "content": "Hi"}]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def json_form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


async def complete(server, messages=HI, **options):
    return await server.client.chat.completions.create(**{"model": "policy", "messages": messages, "seed": 1} | options)


async def stream(server, messages=HI, **options):
    """All chunks of a streamed answer."""
    chunks = await complete(server, messages, stream=True, **options)
    return [chunk async for chunk in chunks]


def text_of(chunks) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_a_streamed_answer_is_the_unstreamed_one(server, seed):
    whole = await complete(server, seed=seed, max_tokens=60)
    chunks = await stream(server, seed=seed, max_tokens=60)
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_the_usage(server):
    chunks = await stream(server, max_tokens=5, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens <= 5
    assert {c.id for c in chunks} == {"chatcmpl-1"}
    assert {c.system_fingerprint for c in chunks} == {"nextstate-v0"}


async def test_without_being_asked_a_stream_carries_no_usage(server):
    assert [c for c in await stream(server, max_tokens=5) if c.usage or not c.choices] == []


async def test_tokens_are_sent_as_they_are_generated(start_server, engine):
    gate = GatedEngine(engine, tokens_before=6)
    async with start_server(with_engine=gate) as server:
        chunks = await complete(server, stream=True, seed=4, max_tokens=30)
        seen = ""
        async for chunk in chunks:
            seen += chunk.choices[0].delta.content or ""
            if seen:
                break
        assert not gate.go_on.is_set()  # the answer has only begun, and we have read from it
        gate.go_on.set()
        await chunks.close()


async def test_usage_counts_the_stored_tokens(server):
    answer = await complete(server, max_tokens=20)
    turn = await server.store.read(load_turn, 1)
    assert answer.usage.prompt_tokens == len(turn.prompt_ids)
    assert answer.usage.completion_tokens == len(turn.reply_ids)
    assert answer.usage.total_tokens == len(turn.prompt_ids) + len(turn.reply_ids)


async def test_stored_logprobs_are_those_of_a_full_forward_pass(server, tiny_model_path):
    await complete(server, max_tokens=40, temperature=0.7, seed=4)
    turn = await server.store.read(load_turn, 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([turn.prompt_ids + turn.reply_ids])).logits[0]
    logprobs = (logits / 0.7).log_softmax(-1)
    first = len(turn.prompt_ids) - 1
    expected = [float(logprobs[first + i, token]) for i, token in enumerate(turn.reply_ids)]
    assert turn.reply_logprobs == pytest.approx(expected, abs=1e-3)


async def test_a_seed_repeats_an_answer_and_another_seed_does_not(server):
    one, same, other = [await complete(server, seed=seed, max_tokens=30) for seed in (7, 7, 8)]
    assert one.choices[0].message.content == same.choices[0].message.content
    assert one.choices[0].message.content != other.choices[0].message.content


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_limit_the_answer(server, name):
    answer = await complete(server, **NEVER_ENDS, **{name: 3})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


async def test_the_answer_is_capped_by_the_context_whatever_max_tokens_says(server):
    answer = await complete(server, [{"role": "user", "content": "x" * 1980}], max_tokens=10_000, **NEVER_ENDS)
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


async def find_stop(server) -> tuple[str, str, int]:
    """An answer, a piece of it to stop at, and the seed."""
    for seed in range(40):
        text = (await complete(server, seed=seed, max_tokens=60)).choices[0].message.content
        if len(text) >= 8 and text.isprintable():
            return text, text[4:6], seed
    raise AssertionError("no answer was long enough")


@pytest.mark.parametrize("as_list", [False, True])
async def test_an_answer_ends_before_a_stop_string(server, as_list):
    text, stop, seed = await find_stop(server)
    expected = text[: text.index(stop)]
    options = {"seed": seed, "max_tokens": 60, "stop": [stop, "never seen"] if as_list else stop}
    answer = await complete(server, **options)
    chunks = await stream(server, **options)
    assert answer.choices[0].message.content == text_of(chunks) == expected
    assert answer.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    # Every sampled token is kept, those of the stop string too.
    turns = await server.turns()
    assert turns[-2].reply_tokens == answer.usage.completion_tokens
    assert stop not in turns[-1].answer


async def test_greedy_answers_are_served_and_left_out_of_training(server):
    await complete(server, temperature=0, max_tokens=20)
    [turn] = await server.turns()
    assert (turn.state, turn.reason) == ("left_out", "sampling_not_reproducible")


async def test_the_server_names_turn_session_and_version_of_every_answer(server):
    raw = await server.client.chat.completions.with_raw_response.create(model="policy", messages=HI, max_tokens=5)
    [turn] = await server.turns()
    assert raw.headers["x-nextstate-turn-id"] == str(turn.turn_id)
    assert raw.headers["x-nextstate-session-id"] == turn.session
    assert raw.headers["x-nextstate-policy-version"] == "0"
    assert raw.parse().id == f"chatcmpl-{turn.turn_id}"
    assert raw.parse().system_fingerprint == "nextstate-v0"


async def test_every_way_of_writing_messages_is_read(server):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "Well?"},
    ]
    await complete(server, messages, max_tokens=4)
    stored = await server.store.read(load_messages, 1)
    assert [m["role"] for m in stored] == ["system", "user", "assistant", "tool", "user", "assistant"]
    assert [m["content"] for m in stored[:-1]] == ["Be kind.", "Hi", "", "42", "Well?"]


async def test_many_answers_at_once_are_each_their_own(server):
    alone = [await complete(server, seed=seed, max_tokens=20) for seed in range(6)]
    together = await asyncio.gather(*(complete(server, seed=seed, max_tokens=20) for seed in range(6)))
    assert [a.choices[0].message.content for a in together] == [a.choices[0].message.content for a in alone]


# -- sessions ----------------------------------------------------------------------------------------------------------


async def test_a_conversation_without_headers_is_one_session_and_wakes_the_judge(server):
    first = await complete(server, seed=3, max_tokens=40)
    assert server.judge_calls == []
    messages = [*HI, first.choices[0].message, {"role": "user", "content": "Shorter, please."}]
    await complete(server, messages, max_tokens=4)
    one, two = await server.turns()
    assert (two.kind, two.parent_turn_id, two.session_id) == ("continuation", one.turn_id, one.session_id)
    assert one.state == "continued" or one.reason == "truncated"
    assert len(server.judge_calls) == 1


async def test_headers_name_the_session(server):
    headers = {"X-Session-Id": "mine"}
    await complete(server, max_tokens=4, extra_headers=headers)
    await complete(server, [{"role": "user", "content": "Else"}], max_tokens=4, extra_body={"session_id": "mine"})
    one, two = await server.turns()
    assert one.session == two.session == "mine"


async def test_a_side_request_is_answered_and_never_learned_from(server):
    await complete(server, max_tokens=30, extra_headers={"X-Session-Id": "mine", "X-Turn-Type": "side"})
    await complete(server, max_tokens=30, extra_body={"turn_type": "side"})
    for turn in await server.turns():
        assert (turn.kind, turn.state, turn.reason) == ("side", "left_out", "side_request")


@pytest.mark.parametrize("how", [{"extra_headers": {"X-Session-Done": "yes"}}, {"extra_body": {"session_done": True}}])
async def test_a_session_that_is_done_ends_after_its_answer(server, how):
    for seed in range(20):
        answer = await complete(server, seed=seed, max_tokens=60, **how)
        if answer.choices[0].finish_reason == "stop":
            break
    turn = (await server.turns())[-1]
    assert (turn.state, turn.reason) == ("left_out", "no_next_state")
    assert "ended the session" in turn.detail


async def test_with_learning_off_turns_are_kept_and_left_out(start_server):
    async with start_server(learning=False) as server:
        await complete(server, max_tokens=30)
        [turn] = await server.turns()
        assert (turn.state, turn.reason) == ("left_out", "learning_off")


async def test_different_users_do_not_share_conversations(server):
    first = await complete(server, max_tokens=30, user="ann")
    await complete(server, [*HI, first.choices[0].message, *HI], max_tokens=4, user="bob")
    assert [turn.kind for turn in await server.turns()] == ["new", "new"]


async def test_a_request_that_the_client_sends_again_is_a_retry(server):
    await complete(server, max_tokens=4)
    await complete(server, max_tokens=4, extra_headers={"x-stainless-retry-count": "1"})
    one, two = await server.turns()
    assert (two.kind, two.session_id) == ("retry", one.session_id)


# -- answers that end early --------------------------------------------------------------------------------------------


async def test_closing_a_stream_frees_the_engine_and_keeps_the_turn_as_aborted(start_server, engine):
    gate = GatedEngine(engine, tokens_before=3)
    async with start_server(with_engine=gate) as server:
        chunks = await complete(server, stream=True, max_tokens=400, **NEVER_ENDS)
        await eventually(lambda: gate.passed == 3)
        await chunks.close()
        await eventually(lambda: engine.load == (0, 0) and gate.closed == 1)

        async def aborted() -> bool:
            [turn] = await server.turns()
            return (turn.state, turn.reason, turn.finish_reason) == ("left_out", "aborted", "aborted")

        await eventually(aborted)
        turn = await server.store.read(load_turn, 1)
        assert len(turn.reply_ids) == 3
        gate.go_on.set()
        await complete(server, max_tokens=4)


async def test_a_client_that_leaves_an_unstreamed_answer_frees_the_engine(start_server, engine, gated):
    async with start_server(with_engine=gated) as server:
        asking = asyncio.create_task(complete(server, max_tokens=400, **NEVER_ENDS))
        await eventually(lambda: engine.load[0] == 1)
        asking.cancel()
        await eventually(lambda: engine.load == (0, 0) and gated.closed == 1)

        async def aborted() -> bool:
            return [turn.reason for turn in await server.turns()] == ["aborted"]

        await eventually(aborted)


async def test_a_turn_is_written_before_its_first_token_and_again_before_its_last_chunk(start_server, engine):
    gate = GatedEngine(engine, tokens_before=0)
    async with start_server(with_engine=gate) as server:
        chunks = await complete(server, stream=True, max_tokens=5)
        await anext(aiter(chunks))
        assert [turn.state for turn in await server.turns()] == ["generating"]
        gate.go_on.set()
        async for chunk in chunks:
            if chunk.choices[0].finish_reason:
                assert [turn.finish_reason for turn in await server.turns()] == [chunk.choices[0].finish_reason]


async def test_when_the_server_stops_the_turn_says_so(start_server, gated, monkeypatch):
    monkeypatch.setattr("nextstate.serve.run.GRACE_S", 0)
    async with start_server(with_engine=gated) as server:
        chunks = await complete(server, stream=True, max_tokens=400, **NEVER_ENDS)
        await anext(aiter(chunks))
        await server.stop()
        [turn] = await server.turns()
        assert (turn.state, turn.reason) == ("left_out", "server_stopped")


async def test_silence_is_filled_with_empty_pieces(start_server, gated, monkeypatch):
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    async with start_server(with_engine=gated) as server:
        chunks = await complete(server, stream=True, max_tokens=10, **NEVER_ENDS)
        empty = 0
        async for chunk in chunks:
            empty += chunk.choices[0].delta.content is None and chunk.choices[0].finish_reason is None
            if empty == 3:
                gated.go_on.set()
        assert empty >= 3


class FaultyEngine(GatedEngine):
    async def generate(self, prompt, sampling, policy):
        async for chunk in self._engine.generate(prompt, sampling, policy):
            yield chunk
            raise EngineFault("the engine failed while it computed this request: out of memory")


async def test_an_engine_fault_is_a_500_and_leaves_the_turn_out(start_server, engine):
    async with start_server(with_engine=FaultyEngine(engine)) as server:
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await complete(server, max_tokens=20, seed=4)
        with pytest.raises(openai.APIError, match="out of memory"):
            await stream(server, max_tokens=20, seed=4)
        for turn in await server.turns():
            assert (turn.state, turn.reason) == ("left_out", "engine_fault")


async def test_more_requests_than_may_wait_are_answered_429(start_server, gated):
    limits = {"serve": {"max_queue": 1}, "engine_config": {"max_streams": 1}}
    async with start_server(with_engine=gated, **limits) as server:
        first = [asyncio.create_task(complete(server, max_tokens=5, **NEVER_ENDS)) for _ in range(2)]

        async def both_began() -> bool:
            return len(await server.turns()) == 2

        await eventually(both_began)
        with pytest.raises(openai.RateLimitError) as refused:
            await complete(server, max_tokens=5, **NEVER_ENDS)
        assert refused.value.response.headers["retry-after"] == "1"
        gated.go_on.set()
        await asyncio.gather(*first)
        await complete(server, max_tokens=5, **NEVER_ENDS)
        assert len(await server.turns()) == 3


async def test_several_answers_are_taken_in_together_or_not_at_all(start_server, gated):
    limits = {"serve": {"max_queue": 1}, "engine_config": {"max_streams": 2}}
    async with start_server(with_engine=gated, **limits) as server:
        with pytest.raises(openai.BadRequestError, match="room for 3") as never:
            await complete(server, n=4, max_tokens=5)
        assert never.value.param == "n"
        first = asyncio.create_task(complete(server, n=2, max_tokens=5, **NEVER_ENDS))

        async def both_began() -> bool:
            return len(await server.turns()) == 2

        await eventually(both_began)
        with pytest.raises(openai.RateLimitError):
            await complete(server, n=2, max_tokens=5)
        gated.go_on.set()
        await first
        assert [turn.finish_reason for turn in await server.turns()] == ["length", "length"]
        await complete(server, n=3, max_tokens=5)  # all places were given back
        with pytest.raises(openai.BadRequestError):
            await complete(server, [{"role": "user", "content": "x" * 3000}], n=3)
        await complete(server, n=3, max_tokens=5)


# -- bad input ---------------------------------------------------------------------------------------------------------


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(server):
    for streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(server, [{"role": "user", "content": "x" * 2500}], stream=streamed)
        assert refused.value.code == "context_length_exceeded"
        numbers = [int(word) for word in refused.value.body["message"].split() if word.isdigit()]
        assert numbers[0] == 2048
        assert numbers[1] > 2500
    assert await server.turns() == []


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({}, "messages", "required"),
        ({"messages": "Hi"}, "messages", "list"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content", "part 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "'image_url'"),
        ({"messages": HI, "temperature": "hot"}, "temperature", "number"),
        ({"messages": HI, "temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"messages": HI, "top_p": 0}, "top_p", "greater than 0"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", "greater than 0"),
        ({"messages": HI, "max_completion_tokens": "5"}, "max_completion_tokens", "integer"),
        ({"messages": HI, "stream": "yes"}, "stream", "boolean"),
        ({"messages": HI, "stop": [""]}, "stop[0]", "at least 1 character"),
        ({"messages": HI, "stop": ["a", 5]}, "stop[1]", "string"),
        ({"messages": HI, "seed": 1.5}, "seed", "integer"),
        ({"messages": HI, "turn_type": "odd"}, "turn_type", "'side'"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0]", "'name'"),
        ({"messages": HI, "tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0]", "'parameters'"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice", "has none such"),
        ({"messages": HI, "tools": TOOLS, "tool_choice": named("other")}, "tool_choice", "'other'"),
        ({"messages": HI, "tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "one form"),
        ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"messages": HI, "response_format": json_form({"type": "odd"})}, "response_format", "odd"),
        ({"messages": HI, "logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"messages": HI, "logit_bias": {"the": 1}}, "logit_bias", "'the'"),
        ({"messages": HI, "top_logprobs": 3}, "", "logprobs to be true"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 30}, "top_logprobs", "20"),
        ({"messages": HI, "n": 0}, "n", "greater than or equal to 1"),
        ({"messages": HI, "tools": TOOLS, "tool_choice": {"type": "odd"}}, "tool_choice", "'function'"),
        ({"messages": HI, "tools": TOOLS, "tool_choice": allowed("add", "other")}, "tool_choice", "'other'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0]", "required"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "messages", "a tool speaks first"),
    ],
)
async def test_wrong_input_is_refused_by_the_name_of_its_field(server, body, param, says):
    response = await server.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"] or "").startswith(param)
    assert says in error["message"]
    assert await server.turns() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "ls"}]),
        ("function_call", {"name": "ls"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("audio", {"voice": "alloy"}),
    ],
)
async def test_what_the_server_cannot_do_is_refused_by_name(server, field, value):
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(server, extra_body={field: value})
    assert (refused.value.param, refused.value.code) == (field, "unsupported_parameter")
    assert f"'{field}'" in refused.value.body["message"]


async def test_the_same_fields_are_fine_when_they_ask_for_nothing(server):
    nothing = {"tools": [], "n": 1, "logprobs": False, "response_format": {"type": "text"}, "modalities": ["text"]}
    await complete(server, max_tokens=3, extra_body=nothing | {"frequency_penalty": 0, "audio": None, "stop": None})


async def test_unknown_fields_are_ignored_and_counted(server):
    await complete(server, max_tokens=3, extra_body={"reasoning_effort": "high", "zz": 1, "yy": {}})
    page = (await server.http.get("/metrics")).text
    assert 'nextstate_ignored_fields_total{field="reasoning_effort"} 1.0' in page
    assert 'nextstate_ignored_fields_total{field="other"} 2.0' in page


async def test_a_body_that_is_not_json_is_refused(server):
    headers = {"content-type": "application/json"}
    deep = [b"[" * depth + b"]" * depth for depth in (500, 980, 5000, 100_000)]
    bodies = [b'{"x": ' + piece + b"}" for piece in deep]
    for body in (b"{", b"[]", json.dumps("Hi").encode(), b"\xff", *bodies):
        response = await server.http.post("/v1/chat/completions", content=body, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), body


async def test_text_that_is_not_unicode_is_refused(server):
    body = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]})
    response = await server.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert "unicode" in response.json()["error"]["message"]


async def test_a_header_with_an_unknown_turn_type_is_refused(server):
    with pytest.raises(openai.BadRequestError, match="'main' or 'side'"):
        await complete(server, extra_headers={"X-Turn-Type": "odd"})


async def test_a_header_that_ends_no_session_is_refused(server):
    with pytest.raises(openai.BadRequestError, match="'1' or '0'"):
        await complete(server, extra_headers={"X-Session-Done": "banana"})


async def test_a_compressed_body_is_refused_by_its_encoding(server):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await server.http.post("/v1/chat/completions", content=b"\x1f\x8b", headers=headers)
    assert response.status_code == 415
    assert "'gzip'" in response.json()["error"]["message"]


async def test_a_session_key_that_no_header_can_carry_is_answered_all_the_same(server):
    await complete(server, max_tokens=3, extra_body={"session_id": "Grüße 🦊\n"})
    [turn] = await server.turns()
    assert turn.session == "Grüße 🦊\n"


# -- tools, forms, log-probs, several answers --------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1, "b": true}}\n</tool_call>'


async def test_a_tool_call_is_read_out_of_the_answer_streamed_and_not(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, f"I add.\n{CALL}\n{CALL}")) as server:
        whole = (await complete(server, tools=TOOLS)).choices[0]
        chunks = await stream(server, tools=TOOLS)
    calls = whole.message.tool_calls
    assert (whole.message.content, whole.finish_reason) == ("I add.", "tool_calls")
    assert [(c.function.name, c.function.arguments) for c in calls] == [("add", '{"a":1,"b":true}')] * 2
    assert all(c.id.isalnum() and len(c.id) <= 40 for c in calls)
    assert calls[0].id != calls[1].id
    assert text_of(chunks) == "I add."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
    assert [(d.index, d.type, d.function.name, d.function.arguments) for d in deltas] == [
        (0, "function", "add", ""),
        (0, None, None, '{"a":1,"b":true}'),
        (1, "function", "add", ""),
        (1, None, None, '{"a":1,"b":true}'),
    ]


async def test_a_tool_result_continues_the_turn_that_called_and_is_its_next_state(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, CALL)) as server:
        message = (await complete(server, tools=TOOLS)).choices[0].message
        assert message.content is None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
        await complete(server, [*HI, message, result], tools=TOOLS)
        first, second = await server.turns()
        assert (first.state, second.kind, second.parent_turn_id) == ("continued", "continuation", first.turn_id)
        [judged] = await server.store.write(lambda db: claim_unjudged(db, limit=9, lease_s=60))
    assert judged.answer == 'add({"a":1,"b":true})'
    assert [dict(m) for m in judged.next_state] == [result]


async def test_without_tools_or_with_choice_none_a_call_is_text(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, CALL)) as server:
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = (await complete(server, **options)).choices[0]
            assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
            assert choice.finish_reason == "stop"


async def test_a_malformed_call_stays_text_and_is_evidence_against_the_turn(start_server, engine):
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>'
    async with start_server(with_engine=ScriptedEngine(engine, broken)) as server:
        choice = (await complete(server, tools=TOOLS)).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (broken, None)
        await complete(server, [*HI, choice.message, {"role": "user", "content": "hm"}], tools=TOOLS)
        [judged] = await server.store.write(lambda db: claim_unjudged(db, limit=9, lease_s=60))
    verdict = evidence(judged)
    assert verdict is not None
    assert verdict.value == Vote.BAD
    assert "tool call" in verdict.reason


async def test_without_parallel_calls_the_answer_ends_behind_the_first(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, f"{CALL}\n{CALL}")) as server:
        choice = (await complete(server, tools=TOOLS, parallel_tool_calls=False)).choices[0]
        assert len(choice.message.tool_calls) == 1
        assert choice.finish_reason == "tool_calls"
        turn = await server.store.read(load_turn, 1)
        assert engine.loaded.tokenizer.decode(turn.reply_ids) == CALL


async def test_only_allowed_tools_are_shown_and_called(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, CALL)) as server:
        await complete(server, tools=TOOLS, tool_choice=allowed("stop"))
        turn = await server.store.read(load_turn, 1)
    prompt = engine.loaded.tokenizer.decode(turn.prompt_ids)
    assert '"stop"' in prompt
    assert '"add"' not in prompt


@pytest.mark.parametrize("choice", ["required", named("add"), allowed("add", mode="required")])
async def test_a_required_call_is_made_by_any_model(server, choice):
    for seed in range(3):
        answer = (await complete(server, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=200)).choices[0]
        assert answer.finish_reason == "tool_calls"
        for call in answer.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "add":
                assert [type(arguments[name]) for name in ("a", "b")] == [int, bool]
            else:
                assert choice == "required"
    assert {turn.reason for turn in await server.turns()} == {"sampling_not_reproducible"}


async def test_an_answer_held_to_a_schema_is_of_that_schema(server):
    schema = TOOLS[0]["function"]["parameters"]
    answer = (await complete(server, response_format=json_form(schema), max_tokens=100)).choices[0]
    value = json.loads(answer.message.content)
    assert set(value) == {"a", "b"}
    some = (await complete(server, response_format={"type": "json_object"}, max_tokens=300)).choices[0]
    if some.finish_reason == "stop":
        assert isinstance(json.loads(some.message.content), dict)


async def test_reasoning_comes_apart_from_the_text(start_server, engine):
    thought = ScriptedEngine(engine, "<think>\nA fox?\n</think>\n\nYes.")
    async with start_server(with_engine=thought, engine_config={"reasoning_form": "think"}) as server:
        message = (await complete(server)).choices[0].message
        chunks = await stream(server)
        assert (message.reasoning_content, message.content) == ("A fox?", "Yes.")
        assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks) == "A fox?"
        assert text_of(chunks) == "Yes."
        # Clients that drop it continue the session all the same.
        follow = [*HI, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More"}]
        await complete(server, follow)
        assert (await server.turns())[-1].kind == "continuation"


async def test_logprobs_are_the_stored_ones_of_every_token_streamed_and_not(server):
    whole = (await complete(server, logprobs=True, top_logprobs=3, max_tokens=12)).choices[0]
    turn = await server.store.read(load_turn, 1)
    assert [t.logprob for t in whole.logprobs.content] == pytest.approx(list(turn.reply_logprobs))
    for token in whole.logprobs.content:
        tops = [t.logprob for t in token.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert token.logprob <= tops[0] + 1e-6
    chunks = await stream(server, logprobs=True, max_tokens=12)
    pieces = [t for c in chunks for t in (c.choices[0].logprobs.content if c.choices[0].logprobs else ())]
    assert [t.token for t in pieces] == [t.token for t in whole.logprobs.content]


async def test_several_answers_are_turns_of_their_own_beside_each_other(server):
    whole = await complete(server, n=3, max_tokens=8)
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert len({c.message.content for c in whole.choices}) > 1
    rows = await server.turns()
    assert [row.kind for row in rows] == ["new", "regeneration", "regeneration"]
    assert len({row.session for row in rows}) == 1
    alone = await complete(server, [{"role": "user", "content": "Hi"}], max_tokens=8, seed=2, user="other")
    assert alone.choices[0].message.content == whole.choices[1].message.content
    streamed = await stream(server, n=2, max_tokens=8, stream_options={"include_usage": True})
    texts = ["", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices[:2]]
    assert sum(bool(c.choices and c.choices[0].finish_reason) for c in streamed) == 2


async def test_the_next_request_continues_the_answer_it_repeats(server):
    whole = await complete(server, n=3, max_tokens=8)
    follow = [*HI, whole.choices[2].message, {"role": "user", "content": "More"}]
    await complete(server, follow, max_tokens=3)
    rows = await server.turns()
    assert rows[-1].parent_turn_id == rows[2].turn_id


async def test_a_request_that_opts_out_is_answered_and_teaches_nothing(server):
    first = await complete(server, max_tokens=4)
    follow = [*HI, first.choices[0].message, {"role": "user", "content": "Wrong!"}]
    await complete(server, follow, max_tokens=4, extra_headers={"X-Nextstate-Learn": "off"})
    earlier, later = await server.turns()
    assert earlier.state in ("finished", "left_out")
    assert later.reason == "learning_off"
    assert await server.store.write(lambda db: claim_unjudged(db, limit=9, lease_s=60)) == []
