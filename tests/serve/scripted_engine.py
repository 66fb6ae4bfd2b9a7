"""An engine that says what a test wants it to say: the tiny model never calls a tool and never thinks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from nextstate.engines.local import LocalEngine
from nextstate.types import FinishReason, PolicyRef, Sampling, TokenChunk, TokenIds

LOGPROB = -0.5

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class ScriptedEngine:
    """The real engine, whose answers are `script`, token by token."""

    def __init__(self, engine: LocalEngine, script: str) -> None:
        self._engine, self.script = engine, script
        self.sampling: list[Sampling] = []
        """Of every request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: TokenIds, sampling: Sampling, policy: PolicyRef) -> AsyncIterator[TokenChunk]:
        self.sampling.append(sampling)
        tokenizer = self._engine.loaded.tokenizer
        ids = [*tokenizer.encode(self.script), tokenizer.eos_token_id][: sampling.max_tokens]
        for n, id_ in enumerate(ids, 1):
            await asyncio.sleep(0)
            cut = FinishReason.LENGTH if n == sampling.max_tokens else None
            finish = FinishReason.STOP if id_ == tokenizer.eos_token_id else cut
            yield TokenChunk(ids=(id_,), logprobs=(LOGPROB,), versions=(0,), finish=finish)
