import pytest
import torch

from nextstate.learn.objectives.anchor import anchor_kl


def test_published_values_of_a_library_are_met():
    # TRL 1.16's k3 for each token: exp(ref - lp) - (ref - lp) - 1
    logprobs = torch.tensor([-1, -2, -0.5, -0.7, -1.5, -3], dtype=torch.float64)
    base = torch.tensor([-1.1, -2.2, -0.4, -0.9, -1.4, -2.5], dtype=torch.float64)
    expected = [0.004837, 0.018731, 0.005171, 0.018731, 0.005171, 0.148721]
    for i, value in enumerate(expected):
        weights = torch.zeros(6, dtype=torch.float64)
        weights[i] = 1.0
        assert anchor_kl(logprobs, base, weights).item() == pytest.approx(value, abs=1e-6)


def test_at_the_base_it_and_its_gradient_are_exactly_zero():
    logprobs = torch.tensor([-1.0, -0.2], requires_grad=True)
    loss = anchor_kl(logprobs, logprobs.detach(), torch.ones(2) / 2)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.abs().max().item() == 0.0


def test_it_pulls_back_a_token_that_became_too_likely():
    logprobs = torch.tensor([-0.1], requires_grad=True)
    anchor_kl(logprobs, torch.tensor([-1.0]), torch.ones(1)).backward()
    assert logprobs.grad.item() == pytest.approx(0.59343, abs=1e-5)  # 1 - exp(-0.9): gradient descent lowers it
