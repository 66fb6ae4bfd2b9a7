"""Who plays a persona in one session: templates with varied wording, or a model behind an endpoint.

    opening()      -> the first message
    react(answer)  -> what the person says to it, and whether that was the last word

Whether an answer is as wished is decided by the persona's rule, never by who plays it; only the words differ.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import openai
from openai.types.chat import ChatCompletionMessageParam

from nextstate.people.personas import COMPLAINTS, Persona
from nextstate.people.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    words: str
    correction: bool
    """Whether the words ask for something else; thanks do not."""


class Person(Protocol):
    """One persona in one session."""

    def opening(self) -> str: ...

    async def react(self, answer: str) -> Reaction: ...


class TemplatePerson:
    """Speaks in sentences of the persona's own list. The same seed and answers give the same words."""

    def __init__(self, persona: Persona, task: Task, *, seed: int) -> None:
        self._persona, self._task = persona, task
        self._random = random.Random(seed)

    def opening(self) -> str:
        return self._persona.open(self._task)

    async def react(self, answer: str) -> Reaction:
        persona = self._persona
        if persona.wish.met(answer):
            return Reaction(words=self._random.choice(persona.thanks), correction=False)
        words = f"{self._random.choice(COMPLAINTS)} {self._random.choice(persona.directives)}"
        return Reaction(words=words, correction=True)


_PLAY = """\
You play a person who talks to an assistant. You are a {name}. What you want of every answer: {wish}. Reply to the \
assistant's last answer with one or two plain sentences, in the first person, as this person would type them, and with \
nothing else."""
_MISSED = "The last answer is not what you want: {fault}. Say so, and say how you want it instead."
_MET = "The last answer is what you want. Thank the assistant, and ask for nothing more."


class EndpointPerson:
    """Speaks through a model behind an OpenAI-compatible endpoint. Errors of the client propagate."""

    def __init__(self, persona: Persona, task: Task, *, client: openai.AsyncOpenAI, model: str, seed: int) -> None:
        self._persona, self._task = persona, task
        self._client, self._model, self._seed = client, model, seed
        self._said = [f"You: {self.opening()}"]

    def opening(self) -> str:
        return self._persona.open(self._task)

    async def react(self, answer: str) -> Reaction:
        fault = self._persona.wish.fault(answer)
        play = _PLAY.format(name=self._persona.name.replace("-", " "), wish=self._persona.wish.description)
        ask = _MET if fault is None else _MISSED.format(fault=fault.value.replace("_", " "))
        self._said.append(f"Assistant: {answer}")
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": f"{play}\n{ask}"},
            {"role": "user", "content": "\n\n".join(self._said)},
        ]
        response = await self._client.chat.completions.create(
            model=self._model, messages=messages, max_tokens=80, temperature=0.7, seed=self._seed
        )
        words = (response.choices[0].message.content or "").strip()
        self._said.append(f"You: {words}")
        return Reaction(words=words, correction=fault is not None)
