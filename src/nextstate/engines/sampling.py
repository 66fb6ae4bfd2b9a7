"""Drawing tokens, with the log-prob of each under the very distribution it was drawn from.

One row of logits becomes a distribution in this order, whatever a request asks for:

    repetition penalty, presence and frequency penalties, bias      on the model's own logits
    temperature                                                     0: certain of the most likely token that is allowed
    grammar mask                                                    what cannot follow gets -inf
    softmax
    top_k, then top_p, then min_p                                   each renormalises what it leaves

The rows of a step are drawn together. A request has random numbers of its own, one for each token, so that its seed
gives the same tokens whoever else is in the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nextstate.errors import EngineFault
from nextstate.types import Sampling

_BLOCK = 256
"""Tokens whose probabilities are added up before one of them is looked for."""
_NUCLEUS = 1024
"""A nucleus is looked for in so many tokens first; sorting a whole vocabulary takes a hundred times as long."""


class Mask(Protocol):
    """What a grammar allows next; see `engines/grammar.py`."""

    @property
    def error(self) -> str:
        """Why nothing can follow any more; empty while something can."""
        ...

    def mask(self, vocabulary: int) -> Tensor:
        """[V] bool, on the CPU: the tokens that may come next."""
        ...

    def accept(self, token: int) -> None:
        """This token came next."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    token: int
    logprob: float
    """nats, under the distribution that the token was drawn from."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log-probs, best first, when asked for; none that could not be drawn."""


class Sampler:
    """One request's side of drawing: what it asks for, its random numbers, and the tokens that it has seen."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = (), mask: Mask | None = None) -> None:
        self.sampling, self.mask = sampling, mask
        # On the CPU wherever the model is: a seed then means the same on every device.
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % 2**63)
        self._seen = set(prompt) if sampling.repetition_penalty != 1 else None
        counting = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        self._counts: Counter[int] | None = Counter() if counting else None

    @property
    def moves_logits(self) -> bool:
        return bool(self._seen or self._counts or self.sampling.logit_bias)

    def uniform(self) -> float:
        """The random number that decides about the next token, from [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def accept(self, token: int) -> None:
        """Take note of a token that was drawn."""
        if self._seen is not None:
            self._seen.add(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self.mask is not None:
            self.mask.accept(token)

    def moved(self, logits_V: Tensor) -> Tensor:
        """Logits after penalties and bias; a copy."""
        logits_V, asked = logits_V.clone(), self.sampling
        if self._seen:
            seen = torch.tensor(list(self._seen), device=logits_V.device)
            own = logits_V[seen]
            logits_V[seen] = torch.where(own > 0, own / asked.repetition_penalty, own * asked.repetition_penalty)
        added = list(asked.logit_bias)
        if self._counts:
            for token, times in self._counts.items():
                added.append((token, -asked.presence_penalty - asked.frequency_penalty * times))
        if added:
            tokens, amounts = zip(*added, strict=True)
            where = torch.tensor(tokens, device=logits_V.device)
            logits_V.index_add_(0, where, logits_V.new_tensor(amounts))
        return logits_V

    def fault(self) -> EngineFault:
        """Why no token could be drawn."""
        if self.mask is not None and self.mask.error:
            return EngineFault(f"the answer could not be held to its grammar any longer: {self.mask.error}")
        return EngineFault("the model gave numbers that are not finite, so no token could be drawn.")


def draw(logits_RV: Tensor, samplers: Sequence[Sampler]) -> list[Drawn | EngineFault]:
    """The next token of each of R requests, which they have taken note of; a fault is that of one request only."""
    logprobs_RV = distribution(logits_RV, samplers)
    tokens_R = pick(logprobs_RV.exp(), [sampler.uniform() for sampler in samplers])
    tokens, logprobs = tokens_R.tolist(), logprobs_RV.gather(-1, tokens_R[:, None])[:, 0].tolist()
    drawn: list[Drawn | EngineFault] = []
    for row_V, sampler, token, logprob in zip(logprobs_RV, samplers, tokens, logprobs, strict=True):
        if not math.isfinite(logprob):
            drawn.append(sampler.fault())
            continue
        sampler.accept(token)
        drawn.append(Drawn(token=token, logprob=logprob, top=most_likely(row_V, sampler.sampling.top_logprobs)))
    return drawn


def pick(mass_RV: Tensor, uniform: Sequence[float]) -> Tensor:
    """[R] in each row the first token at which the cumulated probability passes the row's random number.

    First the block of tokens is found and then the token in it: cumulating all of V would take most of the time.
    """
    rows, vocabulary = mass_RV.shape
    blocks = -(-vocabulary // _BLOCK)
    if vocabulary % _BLOCK:
        mass_RV = torch.nn.functional.pad(mass_RV, (0, blocks * _BLOCK - vocabulary))
    mass_RNB = mass_RV.view(rows, blocks, _BLOCK)
    totals_RN = mass_RNB.sum(-1).double()
    sought_R = totals_RN.sum(-1) * torch.tensor(uniform, dtype=torch.float64, device=mass_RV.device)
    block_R, left_R = _first_above(totals_RN, sought_R)
    inside_RB = mass_RNB[torch.arange(rows, device=mass_RV.device), block_R].double()
    token_R = block_R * _BLOCK + _first_above(inside_RB, left_R)[0]
    return token_R.clamp(max=vocabulary - 1)  # a row that is not a number has led anywhere


def _first_above(mass_RN: Tensor, sought_R: Tensor) -> tuple[Tensor, Tensor]:
    """In each row the first place with mass whose running sum is above what is sought, and what is sought within it.

    Where rounding puts the sought above all sums, it is the last place with mass.
    """
    sums_RN = mass_RN.cumsum(-1)
    # A parallel sum may waver in its last digit, so places without mass are taken out by name.
    fits_RN = (sums_RN > sought_R[:, None]) & (mass_RN > 0)
    last_R = mass_RN.shape[1] - 1 - (mass_RN > 0).flip(-1).to(torch.uint8).argmax(-1)
    place_R = torch.where(fits_RN.any(-1), fits_RN.to(torch.uint8).argmax(-1), last_R)
    before_R = (sums_RN - mass_RN).gather(-1, place_R[:, None])[:, 0]
    return place_R, sought_R - before_R


def distribution(logits_RV: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """[R, V] float32 log-probs of the next token; -inf where it cannot be, NaN throughout a row without a token."""
    logits_RV = logits_RV.float()
    if any(sampler.moves_logits for sampler in samplers):
        rows = zip(logits_RV, samplers, strict=True)
        logits_RV = torch.stack([sampler.moved(row) if sampler.moves_logits else row for row, sampler in rows])
    temperatures = [1.0 if s.sampling.greedy else s.sampling.temperature for s in samplers]
    scaled_RV = logits_RV / logits_RV.new_tensor(temperatures)[:, None]
    for row_V, sampler in zip(scaled_RV, samplers, strict=True):
        if sampler.mask is not None:
            row_V.masked_fill_(~sampler.mask.mask(len(row_V)).to(row_V.device), -torch.inf)
    logprobs_RV = scaled_RV.log_softmax(-1)
    for row_V, sampler in zip(logprobs_RV, samplers, strict=True):
        if sampler.sampling.greedy:
            best = row_V.argmax()
            certain = row_V[best] * 0.0  # NaN stays NaN
            row_V.fill_(-torch.inf)
            row_V[best] = certain
        else:
            _cut(row_V, sampler.sampling)
    return logprobs_RV


def _cut(logprobs_V: Tensor, sampling: Sampling) -> None:
    if 0 < sampling.top_k < len(logprobs_V):
        logprobs_V.copy_(likeliest(logprobs_V, sampling.top_k))
    if sampling.top_p < 1:
        logprobs_V.copy_(nucleus(logprobs_V, sampling.top_p))
    if sampling.min_p > 0:
        logprobs_V.copy_(not_below(logprobs_V, sampling.min_p))


def likeliest(logprobs_V: Tensor, k: int) -> Tensor:
    """Renormalised log-probs of the k most likely tokens; -inf elsewhere."""
    best, tokens = logprobs_V.topk(k)
    return torch.full_like(logprobs_V, -torch.inf).index_copy_(0, tokens, best).log_softmax(-1)


def nucleus(logprobs_V: Tensor, top_p: float) -> Tensor:
    """Renormalised log-probs of the smallest set of most likely tokens with mass >= top_p; -inf outside it."""
    ordered, order = logprobs_V.topk(min(_NUCLEUS, len(logprobs_V)))
    if float(ordered.exp().sum()) < top_p:
        ordered, order = logprobs_V.sort(descending=True)
    mass_before = ordered.exp().cumsum(-1) - ordered.exp()
    within = mass_before < top_p
    within[0] = True  # the most likely token stays, however small top_p is
    inside = order[within]
    kept = torch.full_like(logprobs_V, -torch.inf)
    kept[inside] = logprobs_V[inside]
    return kept.log_softmax(-1)


def not_below(logprobs_V: Tensor, min_p: float) -> Tensor:
    """Renormalised log-probs of the tokens at least `min_p` times as likely as the most likely one; -inf elsewhere."""
    return logprobs_V.masked_fill(logprobs_V < logprobs_V.max() + math.log(min_p), -torch.inf).log_softmax(-1)


def most_likely(logprobs_V: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    """The k most likely tokens with their log-probs, best first; fewer where fewer have any probability."""
    if k == 0:
        return ()
    best, tokens = logprobs_V.topk(min(k, len(logprobs_V)))
    pairs = zip(tokens.tolist(), best.tolist(), strict=True)
    return tuple((token, logprob) for token, logprob in pairs if logprob > -math.inf)
