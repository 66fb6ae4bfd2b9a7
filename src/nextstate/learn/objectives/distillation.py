"""Learning from a teacher that has read a hint, on the tokens that the student sampled.

    sampled   the gap on the sampled token, as an advantage          one token a position
    subset    the gap on K likely tokens, as advantages              K tokens a position, the rest moves freely
    topk      the divergence over the teacher's K and the rest       K + 1 bins, nothing moves freely

A teacher identical to the student gives a loss and a gradient of exactly 0 in every form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nextstate.config import Divergence
from nextstate.learn.objectives.policy_gradient import clipped_surrogate, weighted_sum


def sampled_distillation(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    teacher_logprobs_N: Tensor,
    weights_N: Tensor,
    *,
    gap_clip: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """Token-level gap on the sampled tokens, as advantage of a clipped policy gradient.

        A    = clip(teacher_logprobs - old_logprobs, -C, C)
        loss = sum(weights * max(-A rho, -A clip(rho)))

    In expectation over the student's samples A is minus the reverse KL to the teacher (spec 1.8); one sample is a
    policy-gradient estimate of it, not a KL value. The bound C answers the published code's missing one (W6).

    Args:
        logprobs_N: [N] nats of the sampled tokens under the weights being trained; the only input with a gradient.
        old_logprobs_N: [N] nats, at the start of the update.
        teacher_logprobs_N: [N] nats given the hinted prompt, at the same temperature; NaN where there is no teacher,
            which leaves the token out. A missing value is never 0, which would be probability 1.
        weights_N: [N] 0 on tokens left out; sums to 1 over the whole update.
        gap_clip: C, nats.
    """
    gap_N, has_teacher_N = _gap(teacher_logprobs_N, old_logprobs_N, gap_clip)
    loss_N = clipped_surrogate(logprobs_N, old_logprobs_N, gap_N, clip_low=clip_low, clip_high=clip_high)
    return weighted_sum(loss_N, torch.where(has_teacher_N, weights_N, 0.0))


def subset_distillation(
    logprobs_NK: Tensor,
    old_logprobs_NK: Tensor,
    teacher_logprobs_NK: Tensor,
    weights_N: Tensor,
    *,
    gap_clip: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """The teacher corrects a subset of up to K tokens at every position (spec 1.9, the OPD part).

        w_v  = softmax of old_logprobs over the subset             sums to 1
        D_v  = clip(teacher_v - old_v, -C, C)
        A_v  = w_v D_v
        loss = sum over positions of weights * sum_v max(-A_v rho_v, -A_v clip(rho_v))

    All log-probs are normalised over the whole vocabulary: with a renormalised student the gradient could pour mass
    into the K tokens as a whole for free. At rho = 1 the gradient is that of -sum_v w_v D_v log pi(v), a top-k
    estimate of descending the reverse KL.

    Args:
        logprobs_NK: [N, K] nats under the weights being trained; the only input with a gradient.
        old_logprobs_NK: [N, K] nats of the same tokens at the start of the update.
        teacher_logprobs_NK: [N, K] nats of the same tokens given the hinted prompt; NaN where a token is not in the
            subset. A row of NaN alone, without teacher or with an empty subset, is left out.
        weights_N: [N] 0 on positions left out; sums to 1 over the whole update.
        gap_clip: C, nats.
    """
    old_NK = old_logprobs_NK.detach()
    gap_NK, in_subset_NK = _gap(teacher_logprobs_NK, old_NK, gap_clip)
    shares_NK = old_NK.masked_fill(~in_subset_NK, -torch.inf).softmax(-1).nan_to_num(nan=0.0)
    loss_NK = clipped_surrogate(logprobs_NK, old_NK, shares_NK * gap_NK, clip_low=clip_low, clip_high=clip_high)
    return weighted_sum(loss_NK.sum(-1), torch.where(in_subset_NK.any(-1), weights_N, 0.0))


def topk_distillation(
    logprobs_NK: Tensor,
    teacher_logprobs_NK: Tensor,
    weights_N: Tensor,
    *,
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
) -> Tensor:
    """A divergence over K + 1 bins: the teacher's K most likely tokens, and all others as one (spec 1.8, Top-K OPD).

        p, q = student and teacher; p_tail = 1 - sum of the K; m = (1 - alpha) p + alpha q

        reverse_kl   d = KL(p || q)                                   goes where the teacher is, may leave modes out
        forward_kl   d = KL(q || p)                                   covers all that the teacher would say
        jsd          d = (1 - alpha) KL(p || m) + alpha KL(q || m)    between the two, and bounded

        KL(a || b) = sum over bins of a log(a / b) - a + b
        loss       = sum over positions of weights * d

    The least of each is at the teacher, and a bin for the rest means that mass cannot escape there unseen, as it can
    where only the K tokens are pushed. Bins sum to 1 on both sides, so -a + b adds nothing to the value; it takes out
    of the gradient what is 0 only in exact arithmetic.

    Args:
        logprobs_NK: [N, K] nats under the weights being trained, over the whole vocabulary; the only input with a
            gradient.
        teacher_logprobs_NK: [N, K] nats of the same tokens given the hinted prompt; a row of NaN has no teacher.
        weights_N: [N] 0 on positions left out; sums to 1 over the whole update.
        alpha: of "jsd" alone, strictly between 0 and 1: the teacher's share of the mixture.
    """
    has_teacher_N = ~teacher_logprobs_NK.isnan().any(-1)
    teacher_NK = torch.where(has_teacher_N[:, None], teacher_logprobs_NK, logprobs_NK).detach()
    student_NB, teacher_NB = _with_tail(logprobs_NK), _with_tail(teacher_NK)
    if divergence == "reverse_kl":
        loss_N = _kl(student_NB, teacher_NB)
    elif divergence == "forward_kl":
        loss_N = _kl(teacher_NB, student_NB)
    else:
        # Of all distributions the mixture is the one that makes this sum least, so that its own dependence on the
        # student gives no gradient, and can be left out of it.
        mixture_NB = _log_mixture(student_NB.detach(), teacher_NB, alpha)
        loss_N = (1 - alpha) * _kl(student_NB, mixture_NB) + alpha * _kl(teacher_NB, mixture_NB)
    return weighted_sum(loss_N, torch.where(has_teacher_N, weights_N, 0.0))


def _kl(a_NB: Tensor, b_NB: Tensor) -> Tensor:
    """[N] KL(a || b) of bins given as log-probs."""
    p_NB = a_NB.exp()
    return (p_NB * (a_NB - b_NB) - p_NB + b_NB.exp()).sum(-1)


def _log_mixture(p_NB: Tensor, q_NB: Tensor, alpha: float) -> Tensor:
    """log((1 - alpha) p + alpha q) of log-probs, from the larger one down: exactly p where p is q, and no overflow."""
    larger, smaller_share = torch.maximum(p_NB, q_NB), torch.where(p_NB > q_NB, alpha, 1 - alpha)
    return larger + (smaller_share * (-(p_NB - q_NB).abs()).expm1()).log1p()


_MAX_LOG_MASS = -1e-7
"""Of the K tokens together, so that the rest has some and its logarithm is finite."""


def _with_tail(logprobs_NK: Tensor) -> Tensor:
    """[N, K + 1]: the K log-probs and the log of what they leave."""
    mass_N1 = logprobs_NK.logsumexp(-1, keepdim=True).clamp(max=_MAX_LOG_MASS)
    return torch.cat([logprobs_NK, (-mass_N1.expm1()).log()], -1)


def _gap(teacher: Tensor, old: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The clipped gap, and where there is one; elsewhere it is 0, since even 0 times NaN is a NaN gradient."""
    gap = (teacher - old).detach()
    return gap.nan_to_num(nan=0.0).clamp(-clip, clip), ~gap.isnan()
