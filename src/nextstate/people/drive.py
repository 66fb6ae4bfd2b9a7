"""Simulated users at a real endpoint, through the official OpenAI client, streaming, with no header of ours sent.

`talk` runs one session, `ask` puts single questions to measure the answers. Errors of the client propagate.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import openai
from openai.types.chat import ChatCompletionMessageParam

from nextstate.people.simulated import SimulatedUser

TURN_ID_HEADER = "x-nextstate-turn-id"
POLICY_VERSION_HEADER = "x-nextstate-policy-version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed completion, as the client saw it."""

    question: str
    """The user message that was answered."""
    reply: str
    finish_reason: str | None
    """'stop', 'length', ...; None when the stream ended without one."""
    turn_id: str | None
    """What the server calls this turn; None from a server that does not say."""
    policy_version: int | None
    """The version that began the reply; None from a server that does not say."""
    first_token_s: float | None
    """Seconds from sending the request to the first text; None for an empty reply."""
    gaps_s: tuple[float, ...]
    """[text chunks - 1] seconds between one piece of text and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLog:
    """One turn of a session, and what the user made of it."""

    index: int
    """Place in the session. At 0 the prompt is a bare question, which no earlier words of the user have coloured."""
    answer: Answer
    met: bool
    """Whether the reply meets the user's wish: the rule's word, not a judge's."""
    reaction: str | None
    """What the user said next; None when the user left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLog:
    turns: tuple[TurnLog, ...]
    """Oldest first; the last one has no reaction."""


async def talk(
    client: openai.AsyncOpenAI,
    user: SimulatedUser,
    *,
    model: str,
    max_tokens: int,
    temperature: float,
    on_turn: Callable[[TurnLog], None] | None = None,
) -> SessionLog:
    """One session, from the user's first question until the user leaves. `on_turn` hears of each turn as it ends."""
    messages: list[ChatCompletionMessageParam] = []
    turns: list[TurnLog] = []
    message: str | None = user.open()
    while message is not None:
        messages.append({"role": "user", "content": message})
        answer = await _stream(client, messages, message, model=model, max_tokens=max_tokens, temperature=temperature)
        messages.append({"role": "assistant", "content": answer.reply})
        message = user.react(answer.reply)
        turn = TurnLog(index=len(turns), answer=answer, met=user.wish.met(answer.reply), reaction=message)
        turns.append(turn)
        if on_turn is not None:
            on_turn(turn)
    return SessionLog(turns=tuple(turns))


async def ask(
    client: openai.AsyncOpenAI,
    questions: Sequence[str],
    *,
    model: str,
    max_tokens: int,
    temperature: float,
    seed: int = 0,
    concurrency: int = 4,
) -> list[Answer]:
    """Put each question by itself and return the answers in the order of the questions.

    Nothing follows these answers, so nothing is learned from them. A question's sampling seed depends on `seed` and
    its own text alone, so the same question can be compared between versions whatever else is asked.
    """
    free = asyncio.Semaphore(concurrency)

    async def answer(question: str) -> Answer:
        async with free:
            return await _stream(
                client,
                [{"role": "user", "content": question}],
                question,
                model=model,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=question_seed(question, seed),
            )

    return await asyncio.gather(*(answer(question) for question in questions))


def question_seed(question: str, seed: int) -> int:
    """crc32 of "<seed>:<question>": the same in every process, unlike hash()."""
    return zlib.crc32(f"{seed}:{question}".encode())


async def _stream(
    client: openai.AsyncOpenAI,
    messages: Sequence[ChatCompletionMessageParam],
    question: str,
    *,
    model: str,
    max_tokens: int,
    temperature: float,
    seed: int | None = None,
) -> Answer:
    sent = time.perf_counter()
    response = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=list(messages),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=openai.omit if seed is None else seed,
        stream=True,
    )
    pieces: list[str] = []
    arrivals: list[float] = []
    finish_reason: str | None = None
    async for chunk in response.parse():
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.append(choice.delta.content)
                arrivals.append(time.perf_counter())
            finish_reason = choice.finish_reason or finish_reason
    version = response.headers.get(POLICY_VERSION_HEADER)
    return Answer(
        question=question,
        reply="".join(pieces),
        finish_reason=finish_reason,
        turn_id=response.headers.get(TURN_ID_HEADER),
        policy_version=None if version is None else int(version),
        first_token_s=arrivals[0] - sent if arrivals else None,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(arrivals)),
    )
