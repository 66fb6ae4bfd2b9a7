"""A long life: hundreds of versions one after another, and what is served stays what was trained."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nextstate.config import GateConfig, LearnConfig
from nextstate.engines.adapters import lora_config
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import load
from nextstate.learn import checkpoint
from nextstate.learn.gate import examine, measure_probe
from nextstate.learn.trainer import Trainer
from nextstate.types import PolicyRef, Sampling, ScoreRequest, TokenIds
from tests.learn.conftest import TrainerFactory, a_sample, make_trainer, shake

__all__ = ["make_trainer"]

PUBLISHES = 500
SWAPS = 1000
PROMPT: TokenIds = tuple(range(45, 95))
"""Long enough for the prefix cache."""
REPLY: TokenIds = (100, 101, 102, 103)


@pytest.fixture
def engine(tiny_model_path: Path) -> Iterator[LocalEngine]:
    """Its answers end by nothing but their limit."""
    endless = replace(load(str(tiny_model_path)), end_ids=frozenset())
    running = LocalEngine(endless, prefix_cache_tokens=2000)
    running.prepare_adapters(lora_config(4, 8, "all-linear"))
    running.start()
    yield running
    running.stop()


@pytest.mark.slow
async def test_at_learning_rate_0_five_hundred_versions_drift_nowhere(
    engine: LocalEngine, tiny_model_path: Path, tmp_path: Path
):
    config = LearnConfig(rank=4, alpha=8, learning_rate=0)
    trainer = Trainer(load(str(tiny_model_path)), config)
    shake(trainer)  # where the policy is the base, nothing could be lost on the way
    samples = [a_sample(trainer, hints=("be brief, please",))]
    differences, divergences = [], []
    for version in range(1, PUBLISHES + 1):
        metrics = trainer.update(samples, oldest_version=0)
        assert metrics["grad_norm"] > 0
        folder = checkpoint.save(trainer, tmp_path, version, probe=measure_probe(trainer), metrics=metrics)
        result = await examine(engine, version, folder, GateConfig(), exact=True)
        assert result.passed, result.why
        engine.serve_version(version)
        differences.append(result.measured["probe_difference"])
        divergences.append(result.measured["divergence"])
        checkpoint.restore(trainer, folder)  # as after a restart: the next version is made of what is on disk
    print(
        f"{PUBLISHES} publishes: served and trained differ by {max(differences):.1e} nats at most; divergence "
        f"{divergences[0]:.6f} nats a token, {max(divergences) - min(divergences):.1e} from the least to the most"
    )
    assert max(differences) < 2e-5
    assert divergences[0] > 1e-3
    assert max(divergences) == min(divergences)


@pytest.mark.slow
async def test_a_thousand_swaps_cost_no_memory_and_each_version_answers_with_its_own_numbers(
    engine: LocalEngine, tiny_model_path: Path, make_trainer: TrainerFactory, tmp_path: Path
):
    trainer, artifacts = make_trainer(), []
    for n in range(4):  # one more than there are slots
        shake(trainer)
        artifacts.append(checkpoint.save(trainer, tmp_path, n, probe={}, metrics={}))
    expected = [_by_plain_peft(tiny_model_path, artifact) for artifact in artifacts]
    assert min((a - b).abs().max() for a, b in pairwise(expected)) > 1e-2
    request = ScoreRequest(ids=PROMPT + REPLY, start=len(PROMPT))
    sampling = Sampling(max_tokens=4, seed=1)
    answers: dict[int, list[tuple[TokenIds, tuple[float, ...]]]] = {}
    worst, after_a_tenth = 0.0, None
    for version in range(1, SWAPS + 1):
        which = version % len(artifacts)
        await engine.publish(PolicyRef(version=version), artifacts[which])
        engine.serve_version(version)
        chunks = [chunk async for chunk in engine.generate(PROMPT, sampling, PolicyRef())]
        assert {v for chunk in chunks for v in chunk.versions} == {version}
        answer = tuple(c.ids[0] for c in chunks), tuple(c.logprobs[0] for c in chunks)
        answers.setdefault(which, []).append(answer)
        # The prompt is in the cache now, under this version and under those before it.
        (scores,) = await engine.score([request], PolicyRef())
        assert scores.version == version
        worst = max(worst, float((torch.tensor(scores.logprobs) - expected[which]).abs().max()))
        if version == SWAPS // 10:
            after_a_tenth = _held()
    held = _held()
    print(
        f"{SWAPS} swaps: {worst:.1e} nats from plain PEFT at most; (tensors, bytes, files) {after_a_tenth} then {held}"
    )
    assert worst < 1e-4
    assert all(answer == of_one[0] for of_one in answers.values() for answer in of_one)
    assert len({of_one[0] for of_one in answers.values()}) == len(artifacts)
    assert engine.versions == [0, SWAPS - 2, SWAPS - 1, SWAPS]
    assert held == after_a_tenth


def _by_plain_peft(model: Path, adapter: Path) -> torch.Tensor:
    """Log-probs of REPLY after PROMPT by the libraries alone."""
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    with torch.no_grad():
        logits = plain(torch.tensor([[*PROMPT, *REPLY]])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(REPLY)), torch.tensor(REPLY)]


def _held() -> tuple[int, int, int]:
    """Tensors alive in this process, their bytes, and files that it has open."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return len(tensors), sum(one.numel() * one.element_size() for one in tensors), len(os.listdir("/proc/self/fd"))
