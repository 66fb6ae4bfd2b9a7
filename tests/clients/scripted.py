"""A policy and a judge that say what a test's script wants: no model that fits here can drive an agent."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from nextstate.engines.local import LocalEngine
from nextstate.types import FinishReason, PolicyRef, Sampling, TokenChunk, TokenIds

CONTEXT_TOKENS = 131_072
"""For prompts of 50,000 characters, which a byte-level tokenizer makes almost as many tokens of."""

HARMLESS = "Notes"
"""What is said to requests outside of the script, such as those for a title."""

ENDLESS = "Once upon a time there was a fox."
"""This answer goes on until the client leaves."""

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


def call(name: str, **arguments: Any) -> str:
    """A tool call as a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedPolicy:
    """The real engine, except for what it says and how long a prompt may be.

    A script names for words of the user's the answers to them: the first one, and one more for every result of a tool
    that has come since. So it can be asked again, and side by side, and nothing is used up.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.script: Mapping[str, Sequence[str]] = {"": [HARMLESS]}
        self.loaded = replace(engine.loaded, context_tokens=CONTEXT_TOKENS)
        self._endless = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def tells_without_end(self, within_s: float) -> None:
        """Wait until an answer without end is on its way to a client."""
        async with asyncio.timeout(within_s):
            await self._endless.wait()

    def check_prompt(self, prompt_tokens: int) -> None:
        LocalEngine.check_prompt(self, prompt_tokens)  # type: ignore[arg-type]

    async def generate(self, prompt: TokenIds, sampling: Sampling, policy: PolicyRef) -> AsyncIterator[TokenChunk]:
        tokenizer = self.loaded.tokenizer
        answer = self._answer(tokenizer.decode(prompt))
        ids = [*tokenizer.encode(answer), tokenizer.eos_token_id][: sampling.max_tokens]
        if answer == ENDLESS:
            ids = ids[:-1] * 1000
        try:
            for n, id_ in enumerate(ids, 1):
                if answer == ENDLESS and n > 8:
                    self._endless.set()
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0)
                finish = FinishReason.STOP if id_ == tokenizer.eos_token_id else None
                finish = finish or (FinishReason.LENGTH if n == sampling.max_tokens else None)
                yield TokenChunk(ids=(id_,), logprobs=(-0.5,), versions=(0,), finish=finish)
        finally:
            self._endless.clear()

    def _answer(self, prompt: str) -> str:
        since = 0
        for role, text in reversed(_MESSAGE.findall(prompt)):
            since += role == "assistant"
            if role != "user" or text.startswith("<tool_response>"):
                continue
            # A client may put two messages of its user into one.
            words = max(self.script, key=text.rfind)
            if words in text:
                answer = self.script[words][min(since, len(self.script[words]) - 1)]
                return HARMLESS if "<tool_call>" in answer and "<tools>" not in prompt else answer
        return HARMLESS


def judge_endpoint(bad: str, good: str) -> httpx.MockTransport:
    """A judge model that goes by the user's words: some complain, some are content, others say nothing."""

    def answer(request: httpx.Request) -> httpx.Response:
        turn = json.loads(json.loads(request.content)["messages"][-1]["content"])
        said = " ".join(message["text"] for message in turn["what_followed"] if message["from"] == "user")
        vote = "bad" if bad in said else "good" if good in said else "neutral"
        opinion = f"The user has spoken.\nHINT: none\nVERDICT: {vote}"
        return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": opinion}}]})

    return httpx.MockTransport(answer)
