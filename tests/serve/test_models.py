from __future__ import annotations

import openai
import pytest

HI = [{"role": "user", "content": "Hi"}]


async def test_the_policy_and_its_base_model_are_listed_with_their_version(server):
    listed = (await server.client.models.list()).data
    assert [model.id for model in listed] == ["policy", "policy-aux", "tiny"]
    assert {(m.base_model, m.version, m.context_tokens) for m in listed} == {("tiny", 0, 2048)}


@pytest.mark.parametrize("name", ["policy", "policy-aux", "tiny", "policy@0"])
async def test_a_model_that_exists_answers(server, name):
    answer = await server.client.chat.completions.create(model=name, messages=HI, max_tokens=3)
    assert answer.model == name
    assert (await server.client.models.retrieve(name)).id == name


@pytest.mark.parametrize(
    ("name", "says"),
    [("gpt-5", "'policy', also known as 'tiny'"), ("policy@7", "policy@0"), ("tiny@0", "'policy'"), ("", "'policy'")],
)
async def test_a_model_that_does_not_exist_is_refused_with_those_that_do(server, name, says):
    with pytest.raises(openai.NotFoundError) as refused:
        await server.client.chat.completions.create(model=name, messages=HI)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert says in refused.value.body["message"]
    assert await server.turns() == []


async def test_work_on_the_side_has_a_name_of_its_own_and_is_never_learned_from(server):
    await server.client.chat.completions.create(model="policy-aux", messages=HI, max_tokens=3)
    [turn] = await server.turns()
    assert (turn.kind, turn.reason) == ("side", "side_request")
