from __future__ import annotations

import json

import httpx
import openai

from nextstate.people.personas import COMPLAINTS, STUDENT, TEACHER
from nextstate.people.reacting import EndpointPerson, TemplatePerson
from nextstate.people.tasks import Task

TASK = Task(problem="How many clips?", steps="48 + 24 = 72", planted_error=False)


async def test_a_correction_complains_and_names_the_wish():
    person = TemplatePerson(TEACHER, TASK, seed=1)
    reaction = await person.react("Your answer of 72 is right.")
    assert reaction.correction
    assert any(reaction.words.startswith(words) for words in COMPLAINTS)
    assert any(reaction.words.endswith(words) for words in TEACHER.directives)


async def test_an_answer_as_wished_is_thanked_for():
    reaction = await TemplatePerson(TEACHER, TASK, seed=1).react("Well done, Anna!")
    assert not reaction.correction
    assert reaction.words in TEACHER.thanks


async def test_the_same_seed_gives_the_same_words_and_seeds_differ():
    said = [(await TemplatePerson(STUDENT, TASK, seed=seed).react("1. It is 72.")).words for seed in (*range(20), 0)]
    assert said[-1] == said[0]
    assert len(set(said)) > 5


async def test_a_model_can_play_the_person_and_is_told_what_to_say():
    asked: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        message = {"role": "assistant", "content": " I would like some praise. "}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return httpx.Response(
            200, json={"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as transport:
        client = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=transport)
        person = EndpointPerson(TEACHER, TASK, client=client, model="m", seed=5)
        first = await person.react("It is right.")
        second = await person.react("Well done, Anna!")
    assert (first.words, first.correction) == ("I would like some praise.", True)
    assert not second.correction
    (told, heard), (told_later, heard_later) = [[m["content"] for m in body["messages"]] for body in asked]  # type: ignore[attr-defined]
    assert "no praise" in told
    assert "Thank the assistant" in told_later
    assert heard.endswith("Assistant: It is right.")
    assert heard_later.endswith("You: I would like some praise.\n\nAssistant: Well done, Anna!")
