"""OpenAI's official client on /v1/responses, against a real server over loopback."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from gated_engine import GatedEngine, eventually
from scripted_engine import CALL, ScriptedEngine
from tests.conftest import NEVER_ENDS

from nextstate.errors import EngineFault
from nextstate.store.keys import add_key
from nextstate.store.turns import load_messages, load_turn

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "What the weather is like.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THINKS = {"reasoning_form": "think"}
ANSWER = f"<think>\nRome, so\nask.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


async def create(server, given="Hi", **options):
    options = {"model": "policy", "max_output_tokens": 60, "extra_body": {"seed": 1}} | options
    return await server.client.responses.create(input=given, **options)


async def stream(server, given="Hi", **options):
    """All events of a streamed answer."""
    return [event async for event in await create(server, given, stream=True, **options)]


def same(response) -> dict:
    """A response without what differs between two answers of the same words."""
    body = response.to_dict(exclude_unset=False)
    for item in body["output"]:
        item["call_id"] = item.get("call_id") and "call"
        item["id"] = item["id"].split("_")[0]
    return body | {"id": None, "created_at": None, "completed_at": body["completed_at"] is not None}


def said(items) -> list:
    """What the items of an output say, each in one word or text."""
    words = {
        "reasoning": lambda item: item.content[0].text,
        "message": lambda item: item.content[0].text,
        "function_call": lambda item: json.loads(item.arguments),
    }
    return [(item.type, words[item.type](item)) for item in items]


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_a_streamed_answer_is_the_unstreamed_one(server, seed):
    whole = await create(server, extra_body={"seed": seed})
    events = await stream(server, extra_body={"seed": seed})
    assert same(events[-1].response) == same(whole)
    assert events[-1].type == f"response.{whole.status}"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text


async def test_thoughts_text_and_calls_come_as_items_streamed_or_not(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, ANSWER), engine_config=THINKS) as server:
        whole = await create(server, tools=[WEATHER], max_output_tokens=500)
        events = await stream(server, tools=[WEATHER], max_output_tokens=500)
        [turn, _] = await server.turns()
    assert said(whole.output) == [
        ("reasoning", "Rome, so\nask."),
        ("message", "Let me see."),
        ("function_call", {"city": "Rome"}),
        ("function_call", {"city": "Rome"}),
    ]
    reasoning, _, *calls = whole.output
    assert (reasoning.summary[0].text, reasoning.encrypted_content) == ("Rome, so\nask.", None)
    assert [call.call_id for call in calls] == [call["id"] for call in turn.tool_calls]
    assert {item.status for item in whole.output} == {"completed"}
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert same(events[-1].response) == same(whole)


async def test_the_events_tell_the_whole_answer_in_order(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, ANSWER), engine_config=THINKS) as server:
        events = await stream(server, tools=[WEATHER], max_output_tokens=500)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    final = events[-1].response
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1, 2, 3]
    assert [event.item.to_dict() for event in done] == [item.to_dict() for item in final.output]
    for part in [event for event in events if hasattr(event, "item_id")]:
        assert part.item_id == final.output[part.output_index].id


async def test_the_clients_own_stream_reader_and_parser_take_it(start_server, engine):
    options = {"model": "policy", "input": "Hi", "tools": [{**WEATHER, "strict": True}], "max_output_tokens": 500}
    async with (
        start_server(with_engine=ScriptedEngine(engine, ANSWER), engine_config=THINKS) as server,
        server.client.responses.stream(**options) as events,
    ):
        final = await events.get_final_response()
    assert final.output_text == "Let me see."
    assert final.output[-1].parsed_arguments == {"city": "Rome"}


async def test_an_answer_that_is_cut_off_is_incomplete(server):
    whole = await create(server, max_output_tokens=3, extra_body=NEVER_ENDS)
    events = await stream(server, max_output_tokens=3, extra_body=NEVER_ENDS)
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[-1].status == "incomplete"
        assert response.usage.output_tokens == 3
    assert events[-1].type == "response.incomplete"
    assert same(await server.client.responses.retrieve(whole.id)) == same(whole)


async def test_a_call_before_the_cut_is_complete(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, f"{CALL}\n" + "x" * 999)) as server:
        whole = await create(server, tools=[WEATHER], max_output_tokens=100)
        events = await stream(server, tools=[WEATHER], max_output_tokens=100)
    assert [(item.type, item.status) for item in whole.output] == [
        ("function_call", "completed"),
        ("message", "incomplete"),
    ]
    assert same(events[-1].response) == same(whole)


async def test_usage_counts_the_stored_tokens_and_the_headers_name_the_turn(server):
    raw = await server.client.responses.with_raw_response.create(model="policy", input="Hi", max_output_tokens=20)
    response = raw.parse()
    turn = await server.store.read(load_turn, 1)
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(turn.prompt_ids), len(turn.reply_ids))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (response.id, response.model, response.object) == ("resp_1", "policy", "response")
    assert raw.headers["x-nextstate-turn-id"] == "1"


async def test_tool_choice_and_form_hold_the_answer(start_server, engine):
    scripted = ScriptedEngine(engine, ANSWER)
    named = {"type": "function", "name": "get_weather"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with start_server(with_engine=scripted) as server:
        for choice in ("required", named, "auto", "none"):
            await create(server, tools=[WEATHER], tool_choice=choice, max_output_tokens=500)
        for form in ({"type": "json_object"}, {"type": "json_schema", "name": "a", "schema": schema}, {"type": "text"}):
            await create(server, text={"format": form})
        one = await create(server, tools=[WEATHER], parallel_tool_calls=False, max_output_tokens=500)
        turns = await server.turns()
    held = [sampling.grammar is not None for sampling in scripted.sampling]
    assert held == [True, True, False, False, True, True, False, False]
    assert [turn.tool_set is None for turn in turns[:4]] == [False, False, False, True]
    assert [item.type for item in one.output].count("function_call") == 1


async def test_a_function_in_a_namespace_is_called_by_both_names(start_server, engine):
    space = {"type": "namespace", "name": "travel", "description": "Trips.", "tools": [WEATHER]}
    async with start_server(with_engine=ScriptedEngine(engine, CALL)) as server:
        inside = await create(server, tools=[space], max_output_tokens=500)
        outside = await create(server, tools=[space, WEATHER], max_output_tokens=500)
    assert (inside.output[0].name, inside.output[0].namespace) == ("get_weather", "travel")
    assert outside.output[0].namespace is None


# -- conversations -----------------------------------------------------------------------------------------------------


async def test_a_tool_loop_that_sends_items_back_is_one_session(start_server, engine):
    scripted = ScriptedEngine(engine, ANSWER)
    async with start_server(with_engine=scripted, engine_config=THINKS) as server:
        first = await create(server, tools=[WEATHER], max_output_tokens=500)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "25C"}
            for item in first.output
            if item.type == "function_call"
        ]
        # As codex sends them back: without the content of the reasoning.
        items = [item.to_dict() | ({"content": None} if item.type == "reasoning" else {}) for item in first.output]
        scripted.script = "Sunny."
        await create(server, [{"role": "user", "content": "Hi"}, *items, *outputs], tools=[WEATHER])
        one, two = await server.turns()
        stored = await server.store.read(load_messages, two.turn_id)
    assert (two.kind, two.parent_turn_id, two.session_id) == ("continuation", one.turn_id, one.session_id)
    assert (one.state, one.dialect) == ("continued", "responses")
    assert [message["role"] for message in stored] == ["user", "assistant", "tool", "tool", "assistant"]
    assert stored[1]["reasoning_content"] == "Rome, so\nask."


async def test_previous_response_id_brings_the_conversation_but_not_its_instructions(start_server, engine):
    scripted = ScriptedEngine(engine, ANSWER)
    async with start_server(with_engine=scripted, engine_config=THINKS) as server:
        opening = [{"role": "developer", "content": "Stay."}, {"role": "user", "content": "Weather in Rome?"}]
        first = await create(server, opening, instructions="Be brief.", tools=[WEATHER], max_output_tokens=500)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "25C"} for item in first.output[2:]
        ]
        scripted.script = "Sunny."
        second = await create(server, outputs, previous_response_id=first.id, instructions="Be kind.", tools=[WEATHER])
        third = await create(server, "Thanks!", previous_response_id=second.id)
        turns = await server.turns()
        stored = await server.store.read(load_messages, 3)
    assert [turn.kind for turn in turns] == ["new", "continuation", "continuation"]
    assert [turn.parent_turn_id for turn in turns] == [None, 1, 2]
    assert (third.previous_response_id, third.instructions) == ("resp_2", None)
    assert [(message["role"], message["content"]) for message in stored] == [
        ("system", "Stay."),
        ("user", "Weather in Rome?"),
        ("assistant", "Let me see."),
        ("tool", "25C"),
        ("tool", "25C"),
        ("assistant", "Sunny."),
        ("user", "Thanks!"),
        ("assistant", "Sunny."),
    ]
    assert second.usage.input_tokens > first.usage.input_tokens


async def test_two_answers_to_one_previous_response_are_both_behind_it(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, "Yes.")) as server:
        first = await create(server)
        for words in ("One?", "Two?"):
            await create(server, words, previous_response_id=first.id)
        assert [turn.parent_turn_id for turn in await server.turns()] == [None, 1, 1]


@pytest.mark.parametrize("name", ["resp_99", "resp_0", "resp_x", "1", "resp_" + "9" * 30, "resp_²"])
async def test_a_response_that_is_not_there_cannot_be_continued_or_shown(server, name):
    with pytest.raises(openai.NotFoundError) as refused:
        await create(server, previous_response_id=name)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        await server.client.responses.retrieve(name)
    assert await server.turns() == []


async def test_a_turn_of_another_dialect_is_no_response(server):
    await server.client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.NotFoundError):
        await create(server, previous_response_id="resp_1")


async def test_responses_of_others_are_not_there(server):
    await create(server, user="ann")
    with pytest.raises(openai.NotFoundError):
        await create(server, previous_response_id="resp_1", user="bob")
    await create(server, previous_response_id="resp_1", user="ann")


async def test_a_key_shows_what_its_user_asked_and_nothing_else(server):
    ann, bob = ({"x-api-key": server.store.write_now(add_key, name, name, learn=True)} for name in ("ann", "bob"))
    await create(server, user="x", extra_headers=ann)
    with pytest.raises(openai.NotFoundError):
        await server.client.responses.retrieve("resp_1", extra_headers=bob)
    with pytest.raises(openai.NotFoundError):
        await create(server, previous_response_id="resp_1", user="x", extra_headers=bob)
    assert (await server.client.responses.retrieve("resp_1", extra_headers=ann)).id == "resp_1"


async def test_a_response_is_shown_as_it_was(start_server, engine):
    async with start_server(with_engine=ScriptedEngine(engine, ANSWER), engine_config=THINKS) as server:
        made = await create(server, tools=[WEATHER], max_output_tokens=500)
        shown = await server.client.responses.retrieve(made.id)
    assert shown.to_dict() | {"completed_at": None} == made.to_dict() | {"completed_at": None}


async def test_a_response_under_way_and_one_that_failed_say_so(start_server, gated):
    async with start_server(with_engine=gated) as server:
        asking = asyncio.create_task(create(server, extra_body=NEVER_ENDS))
        await eventually(lambda: gated.passed == 1)
        assert (await server.client.responses.retrieve("resp_1")).status == "in_progress"
        asking.cancel()
        await eventually(lambda: gated.closed == 1)

        async def failed() -> bool:
            return (await server.client.responses.retrieve("resp_1")).status == "failed"

        await eventually(failed)


# -- answers that end early --------------------------------------------------------------------------------------------


async def test_closing_a_stream_frees_the_engine_and_keeps_the_turn_as_aborted(start_server, engine):
    gate = GatedEngine(engine, tokens_before=3)
    async with start_server(with_engine=gate) as server:
        events = await create(server, stream=True, max_output_tokens=400, extra_body=NEVER_ENDS)
        await eventually(lambda: gate.passed == 3)
        await events.close()
        await eventually(lambda: engine.load == (0, 0) and gate.closed == 1)

        async def aborted() -> bool:
            return [turn.reason for turn in await server.turns()] == ["aborted"]

        await eventually(aborted)


@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_silence_is_filled_with_events_that_change_nothing(start_server, engine, monkeypatch, tokens_before):
    monkeypatch.setattr("nextstate.serve.streaming.KEEP_ALIVE_S", 0.05)
    gate = GatedEngine(ScriptedEngine(engine, "Quiet."), tokens_before=tokens_before)
    async with start_server(with_engine=gate) as server:
        alive = 0
        async with server.client.responses.stream(model="policy", input="Hi") as events:
            async for event in events:
                alive += event.type == "response.in_progress"
                if alive == 4:
                    gate.go_on.set()
            final = await events.get_final_response()
    assert alive >= 4
    assert final.output_text == "Quiet."


class FaultyEngine(GatedEngine):
    async def generate(self, prompt, sampling, policy):
        async for chunk in self._engine.generate(prompt, sampling, policy):
            yield chunk
            raise EngineFault("the engine failed while it computed this request: out of memory")


async def test_an_engine_fault_is_a_500_or_a_failed_response(start_server, engine):
    async with start_server(with_engine=FaultyEngine(engine)) as server:
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await create(server, extra_body=NEVER_ENDS)
        events = await stream(server, extra_body=NEVER_ENDS)
        assert [turn.reason for turn in await server.turns()] == ["engine_fault"] * 2
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert "out of memory" in events[-1].response.error.message


# -- bad input ---------------------------------------------------------------------------------------------------------


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(server):
    for streaming in (False, True):
        with pytest.raises(openai.BadRequestError, match="2048") as refused:
            await create(server, "x" * 2500, stream=streaming)
        assert refused.value.code == "context_length_exceeded"
    assert await server.turns() == []


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": 7}, "input", "a string or a list"),
        ({"input": []}, "input", "says nothing"),
        ({"input": ["Hi"]}, "input", "item 0 is not an object"),
        ({"input": [{"type": "message", "content": "Hi"}]}, "input", "'role'"),
        ({"input": [{"role": "user"}]}, "input", "'content'"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "'call_id'"),
        ({"input": [{"type": "item_reference", "id": "msg_1_0"}]}, "input", "previous_response_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "'input_image'"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens", "greater than 0"),
        ({"input": "Hi", "tools": [{"type": "function"}]}, "tools[0]", "'name'"),
        ({"input": "Hi", "tool_choice": "required"}, "tool_choice", "'tools'"),
        ({"input": "Hi", "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "function"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema"}}}, "text.format", "schema"),
        ({"input": "Hi", "background": True}, "background", "'background'"),
        ({"input": "Hi", "top_logprobs": 2}, "top_logprobs", "'top_logprobs'"),
        ({"input": "Hi", "include": ["message.output_text.logprobs"]}, "include", "'include'"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation", "'conversation'"),
        ({"input": "Hi", "prompt": {"id": "pmpt_1"}}, "prompt", "'prompt'"),
    ],
)
async def test_wrong_input_is_refused_by_the_name_of_its_field(server, body, param, says):
    response = await server.http.post("/v1/responses", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)
    assert says in error["message"]
    assert await server.turns() == []


async def test_what_codex_sends_beside_is_ignored_and_counted(server):
    await create(
        server,
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Code."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "compaction", "encrypted_content": "x"},
        ],
        tools=[{"type": "web_search", "external_web_access": True}, {"type": "custom", "name": "apply_patch"}],
        reasoning={"summary": "auto"},
        include=["reasoning.encrypted_content"],
        store=False,
        background=False,
        parallel_tool_calls=True,
        prompt_cache_key="01a22cfd-4e7b-72d0-8b24-95eb290597d1",
        extra_body={"client_metadata": {"turn_id": "1"}, "zz": 1},
    )
    page = (await server.http.get("/metrics")).text
    for field, count in {"tool": 2, "item": 1, "include": 1, "store": 1, "client_metadata": 1, "other": 1}.items():
        assert f'nextstate_ignored_fields_total{{field="{field}"}} {count}.0' in page
    [turn] = await server.turns()
    assert turn.session == "01a22cfd-4e7b-72d0-8b24-95eb290597d1"
