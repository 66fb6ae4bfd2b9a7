"""Drawing tokens, with the log-prob of each under the very distribution it was drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from nextstate.types import Sampling


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """One token and its log-prob in nats.

    The distribution is softmax(logits / temperature), cut to the smallest set of tokens with probability `top_p` and
    renormalised. At temperature 0 it is certain of the most likely token, whose log-prob is then 0.
    """
    if sampling.temperature == 0:
        return int(logits_V.argmax()), 0.0
    logprobs_V = (logits_V.float() / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1.0:
        logprobs_V = nucleus(logprobs_V, sampling.top_p)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])


def nucleus(logprobs_V: Tensor, top_p: float) -> Tensor:
    """Renormalised log-probs of the smallest set of most likely tokens with mass >= top_p; -inf outside it."""
    ordered, order = logprobs_V.sort(descending=True)
    mass_before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.full_like(logprobs_V, -torch.inf)
    inside = order[mass_before < top_p]
    kept[inside] = logprobs_V[inside]
    return kept.log_softmax(-1)
