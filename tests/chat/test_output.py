import json
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nextstate.chat.events import AnswerEvent, ReasoningDelta, TextDelta, ToolCall
from nextstate.chat.formats import OutputFormat
from nextstate.chat.output import OutputParser, new_call_id

HERMES, LLAMA = OutputFormat("think", "hermes"), OutputFormat("think", "llama")
PLAIN_HERMES, PLAIN_LLAMA = OutputFormat("none", "hermes"), OutputFormat("none", "llama")
TAG = "<|python_tag|>"


def merged(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """The same events, neighbours of a kind joined."""
    joined: list[AnswerEvent] = []
    for event in events:
        if joined and type(joined[-1]) is type(event) and not isinstance(event, ToolCall):
            joined[-1] = type(event)(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def parse(form, pieces, *, parse_tools=True, in_reasoning=False) -> tuple[list[AnswerEvent], list[str]]:
    ids = count(1)
    parser = OutputParser(form, parse_tools=parse_tools, in_reasoning=in_reasoning, new_id=lambda: f"call{next(ids)}")
    events = [event for piece in pieces for event in parser.add(piece)]
    return merged(events + parser.finish()), parser.malformed


def shown(form, text, **how) -> list[tuple[str, ...]]:
    """The answer in short, for a text that holds no attempt at a call that fails."""
    events, malformed = parse(form, [text], **how)
    assert malformed == []
    return [in_short(event) for event in events]


def in_short(event: AnswerEvent) -> tuple[str, ...]:
    if isinstance(event, ToolCall):
        return ("call", event.name, event.arguments)
    return ("text" if isinstance(event, TextDelta) else "reasoning", event.text)


def hermes(name="f", arguments='{"x": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name="f", arguments='{"x": 1}') -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


# -- reasoning ---------------------------------------------------------------------------------------------------------


def test_reasoning_and_answer_are_told_apart_and_the_lines_between_them_are_not_shown():
    text = "<think>\nOne.\n\nTwo. \n</think>\n\n The answer.\n"
    assert shown(HERMES, text) == [("reasoning", "One.\n\nTwo. "), ("text", " The answer.\n")]


def test_a_prompt_that_opened_the_reasoning_makes_the_answer_begin_in_it():
    assert shown(HERMES, "\nHm.\n</think>\n\nYes.", in_reasoning=True) == [("reasoning", "Hm."), ("text", "Yes.")]


def test_reasoning_that_is_cut_off_stays_reasoning():
    assert shown(HERMES, "<think>\nHm, so\n") == [("reasoning", "Hm, so\n")]
    assert shown(HERMES, "Hm, so </thi", in_reasoning=True) == [("reasoning", "Hm, so </thi")]


@pytest.mark.parametrize("empty", ["<think>\n\n</think>\n\n", "<think></think>", "\n <think> </think>\n"])
def test_empty_reasoning_is_none(empty: str):
    assert shown(HERMES, empty + "Yes.") == [("text", "Yes.")]


def test_the_marker_in_the_midst_of_a_text_is_text():
    assert shown(HERMES, "Write <think> first.") == [("text", "Write <think> first.")]


def test_an_end_of_reasoning_that_has_no_beginning_is_text():
    # What stands before it has been shown as text when it comes.
    assert shown(HERMES, "Hm.\n</think>\n\nYes.") == [("text", "Hm.\n</think>\n\nYes.")]
    assert shown(HERMES, "\n</think>\n\nYes.") == [("text", "\n</think>\n\nYes.")]


def test_calls_in_reasoning_are_thoughts():
    assert shown(HERMES, f"<think>Maybe {hermes()}</think>No.") == [("reasoning", f"Maybe {hermes()}"), ("text", "No.")]


def test_reasoning_may_go_on_between_calls():
    text = f"<think>a</think>{hermes('f')}\n<think>\nb\n</think>\n{hermes('g')}"
    assert shown(HERMES, text) == [
        ("reasoning", "a"),
        ("call", "f", '{"x":1}'),
        ("reasoning", "b"),
        ("call", "g", '{"x":1}'),
    ]


def test_a_model_without_reasoning_writes_its_markers_as_text():
    text = "<think>\na\n</think>\n\nb"
    assert shown(PLAIN_HERMES, text) == [("text", text)]
    assert shown(PLAIN_HERMES, text, in_reasoning=True) == [("text", text)]


# -- calls in the hermes form ------------------------------------------------------------------------------------------


def test_a_call_is_given_with_compact_arguments_and_the_lines_around_it_are_not_shown():
    read = hermes("read", '{"path": "ü", "n": [1, 2.5, null]}')
    text = f"I look.\n\n{read}\n{hermes('ls', '{}')}\n"
    assert parse(HERMES, [text]) == (
        [
            TextDelta("I look."),
            ToolCall(0, "call1", "read", '{"path":"ü","n":[1,2.5,null]}'),
            ToolCall(1, "call2", "ls", "{}"),
        ],
        [],
    )


def test_a_call_comes_as_soon_as_its_marker_is_closed():
    parser = OutputParser(HERMES, parse_tools=True)
    assert parser.add(hermes()[:-1]) == []
    assert [in_short(event) for event in parser.add(">")] == [("call", "f", '{"x":1}')]


def test_text_behind_a_call_is_shown():
    assert shown(HERMES, f"{hermes()}\n\nDone.\n") == [("call", "f", '{"x":1}'), ("text", "Done.\n")]


def test_arguments_written_as_a_json_string_are_read():
    assert shown(HERMES, hermes(arguments='"{\\"x\\": \\"a b\\"}"')) == [("call", "f", '{"x":"a b"}')]


def test_markers_inside_an_argument_belong_to_the_argument():
    arguments = '{"text": "<tool_call>{\\"a\\"}</tool_call> and </tool_call>"}'
    assert shown(HERMES, hermes(arguments=arguments)) == [
        ("call", "f", json.dumps(json.loads(arguments)).replace(": ", ":"))
    ]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"x": 1}',
        '{"name": "f", "arguments": {"x": }}',
        '{"name": "f", "arguments": {"x": "two\nlines"}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": "\\ud83e"}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "not json"}',
        '{"name": "f"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        '[{"name": "f", "arguments": {}}]',
        '{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "}}",
        "f(x=1)",
        "",
    ],
)
def test_a_call_that_is_none_stays_visible_to_the_letter(body: str):
    call = f"<tool_call>{body}</tool_call>"
    assert parse(HERMES, [f"a\n{call}\n\nb"]) == ([TextDelta(f"a\n{call}\n\nb")], [call])


def test_a_call_that_is_not_closed_stays_visible_when_the_answer_ends():
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n'
    assert parse(HERMES, [f"a\n{call}"]) == ([TextDelta(f"a\n{call}")], [call])


@pytest.mark.parametrize(
    "bad", ['<tool_call>{"name": "f}</tool_call>', '<tool_call>\n{"name": "f", "arguments": {}}\n', "<tool_call>"]
)
def test_a_good_call_behind_a_bad_one_is_given(bad: str):
    events, malformed = parse(HERMES, [f"{bad}{hermes()}"])
    assert malformed == [bad]
    assert events == [TextDelta(bad), ToolCall(0, "call1", "f", '{"x":1}')]


def test_a_closing_marker_alone_is_text():
    assert shown(HERMES, "a </tool_call> b") == [("text", "a </tool_call> b")]


# -- calls in the llama form -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", ["", "\n ", TAG, TAG + "\n", "<think>\n\n</think>\n\n"])
def test_a_bare_object_where_the_answer_begins_is_a_call(lead: str):
    assert shown(LLAMA, lead + llama("read", '{"path": "a}"}')) == [("call", "read", '{"path":"a}"}')]


def test_a_bare_call_comes_with_its_last_brace():
    parser = OutputParser(LLAMA, parse_tools=True)
    assert parser.add(llama()[:-1]) == []
    assert [in_short(event) for event in parser.add("}")] == [("call", "f", '{"x":1}')]


@pytest.mark.parametrize("between", [";", "; ", "\n", "", ";\n" + TAG, TAG])
def test_several_calls_stand_one_behind_the_other(between: str):
    text = llama("f") + between + llama("g")
    assert shown(LLAMA, text) == [("call", "f", '{"x":1}'), ("call", "g", '{"x":1}')]


def test_what_llama_writes_beside_its_own_form_is_read_as_well():
    text = '{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "arguments": "{}"}'
    assert shown(LLAMA, text) == [("call", "f", "{}"), ("call", "g", "{}")]


def test_text_before_the_tag_and_behind_a_call_is_shown():
    text = f"I look.\n{TAG}{llama()}\nDone; really."
    assert shown(LLAMA, text) == [("text", "I look."), ("call", "f", '{"x":1}'), ("text", "Done; really.")]


@pytest.mark.parametrize(
    "answer",
    [
        '{"answer": 42}',
        '{"name": "Ann", "age": 7}',
        '{"type": "object", "properties": {}}',
        f"Like this:\n{llama()}",
        f"```json\n{llama()}\n```",
        "{",
        '{"na',
    ],
)
def test_json_that_is_an_answer_is_text(answer: str):
    assert shown(LLAMA, answer) == [("text", answer)]


def test_an_answer_in_json_is_streamed_as_soon_as_it_can_be_no_call():
    parser = OutputParser(LLAMA, parse_tools=True)
    assert parser.add('{"an') == [TextDelta('{"an')]


@pytest.mark.parametrize(
    "bad",
    [
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": {"x": }}',
        '{"name": "f", "parameters": {"x": 1}',
        '{"parameters": {"x": 1}}',
        f'{TAG}{{"name": "f"}}',
        f"{TAG}print(1)",
        TAG,
    ],
)
def test_a_llama_call_that_is_none_stays_visible_to_the_letter(bad: str):
    assert parse(LLAMA, [f"\n{bad}"]) == ([TextDelta(f"\n{bad}")], [bad])


def test_a_good_call_behind_the_tag_is_given_after_a_bad_one():
    events, malformed = parse(LLAMA, [f'{TAG}print("{{")\n{TAG}{llama()}'])
    assert events == [TextDelta(f'{TAG}print("{{")\n'), ToolCall(0, "call1", "f", '{"x":1}')]
    assert malformed == [f'{TAG}print("{{")\n']


# -- any text, any pieces ----------------------------------------------------------------------------------------------


def test_without_tools_a_call_is_text():
    assert shown(HERMES, f"a\n{hermes()}\n", parse_tools=False) == [("text", f"a\n{hermes()}\n")]
    assert shown(LLAMA, llama(), parse_tools=False) == [("text", llama())]


def test_ids_are_letters_and_digits_and_never_the_same():
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(one.isascii() and one.isalnum() and one.startswith("call") and len(one) <= 40 for one in ids)


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", TAG]
FRAGMENTS = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from([marker[:cut] for marker in MARKERS for cut in (1, 2, 5, len(marker) - 1)]),
    st.sampled_from(
        ["\n", "\n\n", "\r\n", " ", "\t", ";", "; ", "\u2003", "{", "}", '"', "\\", '\\"', "[", "]", ",", ":"]
    ),
    st.sampled_from([hermes(), hermes("g", '"{}"'), llama(), llama("g", '{"t": "</tool_call>"}'), llama("", "[]")]),
    st.sampled_from(['{"name": "f", ', '"arguments": {', '"parameters": {', '{"name"', '{"type": "function", ', "{ }"]),
    st.sampled_from(
        ['<tool_call>{"name": "f", "arguments": {"x": "', '"}}</tool_call>', "日本", "🦊", "e\u0301", "ok"]
    ),
    st.text(max_size=4),
)
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)
FORMS = st.sampled_from([HERMES, LLAMA, PLAIN_HERMES, PLAIN_LLAMA])


@settings(max_examples=600, deadline=None)
@given(
    form=FORMS, text=TEXTS, parse_tools=st.booleans(), in_reasoning=st.booleans(), cuts=st.lists(st.integers(0, 200))
)
def test_streamed_and_unstreamed_answers_are_the_same(form, text: str, parse_tools, in_reasoning, cuts: list[int]):
    how = {"parse_tools": parse_tools, "in_reasoning": in_reasoning}
    whole = parse(form, [text], **how)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse(form, [text[a:b] for a, b in pairwise(edges)], **how) == whole
    assert parse(form, list(text), **how) == whole


@settings(max_examples=300, deadline=None)
@given(form=FORMS, text=TEXTS, parse_tools=st.booleans())
def test_nothing_is_lost_but_markers_and_the_white_space_beside_them(form, text: str, parse_tools: bool):
    events, malformed = parse(form, [text], parse_tools=parse_tools)
    content = "".join(event.text for event in events if isinstance(event, TextDelta))
    if all(isinstance(event, TextDelta) for event in events) and not text.lstrip().startswith("<think>"):
        assert content == text
    assert all(bad in content for bad in malformed)
    at = 0
    for event in events:
        if isinstance(event, ToolCall):
            assert isinstance(json.loads(event.arguments), dict)
        else:
            assert event.text
            at = text.index(event.text, at) + len(event.text)


_CHARACTERS = st.characters(exclude_categories=["Cs"])
_WORDS = st.text(st.characters(exclude_characters="<{", exclude_categories=["Cs"]), max_size=12)
_LEAVES = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(_CHARACTERS, max_size=8)
_JSON = st.recursive(
    _LEAVES | st.sampled_from(MARKERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\é', max_size=3), inner, max_size=3),
    max_leaves=6,
)
_CALLS = st.lists(
    st.tuples(st.text("abc_", min_size=1, max_size=5), st.dictionaries(st.sampled_from("xyz"), _JSON, max_size=3)),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(form=FORMS, reasoning=_WORDS, said=_WORDS, calls=_CALLS, indent=st.sampled_from([None, 1]))
def test_what_was_written_in_the_models_form_is_read_back(form: OutputFormat, reasoning, said, calls, indent):
    thinks = form.reasoning == "think"
    text = f"<think>\n{reasoning}\n</think>\n\n{said}" if thinks else said
    if form.tools == "hermes":
        written = [json.dumps({"name": n, "arguments": a}, indent=indent, ensure_ascii=False) for n, a in calls]
        text += "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)
    elif calls:
        written = [json.dumps({"name": n, "parameters": a}, indent=indent, ensure_ascii=False) for n, a in calls]
        text += TAG + "; ".join(written)
    events, malformed = parse(form, list(text))
    assert malformed == []
    given_calls = [(e.name, json.loads(e.arguments)) for e in events if isinstance(e, ToolCall)]
    assert given_calls == calls
    thought = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    assert thought == ("" if not thinks or reasoning.isspace() else reasoning.strip("\r\n"))
    content = "".join(e.text for e in events if isinstance(e, TextDelta))
    assert content.strip() == said.strip()
