"""What a new version must pass before it serves.

    served = trained   the engine's log-probs on fixed prompts equal the trainer's, token for token
    retention          the policy has not drifted from the base further than a budget, and finds plain texts hardly less
                       likely than the base does
    preference         of turns that were judged and kept out of training, it has not come to prefer the bad ones

The trainer measures on its side and writes it beside the adapter; the publisher measures on the engine's side, with
the adapter loaded from disk as it would serve, and compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nextstate.chat.template import render
from nextstate.config import GateConfig
from nextstate.engines.base import Engine
from nextstate.errors import AdapterError
from nextstate.learn.checkpoint import PROBE_FILE
from nextstate.learn.passages import PASSAGES
from nextstate.learn.trainer import Trainer
from nextstate.types import PolicyRef, ScoreRequest, Turn

PROBE = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("How do I boil an egg?", "Put it into boiling water for eight minutes, then cool it under cold water."),
    ("Write one line of Python that adds two numbers.", "print(a + b)"),
    ("Why is the sky blue?", "Air scatters blue light more than red light, so blue reaches us from everywhere."),
)
"""Fixed questions and answers. What is said does not matter; that it never changes does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    passed: bool
    why: str
    """One sentence."""
    measured: Mapping[str, float]


def measure_probe(trainer: Trainer) -> dict[str, Any]:
    """The trainer's side: log-probs of the probe's answers, and the mean divergence from the base over them.

    The divergence is KL(policy || base) in nats a token, over the whole vocabulary, not a sampled estimate.
    """
    tokenizer = trainer.loaded.tokenizer
    sequences: list[list[int]] = []
    starts: list[int] = []
    keep: list[int] = []
    at = 0
    for question, answer in PROBE:
        prompt = render(tokenizer, [{"role": "user", "content": question}])
        ids = [*prompt, *tokenizer.encode(answer, add_special_tokens=False)]
        sequences.append(ids)
        starts.append(len(prompt))
        keep.extend(range(at + len(prompt) - 1, at + len(ids) - 1))
        at += len(ids)
    with torch.no_grad():
        policy = trainer.logits(sequences, keep).log_softmax(-1)
        base = trainer.logits(sequences, keep, base=True).log_softmax(-1)
    divergence = float((policy.exp() * (policy - base)).sum(-1).mean())
    targets = [t for ids, start in zip(sequences, starts, strict=True) for t in ids[start:]]
    logprobs = policy[torch.arange(len(targets)), torch.tensor(targets)].tolist()
    return {"sequences": sequences, "starts": starts, "logprobs": logprobs, "divergence": divergence}


def measure_perplexity(trainer: Trainer) -> float:
    """The policy's perplexity on PASSAGES over the base's; 1 where nothing has changed."""
    sequences = [trainer.loaded.tokenizer.encode(text, add_special_tokens=False) for text in PASSAGES]
    policy, base = (
        sum(map(sum, trainer.logprobs(sequences, [1] * len(sequences), base=base))) for base in (False, True)
    )
    return math.exp((base - policy) / sum(len(ids) - 1 for ids in sequences))


def measure_held_out(trainer: Trainer, turns: Sequence[Turn]) -> dict[str, float]:
    """Mean log-prob of a reply token of each turn, nats at temperature 1, by turn id (a string, as JSON keys are).

    Of a long reply only as much is read as fits into a micro-batch.
    """
    sequences = [[*turn.prompt_ids, *turn.reply_ids[: trainer.config.micro_batch_tokens]] for turn in turns]
    scored = trainer.logprobs(sequences, [len(turn.prompt_ids) for turn in turns])
    return {str(turn.turn_id): sum(lps) / len(lps) for turn, lps in zip(turns, scored, strict=True)}


def preference_shift(
    rewards: Mapping[str, int], scores: Mapping[str, float], parent_scores: Mapping[str, float], *, fewest: int
) -> float | None:
    """How far the margin of good answers over bad ones has moved since the parent, nats a token.

        shift = mean over good turns of (score - parent's score) - mean over bad ones of the same

    over the turns that both have scored. None: these are fewer than `fewest`, or all good, or all bad.

    Args:
        rewards: +1 or -1 by turn id.
    """
    moved = {turn_id: score - parent_scores[turn_id] for turn_id, score in scores.items() if turn_id in parent_scores}
    good = [change for turn_id, change in moved.items() if rewards[turn_id] > 0]
    bad = [change for turn_id, change in moved.items() if rewards[turn_id] < 0]
    if len(moved) < fewest or not good or not bad:
        return None
    return sum(good) / len(good) - sum(bad) / len(bad)


async def examine(engine: Engine, version: int, folder: Path, config: GateConfig, *, exact: bool) -> GateResult:
    """Load a candidate into the engine beside the version that serves, and decide whether it may serve.

    Args:
        exact: whether both sides compute in float32, where agreement is a matter of 1e-3 nats.
    """
    try:
        probe = json.loads((folder / PROBE_FILE).read_text())
        requests = [
            ScoreRequest(ids=tuple(ids), start=start)
            for ids, start in zip(probe["sequences"], probe["starts"], strict=True)
        ]
        await engine.publish(PolicyRef(version=version), folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return GateResult(passed=False, why=f"its probe cannot be read: {error!r}", measured={})
    except AdapterError as error:
        return GateResult(passed=False, why=str(error), measured={})
    served = [lp for scores in await engine.score(requests, PolicyRef(version=version)) for lp in scores.logprobs]
    differences = [abs(a - b) for a, b in zip(served, probe["logprobs"], strict=True)]
    bound = config.probe_bound or (1e-3 if exact else 0.5)
    measured = {"probe_difference": max(differences), "divergence": probe["divergence"]}
    if not max(differences) <= bound:  # also when it is not a number
        why = f"served is not trained: log-probs on the probe differ by {max(differences):.4f} nats, allowed {bound}"
        return GateResult(passed=False, why=why, measured=measured)
    if not probe["divergence"] <= config.max_divergence:
        why = (
            f"it drifted {probe['divergence']:.3f} nats a token from the base, gate.max_divergence is "
            f"{config.max_divergence}"
        )
        return GateResult(passed=False, why=why, measured=measured)
    # A version of an earlier release, which somebody goes back to, was not measured so.
    ratio = probe.get("perplexity_ratio")
    if ratio is not None:
        measured["perplexity_ratio"] = ratio
        if not ratio <= config.max_perplexity_ratio:
            why = (
                f"its perplexity on plain texts is {ratio:.2f} times the base's, gate.max_perplexity_ratio is "
                f"{config.max_perplexity_ratio}"
            )
            return GateResult(passed=False, why=why, measured=measured)
    shift = probe.get("preference_shift")
    if shift is None:
        held = len(probe.get("held_out", ()))
        why = f"passed; no preference measured: {held} held-out turns, gate.min_held_out is {config.min_held_out}"
        return GateResult(passed=True, why=why, measured=measured)
    measured["preference_shift"] = shift
    if not shift >= -config.max_preference_fall:
        why = (
            f"it came to prefer answers like those judged bad: their margin moved by {shift:.3f} nats a token, "
            f"gate.max_preference_fall is {config.max_preference_fall}"
        )
        return GateResult(passed=False, why=why, measured=measured)
    return GateResult(passed=True, why="passed", measured=measured)
