import math

import pytest
import torch

from nextstate.learn.objectives.anchor import anchor_kl
from nextstate.learn.objectives.policy_gradient import clipped_surrogate, importance_weights, policy_gradient


def nats(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_a_doubled_ratio_is_held_at_the_upper_clip():
    doubled = torch.tensor([math.log(2.0)])
    loss = policy_gradient(doubled, torch.zeros(1), torch.tensor([3.0]), torch.ones(1))
    assert loss.item() == pytest.approx(-3.84)  # -(1.28 * 3), not -(2 * 3)


def test_a_halved_ratio_of_a_bad_token_is_held_at_the_lower_clip_and_gets_no_gradient():
    halved = torch.tensor([math.log(0.5)], requires_grad=True)
    loss = policy_gradient(halved, torch.zeros(1), torch.tensor([-1.0]), torch.ones(1))
    loss.backward()
    assert loss.item() == pytest.approx(0.8)  # max(0.5, 0.8): pushing further down gains nothing
    assert halved.grad.item() == 0.0


THIRDS, FIFTHS, EIGHTHS = [1 / 6] * 3 + [1 / 4] * 2, [1 / 5] * 5, [1 / 8] * 5


@pytest.mark.parametrize(
    ("weights", "expected", "with_kl", "gradient"),
    [
        # TRL 1.16's loss_type grpo: each of two sequences weighs 1/2, its tokens equally
        (THIRDS, -0.198278, -0.197847, [0, -0.15081, -0.16667, 0.11310, 0.20609]),
        # bnpo, dapo: each of five tokens weighs the same
        (FIFTHS, -0.365612, -0.365191, [0, -0.18097, -0.2, 0.09048, 0.16487]),
        # dr_grpo: two sequences of four tokens at most
        (EIGHTHS, -0.228507, -0.228244, [0, -0.11310, -0.125, 0.05655, 0.10305]),
    ],
)
def test_published_values_of_a_library_are_met(
    weights: list[float], expected: float, with_kl: float, gradient: list[float]
):
    logprobs = torch.tensor([-1, -2, -0.5, -0.7, -1.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.3, -1.9, -0.5, -0.6, -2], dtype=torch.float64)
    base = torch.tensor([-1.1, -2.2, -0.4, -0.9, -1.4], dtype=torch.float64)
    weights_N = torch.tensor(weights, dtype=torch.float64)
    advantages = torch.tensor([1, 1, 1, -0.5, -0.5], dtype=torch.float64)
    loss = policy_gradient(logprobs, old, advantages, weights_N, clip_low=0.2, clip_high=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-5)
    assert (loss + 0.04 * anchor_kl(logprobs, base, weights_N)).item() == pytest.approx(with_kl, abs=1e-6)


def test_at_ratio_one_the_gradient_is_minus_the_advantage():
    logprobs = nats(0.3, 0.6).requires_grad_()
    loss = policy_gradient(logprobs, logprobs.detach(), torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.5]))
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 0.5])


def test_the_gradient_agrees_with_finite_differences():
    old, advantages = nats(0.2, 0.5, 0.9), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    logprobs = nats(0.22, 0.47, 0.88).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_gradient(x, old, advantages, weights), logprobs)


def test_a_token_of_weight_zero_changes_nothing_even_where_it_is_not_a_number():
    logprobs = torch.tensor([-1.0, float("nan")], requires_grad=True)
    loss = policy_gradient(logprobs, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert logprobs.grad[0].item() == pytest.approx(-1.0)


def test_splitting_a_batch_changes_nothing():
    torch.manual_seed(0)
    logprobs, old, advantages = (torch.randn(7, dtype=torch.float64) for _ in range(3))
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    whole = policy_gradient(logprobs, old, advantages, weights)
    parts = [policy_gradient(logprobs[s], old[s], advantages[s], weights[s]) for s in (slice(0, 3), slice(3, 7))]
    assert sum(p.item() for p in parts) == pytest.approx(whole.item(), abs=1e-12)


def test_an_importance_weight_is_the_ratio_up_to_its_cap():
    weights = importance_weights(nats(0.6, 0.9, 0.1), nats(0.5, 0.1, 0.4), cap=2.0)
    assert weights.tolist() == pytest.approx([1.2, 2.0, 0.25])  # 0.9 / 0.1 = 9 is cut to 2


def test_a_huge_ratio_stays_finite():
    loss = clipped_surrogate(torch.zeros(1), torch.tensor([-1e4]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.28)
    assert torch.isfinite(loss).all()
