"""From log-probs to probabilities: what a model's readings of a turn are worth.

Small models have strong opinions about words before they have read anything, so raw label log-probs say little. Two
remedies, in order of preference:

    fitted        weights and biases fitted on labelled turns, shipped for the built-in model
    content-free  for any other model: subtract what it says about replies that say nothing
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any, Self

from nextstate.types import Vote

Readings = tuple[float, ...]
"""[6] nats in the order of `Vote` (good, neutral, bad): of the three labels, then of the reply in the three lists."""

FINGERPRINT_TOLERANCE = 0.25
"""nats by which content-free readings may differ from stored ones and still be the same model in another precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """probabilities = softmax(weights @ readings + bias), in the order of `Vote`: good, neutral, bad."""

    kind: str
    """'fitted' or 'content-free'."""
    prompts_hash: str
    model: str
    fingerprint: Readings
    """The model's content-free readings: by them the fitted values are matched to weights, whatever their name."""
    weights: tuple[Readings, ...]
    """[3][6]"""
    bias: tuple[float, ...]
    """[3]"""

    def probabilities(self, readings: Readings) -> dict[Vote, float]:
        logits = [
            sum(weight * reading for weight, reading in zip(row, readings, strict=True)) + bias
            for row, bias in zip(self.weights, self.bias, strict=True)
        ]
        top = max(logits)
        shares = [math.exp(logit - top) for logit in logits]
        return {vote: share / sum(shares) for vote, share in zip(Vote, shares, strict=True)}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            kind=values["kind"],
            prompts_hash=values["prompts_hash"],
            model=values["model"],
            fingerprint=tuple(values["fingerprint"]),
            weights=tuple(tuple(row) for row in values["weights"]),
            bias=tuple(values["bias"]),
        )


def centred(logprobs: Sequence[float]) -> Readings:
    """Log-probs minus their mean, so that what all verdicts share (a rare word, a long reply) drops out."""
    mean = sum(logprobs) / len(logprobs)
    return tuple(logprob - mean for logprob in logprobs)


def content_free(model: str, prompts_hash: str, fingerprint: Readings) -> Calibration:
    """Calibration without labelled turns: each reading counts once, less what the model says about empty replies.

    Only the label readings are corrected. The lists need it less, and what fits an empty reply is a matter of length.
    """
    weights = tuple(tuple(1.0 if column % 3 == row else 0.0 for column in range(6)) for row in range(3))
    return Calibration(
        kind="content-free",
        prompts_hash=prompts_hash,
        model=model,
        fingerprint=fingerprint,
        weights=weights,
        bias=tuple(-reading for reading in fingerprint[:3]),
    )


def shipped(prompts_hash: str, fingerprint: Readings) -> Calibration | None:
    """The fitted values for these prompts and the model with this fingerprint, if there are any."""
    stored = json.loads(files("nextstate.judge").joinpath("calibration.json").read_text(encoding="utf-8"))
    for values in stored["fitted"]:
        calibration = Calibration.of_json(values)
        gaps = [abs(a - b) for a, b in zip(calibration.fingerprint, fingerprint, strict=True)]
        if calibration.prompts_hash == prompts_hash and max(gaps) <= FINGERPRINT_TOLERANCE:
            return calibration
    return None
