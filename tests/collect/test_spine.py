import pytest

from nextstate.collect.spine import answer_spine, read, request_spine

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_ab-1", "type": "function", "function": {"name": "ls", "arguments": '{"a":   1}'}}],
}
CALL_AS_REPLAYED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "callab1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}}],
    "refusal": None,
}


def test_system_text_changes_nothing():
    dated = [{"role": "system", "content": "It is Monday."}, HI]
    assert request_spine(dated) == request_spine([{"role": "developer", "content": "It is Tuesday."}, HI])
    assert request_spine(dated) == request_spine([HI])


@pytest.mark.parametrize(
    "same",
    [
        {"role": "user", "content": " Hi\n"},
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}},
    ],
)
def test_what_clients_change_on_the_way_back_changes_nothing(same):
    assert request_spine([same]) == request_spine([HI])


def test_ids_and_arguments_of_tool_calls_are_compared_without_punctuation_and_spacing():
    assert request_spine([HI, CALL]) == request_spine([HI, CALL_AS_REPLAYED])


@pytest.mark.parametrize(
    "other",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "tool", "content": "Hi"}],
        [HI, HI],
        [HI, CALL],
        [{"role": "user", "content": 'Hi"]["user", "Hi'}],
    ],
)
def test_other_conversations_have_other_spines(other):
    assert request_spine(other) != request_spine([HI])


def test_the_next_request_carries_the_spine_of_the_answer():
    system = {"role": "system", "content": "Be kind."}
    after = [system, HI, HELLO, {"role": "user", "content": "More"}, HELLO, HI]
    answers = read(after).answers
    assert [answer.index for answer in answers] == [2, 4]
    assert [answer.spine for answer in answers] == [answer_spine([HI], HELLO), answer_spine(after[:4], HELLO)]


def test_requests_of_system_text_alone_are_told_apart_by_it():
    one, two = [{"role": "system", "content": "One"}], [{"role": "system", "content": "Two"}]
    assert request_spine(one) != request_spine(two)
    assert read([*one, HELLO, HI]).answers[0].spine == answer_spine(one, HELLO)
