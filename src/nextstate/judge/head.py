"""A head: from what is seen of a turn to probabilities of good, neutral and bad.

    states     what the judge model has made of the turn where its verdict would stand: hidden states  ─┐
    wording    cues and letter sequences of the user's reply (see `cues`)                              ─┴▶ x ─▶ softmax

    probabilities = softmax(((x - centre) * scale) @ weights + bias)

It is a multinomial logistic regression, fitted in seconds. A head belongs to one judge model and its prompts, and is
matched to them by fingerprint. One head that sees the wording alone serves every other model until somebody fits one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nextstate.judge.cues import CUE_COUNT, WORDING_COUNT
from nextstate.types import Vote

FINGERPRINT_TOLERANCE = 0.25
"""nats by which two fingerprints may differ and still be of the same model, in another precision."""

STATE_RIDGE = 3e-4
CUE_RIDGE = 1e-3
LETTER_RIDGE = 5e-4
"""How strongly the weights of each block are held near 0, or near the head that a fit starts from."""

HOLD = 20.0
"""How many times as strongly a head that learns from feedback is held near what it was: the rows behind it are not
there to speak for themselves."""

BIAS_RIDGE = 1e-2
"""For the bias of a head that learns from feedback; a first fit leaves it free. Without it, ten users who are content
would teach the head that everybody is."""

_FOLDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    model: str
    """What it was fitted for; '' for the head that sees the wording alone."""
    prompts_hash: str
    fingerprint: tuple[float, ...]
    """What the model says about replies that say nothing: by it a head is matched to weights, whatever their name."""
    layers: tuple[int, ...]
    """Layers whose states it reads, of each prompt; empty for the wording alone."""
    rows: int
    """Labelled rows it was fitted on."""
    feedback: int = 0
    """Rows of explicit feedback that it has learned from since."""
    centre: Tensor
    """[F]"""
    scale: Tensor
    """[F]"""
    weights: Tensor
    """[F, 3], columns in the order of `Vote`: good, neutral, bad."""
    bias: Tensor
    """[3]"""

    def probabilities(self, features: Tensor) -> dict[Vote, float]:
        """
        Args:
            features: [F]
        """
        shares = self._shares(features[None])[0].tolist()
        return dict(zip(Vote, shares, strict=True))

    def _shares(self, features_NF: Tensor) -> Tensor:
        return (((features_NF - self.centre) * self.scale) @ self.weights + self.bias).softmax(-1)

    def starts_from(self, fitted: Head) -> bool:
        """Whether this head is `fitted` with feedback learned on top."""
        return (
            self.layers == fitted.layers
            and self.rows == fitted.rows
            and self.matches(fitted.prompts_hash, fitted.fingerprint)
        )

    def matches(self, prompts_hash: str, fingerprint: Sequence[float]) -> bool:
        """Whether it was fitted for these prompts, and for the model that says this of empty replies."""
        if self.prompts_hash != prompts_hash or len(self.fingerprint) != len(fingerprint):
            return False
        gaps = (abs(a - b) for a, b in zip(self.fingerprint, fingerprint, strict=True))
        return all(gap <= FINGERPRINT_TOLERANCE for gap in gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Labelled features of one source. Sources weigh the same in a fit, however many rows they have."""

    features: Tensor
    """[N, F]"""
    labels: Sequence[Vote]
    groups: Sequence[str]
    """Rows of one group are never on both sides when the temperature is chosen."""


def fit(sources: Sequence[Fold], blank: Head) -> Head:
    """Fit a head to labelled rows.

        loss = sum_n w_n * -log softmax(z_n)[label_n] + sum_f ridge_f * |weights_f|^2,   sum_n w_n = 1

    Within a source, rows of a label that n rows have weigh n ** -0.5, between counting rows and counting labels. The
    weights are then divided by a temperature, chosen so that held-out rows of a five-fold split are the most probable.

    Args:
        blank: gives model, prompts, fingerprint and layers; its numbers are not looked at.
    """
    x_NF = torch.cat([source.features for source in sources]).double()
    labels = [label for source in sources for label in source.labels]
    groups = [group for source in sources for group in source.groups]
    weight_N = torch.cat([_row_weights(source.labels) for source in sources])
    states = x_NF.shape[1] - WORDING_COUNT
    centre, scale = torch.zeros(x_NF.shape[1], dtype=torch.float64), torch.ones(x_NF.shape[1], dtype=torch.float64)
    if states:
        centre[:states] = x_NF[:, :states].mean(0)
        # Divided by the root of their number, so that all states together weigh like one cue.
        scale[:states] = 1 / (x_NF[:, :states].std(0) + 1e-6) / math.sqrt(states)
    z_NF = (x_NF - centre) * scale
    start = torch.zeros(x_NF.shape[1] + 1, len(Vote), dtype=torch.float64)
    target_N = torch.tensor([list(Vote).index(label) for label in labels])
    folds = {group: at % _FOLDS for at, group in enumerate(sorted(set(groups), key=_shuffled))}
    fold_N = torch.tensor([folds[group] for group in groups])
    held_out = torch.empty(len(labels), len(Vote), dtype=torch.float64)
    for fold in range(_FOLDS):
        inside, outside = fold_N != fold, fold_N == fold
        if inside.any() and outside.any():
            solved = _solve(z_NF[inside], target_N[inside], weight_N[inside] / weight_N[inside].sum(), start)
            held_out[outside] = z_NF[outside] @ solved[:-1] + solved[-1]
    solved = _solve(z_NF, target_N, weight_N / weight_N.sum(), start) / _temperature(held_out, target_N)
    return replace(
        blank,
        rows=len(labels),
        feedback=0,
        centre=centre.float(),
        scale=scale.float(),
        weights=solved[:-1].float(),
        bias=solved[-1].float(),
    )


def learn(head: Head, features_NF: Tensor, labels: Sequence[Vote]) -> Head:
    """A head that has also learned from a user's explicit feedback, and is held near what it was fitted to.

    Each turn with feedback weighs like one of the rows that the head was fitted on.
    """
    z_NF = (features_NF.double() - head.centre) * head.scale
    target_N = torch.tensor([list(Vote).index(label) for label in labels])
    start = torch.cat([head.weights, head.bias[None]]).double()
    weight_N = torch.full((len(labels),), 1 / head.rows, dtype=torch.float64)
    solved = _solve(z_NF, target_N, weight_N, start, hold=HOLD)
    return replace(head, weights=solved[:-1].float(), bias=solved[-1].float(), feedback=len(labels))


def _solve(z_NF: Tensor, target_N: Tensor, weight_N: Tensor, start: Tensor, *, hold: float = 0.0) -> Tensor:
    """[F + 1, 3] Weights with the bias as the last row, held near `start`."""
    # A hold of 0 is a fit from nothing, whose bias is free.
    bias_ridge = torch.tensor([BIAS_RIDGE if hold else 0.0], dtype=torch.float64)
    ridge_F = torch.cat([_ridge(z_NF.shape[1]), bias_ridge]) * (hold or 1.0)
    solved = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([solved], max_iter=200, tolerance_change=1e-8, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses_N = torch.nn.functional.cross_entropy(z_NF @ solved[:-1] + solved[-1], target_N, reduction="none")
        loss = (weight_N * losses_N).sum() + (ridge_F[:, None] * (solved - start).square()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return solved.detach()


def _ridge(features: int) -> Tensor:
    ridge_F = torch.full((features,), LETTER_RIDGE, dtype=torch.float64)
    states = features - WORDING_COUNT
    ridge_F[:states] = STATE_RIDGE
    ridge_F[states : states + CUE_COUNT] = CUE_RIDGE
    return ridge_F


def _row_weights(labels: Sequence[Vote]) -> Tensor:
    """[N] Weights of one source's rows, summing to 1."""
    count = Counter(labels)
    weight_N = torch.tensor([count[label] ** -0.5 for label in labels], dtype=torch.float64)
    return weight_N / weight_N.sum()


def _temperature(logits_NV: Tensor, target_N: Tensor) -> float:
    candidates = [2 ** (step / 8) for step in range(-8, 17)]  # a half to four
    return min(candidates, key=lambda t: float(torch.nn.functional.cross_entropy(logits_NV / t, target_N)))


def _shuffled(text: str) -> int:
    """An order of groups that depends on their names alone."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


# --- files ---


def save(head: Head, path: Path) -> None:
    """Write a head in half precision; a second process never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(head, name).half().contiguous() for name in ("weights", "bias", "centre", "scale")}
    about = {
        "model": head.model,
        "prompts_hash": head.prompts_hash,
        "fingerprint": [round(value, 4) for value in head.fingerprint],
        "layers": head.layers,
        "rows": head.rows,
        "feedback": head.feedback,
    }
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"head": json.dumps(about)})
    part.replace(path)


def read(path: Path) -> Head | None:
    """The head in a file; None where it is none of ours, or for features of another version."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["head"])
            tensors = {name: file.get_tensor(name).float() for name in ("weights", "bias", "centre", "scale")}
        head = Head(
            model=about["model"],
            prompts_hash=about["prompts_hash"],
            fingerprint=tuple(about["fingerprint"]),
            layers=tuple(about["layers"]),
            rows=about["rows"],
            feedback=about["feedback"],
            **tensors,
        )
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    fits = head.weights.shape[0] >= WORDING_COUNT and bool(head.layers) is (head.weights.shape[0] > WORDING_COUNT)
    return head if fits else None


def shipped() -> list[Head]:
    """The heads in this package."""
    with as_file(files("nextstate.judge").joinpath("heads")) as folder:
        return heads_in(folder)


def heads_in(folder: Path) -> list[Head]:
    found = (read(path) for path in sorted(folder.glob("*.safetensors")))
    return [head for head in found if head is not None]


def wording_head() -> Head:
    """The shipped head that needs no model."""
    return next(head for head in shipped() if not head.layers)
