from __future__ import annotations

import pytest
from tests.rows import finished_turn, new_turn

from nextstate.store.keys import add_key

HI = [{"role": "user", "content": "Hi"}]


async def answered(server) -> str:
    """The id of an answer that came to its end."""
    for seed in range(20):
        answer = await server.client.chat.completions.create(model="policy", messages=HI, seed=seed, max_tokens=60)
        if answer.choices[0].finish_reason == "stop":
            return answer.id
    raise AssertionError("no answer came to its end")


@pytest.mark.parametrize("by_number", [True, False])
async def test_feedback_brings_a_turn_to_the_judge(server, by_number):
    response_id = await answered(server)
    turn_id = int(response_id.removeprefix("chatcmpl-"))
    body = {"turn_id": turn_id if by_number else response_id, "value": "bad", "words": "Too long."}
    response = await server.http.post("/v1/feedback", json=body)
    assert response.json() == {"turn_id": turn_id, "outcome": "will_be_judged"}
    assert (await server.turns())[-1].state == "continued"
    assert len(server.judge_calls) == 1


async def test_feedback_on_a_turn_that_does_not_exist_is_a_404(server):
    response = await server.http.post("/v1/feedback", json={"turn_id": 9, "value": "good"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "turn_not_found")
    assert server.judge_calls == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"turn_id": 1, "value": "great"}, "value"),
        ({"turn_id": "first", "value": "good"}, "turn_id"),
        ({"turn_id": 2**70, "value": "good"}, "turn_id"),
        ({"value": "good"}, "turn_id"),
        ({"turn_id": 1, "value": "good", "text": "x"}, "text"),
    ],
)
async def test_wrong_feedback_is_refused_by_the_name_of_its_field(server, body, param):
    response = await server.http.post("/v1/feedback", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_words_that_are_not_unicode_are_refused(server):
    body = b'{"turn_id": 1, "value": "bad", "words": "\\ud800"}'
    response = await server.http.post("/v1/feedback", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "not unicode" in response.json()["error"]["message"]


async def test_feedback_on_anothers_turn_is_the_same_404_as_on_none(store, start_server):
    ann, bob = (
        {"x-api-key": store.write_now(add_key, name, user, learn=True)} for name, user in (("a", "ann"), ("b", "bob"))
    )
    async with start_server() as server:
        for owner in ("ann", "ann/some conversation"):
            thumb = {"turn_id": finished_turn(store, new=new_turn(user=owner)), "value": "good"}
            none = await server.http.post("/v1/feedback", json={**thumb, "turn_id": 99}, headers=bob)
            refused = await server.http.post("/v1/feedback", json=thumb, headers=bob)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "turn_not_found")
            assert refused.text.replace(str(thumb["turn_id"]), "99") == none.text
            assert (await server.http.post("/v1/feedback", json=thumb, headers=ann)).status_code == 200
    assert len(server.judge_calls) == 2
