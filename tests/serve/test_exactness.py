"""What the store holds is what the engine sampled, and its log-probs are those of the stored transform.

Random conversations through the official client on four chat templates: tools, streams, stop strings, truncation, and
every part of the sampling transform. The log-probs are computed again from a full forward pass of the plain
transformers model, with the library's own logits processors.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.chat.templates import CHATML, LLAMA31, QWEN3, QWEN25
from tests.conftest import NEVER_ENDS
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nextstate.engines.local import LocalEngine
from nextstate.store.turns import load_turn
from nextstate.types import PolicyRef, Sampling, TokenChunk, TokenIds

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "run")
]
WORDS = ("fox", "Grüße", "日本", "42", "{}", "a\nb", "<tool_call>", "lazy dog", "😀", "  ")


class Recording:
    """The real engine under another chat template, with a note of all that it sampled."""

    def __init__(self, engine: LocalEngine, template: str) -> None:
        tokenizer = copy.deepcopy(engine.loaded.tokenizer)
        tokenizer.chat_template = template
        self._engine, self.loaded = engine, replace(engine.loaded, tokenizer=tokenizer)
        self.sampled: list[tuple[TokenIds, Sampling, list[int], list[float], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: TokenIds, sampling: Sampling, policy: PolicyRef) -> AsyncIterator[TokenChunk]:
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        self.sampled.append((prompt, sampling, ids, logprobs, versions))
        chunks = self._engine.generate(prompt, sampling, policy)
        try:
            async for chunk in chunks:
                ids.extend(chunk.ids)
                logprobs.extend(chunk.logprobs)
                versions.extend(chunk.versions)
                yield chunk
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]


def some_words(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 4)))


def some_options(chance: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": chance.choice([1, 4, 12]), "seed": chance.randrange(100)}
    choices = {
        "temperature": [0.3, 1.0, 1.7],
        "top_p": [0.5, 0.9],
        "presence_penalty": [1.5],
        "frequency_penalty": [-0.5, 0.7],
        "stop": [["e"], ["qu", "\n"]],
        "tools": [TOOLS],
    }
    extra = {"top_k": [1, 5, 30], "min_p": [0.1], "repetition_penalty": [1.3]}
    for name, values in choices.items():
        if chance.random() < 0.35:
            options[name] = chance.choice(values)
    options["extra_body"] = {name: chance.choice(values) for name, values in extra.items() if chance.random() < 0.3}
    if chance.random() < 0.5:
        options |= NEVER_ENDS
    return options


async def answer(client: Any, messages: list[Any], options: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """The assistant's message as a client puts it back into its history."""
    if not stream:
        made = await client.chat.completions.create(model="policy", messages=messages, **options)
        return made.choices[0].message.model_dump(exclude_none=True)
    content, calls = "", {}
    async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True, **options):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            kept = calls.setdefault(
                call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            kept["id"] += call.id or ""
            kept["function"]["name"] += call.function.name or ""
            kept["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls.values())} if calls else {})}


def expected_logprobs(model: Any, prompt: TokenIds, ids: list[int], asked: Sampling) -> list[float]:
    """Of each reply token, from one full forward pass and the library's processors."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0].float()
    found = []
    for n, token in enumerate(ids):
        before = torch.tensor([[*prompt, *ids[:n]]])
        row = logits[len(prompt) - 1 + n].clone()[None]
        if asked.repetition_penalty != 1:
            row = RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(before, row)
        for seen, times in Counter(ids[:n]).items():
            row[0, seen] -= asked.presence_penalty + asked.frequency_penalty * times
        for biased, bias in asked.logit_bias:
            row[0, biased] += bias
        row = TemperatureLogitsWarper(asked.temperature)(before, row)
        if asked.top_k:
            row = TopKLogitsWarper(asked.top_k)(before, row)
        if asked.top_p < 1:
            row = TopPLogitsWarper(asked.top_p)(before, row)
        if asked.min_p:
            row = MinPLogitsWarper(asked.min_p)(before, row)
        found.append(float(row.log_softmax(-1)[0, token]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3, LLAMA31], ids=["chatml", "qwen2.5", "qwen3", "llama3.1"])
async def test_what_is_stored_is_what_was_sampled(start_server, engine, tiny_model_path, template):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    recording = Recording(engine, template)
    chance = random.Random(template)
    async with start_server(with_engine=recording) as server:
        for _ in range(5):
            messages: list[Any] = [{"role": "system", "content": some_words(chance)}] if chance.random() < 0.5 else []
            for _ in range(3):
                messages.append({"role": "user", "content": some_words(chance)})
                said = await answer(server.client, messages, some_options(chance), stream=chance.random() < 0.5)
                messages.append(said)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": some_words(chance)}
                    for call in said.get("tool_calls", ())
                ]
        rows = await server.turns()
        assert len(rows) == len(recording.sampled) == 15
        for row, (prompt, asked, ids, logprobs, versions) in zip(rows, recording.sampled, strict=True):
            turn = await server.store.read(load_turn, row.turn_id)
            assert turn.prompt_ids == prompt
            assert (turn.reply_ids, turn.reply_versions) == (tuple(ids), tuple(versions))
            # Stored as float32, as they were drawn.
            assert turn.reply_logprobs == pytest.approx(logprobs, abs=1e-6)
            assert turn.reply_logprobs == pytest.approx(expected_logprobs(model, prompt, ids, asked), abs=1e-3)
            assert (row.reason == "sampling_not_reproducible") == (not asked.trainable)
        # Conversations of several turns were recognised without ids.
        assert Counter(row.kind for row in rows)["continuation"] >= 8
