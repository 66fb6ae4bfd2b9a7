"""Streams that cannot go on, in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gated_engine import GatedEngine

from nextstate.errors import EngineFault

MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/generate": {"prompt_ids": [5, 6]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/responses": {"input": "Hello"},
}


class BreakingEngine(GatedEngine):
    """The real engine, which fails behind the first token."""

    error: Exception

    async def generate(self, prompt, sampling, policy):
        async for chunk in self._engine.generate(prompt, sampling, policy):
            yield chunk
            raise self.error


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("error", "said"),
    [(EngineFault("out of memory"), "out of memory"), (ZeroDivisionError("nobody thought of it"), "its log says more")],
)
async def test_a_stream_that_breaks_off_says_so_in_its_last_event(start_server, engine, path, error, said):
    breaking = BreakingEngine(engine)
    breaking.error = error
    async with start_server(with_engine=breaking) as server:
        model = (await server.client.models.list()).data[0].id
        # Drawn greedily, whose first token is none that ends the answer.
        body = BODIES[path] | {"model": model, "stream": True, "temperature": 0}
        reply = await server.http.post(path, json=body)
        assert reply.status_code == 200
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        assert said in json.dumps(events[-1]["error"] if "error" in events[-1] else events[-1]["response"]["error"])
        [turn] = await server.turns()
        assert (turn.state, turn.reason) == ("left_out", "engine_fault")
