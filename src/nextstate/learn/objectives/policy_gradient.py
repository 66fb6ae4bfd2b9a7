"""Policy gradient with a clipped ratio, and the truncated weights that correct for an older sampler.

All objectives here take flat vectors over the reply tokens of a (part of a) batch, axis N, and per-token weights that
sum to 1 over the whole update. A token that must not count has weight 0; since the weights carry the denominator,
splitting an update into micro-batches and adding their losses changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
"""Keeps exp() finite; a ratio that far out is held by the clip anyway."""


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Elementwise loss max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), rho = exp(logprobs - old_logprobs).

    Any shape; only `logprobs` gets a gradient. spec: PPO's kernel L(A, rho).
    """
    ratio = (logprobs - old_logprobs.detach()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = advantages.detach()
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def policy_gradient(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """Clipped policy gradient over reply tokens.

        rho  = exp(logprobs - old_logprobs)
        loss = sum(weights * max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)))

    Args:
        logprobs_N: [N] nats under the weights being trained; the only input with a gradient.
        old_logprobs_N: [N] nats under the weights that the update started from.
        advantages_N: [N] reward minus baseline, the same for all tokens of a turn.
        weights_N: [N] 0 on tokens left out; sums to 1 over the whole update.
    """
    loss_N = clipped_surrogate(logprobs_N, old_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
    return weighted_sum(loss_N, weights_N)


def importance_weights(old_logprobs_N: Tensor, sampled_logprobs_N: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weights min(exp(old - sampled), cap): [N], without gradient.

    `sampled` are the log-probs stored with the turn, under the version(s) that sampled it; `old` are those of the
    version that the update starts from, under the same temperature. The two differ when a version was published
    between.
    """
    return (old_logprobs_N - sampled_logprobs_N).detach().exp().clamp(max=cap)


def weighted_sum(loss_N: Tensor, weights_N: Tensor) -> Tensor:
    # Not a product: 0 * nan is nan, and a token that is left out must not be able to do that.
    return torch.where(weights_N != 0, loss_N * weights_N, 0.0).sum()
