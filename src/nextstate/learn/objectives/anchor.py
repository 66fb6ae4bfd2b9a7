"""Staying near the base model."""

from __future__ import annotations

from torch import Tensor

from nextstate.learn.objectives.policy_gradient import weighted_sum

_MAX_GAP = 10.0


def anchor_kl(logprobs_N: Tensor, base_logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """The k3 estimate of the divergence from the base, on sampled tokens: never negative, 0 where the two agree.

        d    = clip(base_logprobs - logprobs, -10, 10)
        loss = sum(weights * (exp(d) - d - 1))

    Args:
        logprobs_N: [N] nats under the weights being trained; the only input with a gradient.
        base_logprobs_N: [N] nats under the base weights, at the same temperature.
        weights_N: [N] 0 on tokens left out; sums to 1 over the whole update.
    """
    gap_N = (base_logprobs_N.detach() - logprobs_N).clamp(-_MAX_GAP, _MAX_GAP)
    return weighted_sum(gap_N.exp() - gap_N - 1, weights_N)
