"""People at the official client, who keep talking whatever happens to the server, and remember what they were told."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import httpx
from openai import APIConnectionError, AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

from tests.crash.served import Served

QUESTIONS = ("a fox?", "how lazy is the dog?", "what jumps?", "is it brown?", "why so quick?")
REMARKS = ("Too long. One short sentence, please.", "Thanks, that is good.", "No lists, please.", "Good, go on.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An answer that a client saw to its end."""

    turn_id: int
    text: str
    finish: str
    version: int
    """By the header, when the answer began."""


@dataclass
class People:
    """Conversations side by side. `seen` outlives every server."""

    served: Served
    seed: int
    think_s: float = 0.5
    """Mean time from an answer to the next message."""
    max_tokens: int = 64
    thumbs: float = 0.0
    """Share of answers that get explicit feedback, and of conversations that end with a word."""
    seen: list[Seen] = field(default_factory=list)
    broken: int = 0
    """Answers that broke off after they had begun."""

    async def talk(self, who: int) -> None:
        """One conversation after another, for ever; a broken answer is asked for again."""
        chance = random.Random(f"{self.seed} {who}")
        asked = 0
        while True:
            asked += 1
            # Told apart by its number, so that no request looks like another one sent again.
            messages = [{"role": "user", "content": f"{chance.choice(QUESTIONS)} {who}.{asked}"}]
            for _ in range(3):
                try:
                    while (answer := await self.ask(messages)) is None:
                        await asyncio.sleep(0.1)
                except BadRequestError:  # the conversation has become too long for the model
                    break
                messages.append({"role": "assistant", "content": answer.text})
                messages.append({"role": "user", "content": chance.choice(REMARKS)})
                if chance.random() < self.thumbs:
                    await self.thumb(answer.turn_id, good=chance.random() < 0.5)
                await asyncio.sleep(chance.expovariate(1 / self.think_s))
            if chance.random() < self.thumbs:
                await self.ask([{"role": "user", "content": f"bye {who}.{asked}"}], done=True)

    async def thumb(self, turn_id: int, *, good: bool) -> None:
        """Explicit feedback, with words; lost when the server is not there."""
        body = {"turn_id": turn_id, "value": "good" if good else "bad", "words": "" if good else "Be brief, please."}
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            with contextlib.suppress(httpx.TransportError):
                (await http.post(f"{self.served.url}/feedback", json=body)).raise_for_status()

    async def ask(
        self, messages: list[dict[str, str]], *, max_tokens: int | None = None, done: bool = False
    ) -> Seen | None:
        """One request, streamed; None when the server broke off or is not there.

        Args:
            done: say that the session is over with this answer.
        """
        async with (
            DefaultAsyncHttpxClient(verify=False) as transport,
            AsyncOpenAI(
                base_url=self.served.url, api_key="unused", max_retries=0, timeout=60, http_client=transport
            ) as client,
        ):
            text, finish, turn_id, version = "", None, 0, 0
            try:
                stream = await client.chat.completions.create(
                    model="policy",
                    messages=messages,  # type: ignore[arg-type]
                    stream=True,
                    temperature=1.0,
                    max_tokens=max_tokens or self.max_tokens,
                    extra_headers={"X-Session-Done": "1"} if done else None,
                )
                version = int(stream.response.headers["x-nextstate-policy-version"])
                async for chunk in stream:
                    turn_id = int(chunk.id.removeprefix("chatcmpl-"))
                    text += chunk.choices[0].delta.content or ""
                    finish = chunk.choices[0].finish_reason or finish
            except (APIConnectionError, httpx.TransportError):
                self.broken += bool(turn_id)
        if finish is None:
            return None
        answer = Seen(turn_id=turn_id, text=text, finish=finish, version=version)
        self.seen.append(answer)
        return answer
