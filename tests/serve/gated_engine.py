"""What tests of the server share: an engine that can be held, and waiting for something to hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from nextstate.engines.local import LocalEngine
from nextstate.types import PolicyRef, Sampling, TokenChunk, TokenIds


class GatedEngine:
    """The real engine, whose answers pause behind their first tokens until `go_on` is set."""

    def __init__(self, engine: LocalEngine, tokens_before: int = 1) -> None:
        self._engine, self._tokens_before = engine, tokens_before
        self.go_on = asyncio.Event()
        self.passed = self.closed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: TokenIds, sampling: Sampling, policy: PolicyRef) -> AsyncIterator[TokenChunk]:
        chunks = self._engine.generate(prompt, sampling, policy)
        before = self._tokens_before
        try:
            if before == 0:
                await self.go_on.wait()
            async for chunk in chunks:
                yield chunk
                self.passed += 1
                before -= 1
                if before == 0:
                    await self.go_on.wait()
        finally:
            self.closed += 1
            await chunks.aclose()  # type: ignore[attr-defined]


async def eventually(holds: Callable[[], Any], within_s: float = 5.0) -> None:
    """Wait until something holds; it may be asynchronous."""
    deadline = time.monotonic() + within_s
    while True:
        result = holds()
        if await result if asyncio.iscoroutine(result) else result:
            return
        assert time.monotonic() < deadline, "it never held"
        await asyncio.sleep(0.02)
