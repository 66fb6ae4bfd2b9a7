from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nextstate.chat.template import render
from nextstate.config import LearnConfig
from nextstate.engines.model import load
from nextstate.learn.trainer import Trainer
from nextstate.store.learning import Sample
from nextstate.types import Turn

TrainerFactory = Callable[..., Trainer]


@pytest.fixture
def make_trainer(tiny_model_path: Path) -> TrainerFactory:
    """Trainers of the tiny model in float64, or not `precise` and in float32, each with its own weights."""

    def make(*, precise: bool = True, **options: Any) -> Trainer:
        loaded = load(str(tiny_model_path), dtype="float32", device="cpu")
        if precise:
            in_float64(loaded.model)
        return Trainer(loaded, LearnConfig(**{"rank": 4, "alpha": 8, "learning_rate": 1e-2, **options}))

    return make


def in_float64(model: torch.nn.Module) -> None:
    """All of a model's arithmetic in float64, its norms too: they go by float32, where a difference of the last digit
    before them, as another order of adding up makes it, can become one of 1e-8 behind them."""
    model.double()
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if type(module).__name__.endswith("RMSNorm"):
                exact = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
                exact.weight = module.weight
                setattr(parent, name, exact)


def shake(trainer: Trainer, scale: float = 0.05) -> None:
    """Move the adapter away from zero, so that the policy is not the base."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.parameters:
            parameter.add_(torch.randn_like(parameter) * scale)


def a_sample(
    trainer: Trainer, question: str = "a fox?", reply: tuple[int, ...] = (60, 61, 62), **changes: Any
) -> Sample:
    """A turn whose stored log-probs are those of the trainer's present weights."""
    messages = ({"role": "user", "content": question},)
    prompt = render(trainer.loaded.tokenizer, messages)
    temperature = changes.pop("temperature", 1.0)
    with torch.no_grad():
        keep = range(len(prompt) - 1, len(prompt) + len(reply) - 1)
        logprobs = (trainer.logits([[*prompt, *reply]], list(keep)) / temperature).log_softmax(-1)
    turn = {
        "turn_id": 1,
        "prompt_ids": prompt,
        "reply_ids": reply,
        "reply_logprobs": tuple(logprobs[torch.arange(len(reply)), torch.tensor(reply)].tolist()),
        "reply_versions": (0,) * len(reply),
        "temperature": temperature,
    }
    turn.update({k: changes.pop(k) for k in list(changes) if k in turn})
    sample = {"user": "u", "reward": -1, "hints": (), "messages": messages}
    return Sample(turn=Turn(**turn), **{**sample, **changes})


def gradients(trainer: Trainer) -> torch.Tensor:
    """All adapter gradients in one vector."""
    return torch.cat([p.grad.flatten().double() for p in trainer.parameters if p.grad is not None])
