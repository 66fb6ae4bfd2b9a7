"""Plain prompts through the official client, with the tiny model."""

from __future__ import annotations

import openai
import pytest
from tests.conftest import NEVER_ENDS
from tests.rows import a_verdict

from nextstate.store.judging import add_feedback, write_verdict
from nextstate.store.learning import load_update, start_update
from nextstate.store.turns import load_turn
from nextstate.types import Feedback, Vote


async def complete(server, prompt="the quick", **options):
    return await server.client.completions.create(model="policy", prompt=prompt, **{"seed": 1, **options})


async def test_the_prompt_is_read_as_it_is_and_the_text_comes_raw(server, engine):
    answer = await complete(server, max_tokens=10)
    turn = await server.store.read(load_turn, 1)
    tokenizer = engine.loaded.tokenizer
    assert tokenizer.decode(turn.prompt_ids) == "the quick"
    assert answer.choices[0].text == tokenizer.decode(turn.reply_ids, skip_special_tokens=True)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(turn.prompt_ids), len(turn.reply_ids))


async def test_a_streamed_answer_is_the_unstreamed_one(server):
    whole = await complete(server, max_tokens=30)
    chunks = [c async for c in await complete(server, max_tokens=30, stream=True)]
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_a_prompt_of_token_ids_is_the_same_prompt(server, engine):
    ids = engine.loaded.tokenizer.encode("the quick")
    as_text, as_ids, listed = [await complete(server, p, max_tokens=10) for p in ("the quick", ids, ["the quick"])]
    assert as_text.choices[0].text == as_ids.choices[0].text == listed.choices[0].text


async def test_logprobs_have_texts_and_offsets_that_fit_the_answer(server):
    choice = (await complete(server, max_tokens=10, logprobs=2, extra_body=NEVER_ENDS)).choices[0]
    turn = await server.store.read(load_turn, 1)
    assert choice.logprobs.token_logprobs == pytest.approx(list(turn.reply_logprobs))
    assert [len(tops) <= 2 for tops in choice.logprobs.top_logprobs] == [True] * len(turn.reply_ids)
    assert choice.logprobs.text_offset[0] == 0
    assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])


async def test_a_raw_prompt_is_trained_without_a_teacher_for_no_hint_can_be_put_into_it(server):
    await complete(server, max_tokens=10)
    await server.store.write(add_feedback, 1, Feedback(value=Vote.BAD, words="One short sentence, please."))
    await server.store.write(write_verdict, a_verdict(1))
    update_id = await server.store.write(start_update, limit=8)
    [sample] = (await server.store.read(load_update, update_id)).samples
    assert (sample.reward, sample.hints) == (-1, ())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[60], [61]]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 30}, "logprobs"),
        ({}, "prompt"),
    ],
)
async def test_wrong_input_is_refused_by_the_name_of_its_field(server, body, param):
    response = await server.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
    assert await server.turns() == []


async def test_a_prompt_longer_than_the_context_is_refused(server):
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(server, [60] * 3000)
    assert refused.value.code == "context_length_exceeded"
