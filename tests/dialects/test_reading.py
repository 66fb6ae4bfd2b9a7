"""What each dialect's bodies become."""

from __future__ import annotations

import pytest

from nextstate.dialects import chat, messages, responses


def call(call_id, name, arguments):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_chat_parts_become_text_and_unknown_parts_are_reported():
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    read = chat.read_messages({"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]})
    assert read.messages == ({"role": "system", "content": "x"}, {"role": "user", "content": "ab"})
    assert read.unreadable == {"part 'image_url'": 1}


def test_chat_keeps_calls_reasoning_and_ids_and_leaves_out_what_is_empty():
    said = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [call("call_1", "ls", '{"a": 1}')],
    }
    result = {"role": "tool", "content": "ok", "tool_call_id": "call_1"}
    read = chat.read_messages(
        {"messages": [said, result], "tools": [{"type": "web_search"}, {"function": {"name": "f"}}]}
    )
    assert read.messages[0] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [call("call_1", "ls", '{"a": 1}')],
    }
    assert read.messages[1] == result
    assert read.tools == ({"type": "function", "function": {"name": "f"}},)
    assert read.ignored == {"tool 'web_search'": 1}


def test_a_plain_prompt_is_the_users_message():
    assert chat.read_prompt({"prompt": "Once"}).messages == ({"role": "user", "content": "Once"},)
    assert chat.read_prompt({"prompt": ["Once", "Twice"]}).ignored == {"further prompt": 1}
    assert chat.read_prompt({"prompt": [1, 2]}).unreadable == {"prompt of token ids": 1}


def test_items_that_the_model_said_in_one_go_become_one_message():
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "plan"}], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I go."}]},
        {"type": "function_call", "call_id": "c1", "name": "a", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "b", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        {"type": "item_from_next_year"},
    ]
    read = responses.read_messages({"instructions": "Be brief.", "input": items})
    assert read.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "I go.",
            "reasoning_content": "plan",
            "tool_calls": [call("c1", "a", "{}"), call("c2", "b", '{"x":1}')],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Done."},
    )
    assert read.ignored == {"item 'item_from_next_year'": 1}


def test_two_answers_in_a_row_stay_two():
    items = [
        {"type": "message", "role": "assistant", "content": "One."},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": "Two."},
    ]
    said = responses.read_messages({"input": items}).messages
    assert [message["content"] for message in said] == ["One.", "Two."]


def test_tools_of_responses_are_flat_namespaces_opened_and_others_counted():
    tools = [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
        {"type": "web_search"},
    ]
    read = responses.read_messages({"input": "hi", "tools": tools})
    assert [tool["function"]["name"] for tool in read.tools] == ["f", "g"]
    assert read.tools[0]["function"] == {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert read.ignored == {"tool 'web_search'": 1}


def test_blocks_become_tool_messages_text_calls_and_reasoning():
    body = {
        "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}],
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "system", "content": "note"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I go."},
                    {"type": "tool_use", "id": "t1", "name": "a", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
                    {"type": "text", "text": "and more"},
                ],
            },
        ],
        "tools": [{"name": "a", "input_schema": {"type": "object"}}, {"type": "bash_20250124", "name": "bash"}],
    }
    read = messages.read_messages(body)
    assert read.messages == (
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "go"},
        {"role": "system", "content": "note"},
        {
            "role": "assistant",
            "content": "I go.",
            "reasoning_content": "hm",
            "tool_calls": [call("t1", "a", '{"x":1}')],
        },
        {"role": "tool", "content": "1", "tool_call_id": "t1"},
        {"role": "user", "content": "and more"},
    )
    assert read.tools == ({"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},)
    assert read.ignored == {"tool 'bash_20250124'": 1}


@pytest.mark.parametrize(
    "reader", [chat.read_messages, chat.read_prompt, responses.read_messages, messages.read_messages]
)
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None, "input": None, "prompt": None, "tools": None},
        {"messages": "x", "input": 3, "prompt": {}, "tools": "x"},
        {"messages": [1, None, {}, {"role": 3, "content": 7}, {"role": "assistant", "content": [None, 3, {}]}]},
        {"input": [1, None, {}, {"type": "function_call"}, {"type": "reasoning", "summary": 3}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}], "tool_calls": [None, {"function": 3}]}]},
        {"tools": [None, 3, {}, {"function": {}}, {"name": 3}, {"type": "namespace", "name": "n", "tools": 3}]},
    ],
)
def test_no_body_breaks_a_reader(reader, body):
    for message in reader(body).messages:
        assert isinstance(message["content"], str)
