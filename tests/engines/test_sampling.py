import math

import pytest
import torch

from nextstate.engines.sampling import draw, nucleus
from nextstate.types import Sampling


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_log_prob_is_that_of_the_tempered_distribution():
    logits = torch.tensor([0.0, math.log(3.0)])
    token, logprob = draw(logits, Sampling(max_tokens=1, temperature=0.5), generator())
    # temperature 0.5 squares the odds: 1 to 9
    assert logprob == pytest.approx(math.log([0.1, 0.9][token]))


def test_the_log_prob_is_renormalised_over_the_nucleus():
    kept = nucleus(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), 0.7).exp()
    assert kept.tolist() == pytest.approx([0.625, 0.375, 0.0, 0.0])  # 0.5 alone is short of 0.7


def test_a_tiny_nucleus_keeps_the_most_likely_token():
    assert nucleus(torch.tensor([0.2, 0.8]).log(), 1e-6).exp().tolist() == [0.0, 1.0]


def test_temperature_zero_takes_the_most_likely_token_with_certainty():
    assert draw(torch.tensor([1.0, 3.0, 2.0]), Sampling(max_tokens=1, temperature=0), generator()) == (1, 0.0)


def test_a_seed_draws_the_same_again_and_frequencies_follow_the_probabilities():
    logits = torch.tensor([0.25, 0.75]).log()
    one = Sampling(max_tokens=1)
    first = [draw(logits, one, generator(s))[0] for s in range(50)]
    assert first == [draw(logits, one, generator(s))[0] for s in range(50)]
    g = generator(7)
    share = sum(draw(logits, one, g)[0] for _ in range(2000)) / 2000
    assert share == pytest.approx(0.75, abs=0.04)  # four standard deviations of a fair draw are 0.039


def test_plain_temperature_can_be_trained_on_and_nothing_else_can():
    assert Sampling(max_tokens=1, temperature=0.7).trainable
    assert not Sampling(max_tokens=1, temperature=0).trainable
    assert not Sampling(max_tokens=1, top_p=0.9).trainable
