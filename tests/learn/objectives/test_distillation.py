import math
from typing import Any

import pytest
import torch

from nextstate.learn.objectives.distillation import sampled_distillation, subset_distillation, topk_distillation


def nats(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


ONE = torch.ones(1, dtype=torch.float64)


def test_the_oracle_of_the_hybrid_objective_is_met_at_ratio_one():
    # T4: w (.7778, .2222), D (-1, 1), A (-.7778, .2222): .7778 - .2222
    old, teacher = nats(0.7, 0.2)[None], nats(0.2, 0.6)[None]
    assert subset_distillation(old, old, teacher, ONE, gap_clip=1.0).item() == pytest.approx(0.5555556, abs=1e-7)


def test_the_oracle_of_the_hybrid_objective_is_met_away_from_ratio_one():
    # T4 at (.5, .4): rho (.7143, 2). A = -.7778 with rho below .8 is held: max(.7778 * .7143, .7778 * .8) = .6222;
    # A = .2222 with rho above 1.28 is held: -.2222 * 1.28 = -.2844
    old, teacher, now = nats(0.7, 0.2)[None], nats(0.2, 0.6)[None], nats(0.5, 0.4)[None]
    assert subset_distillation(now, old, teacher, ONE, gap_clip=1.0).item() == pytest.approx(0.3377778, abs=1e-7)


@pytest.mark.parametrize("gap_clip", [0.1, 1.0, 100.0])
def test_an_identical_teacher_gives_exactly_zero_loss_and_gradient(gap_clip: float):
    # T5. The published helper, which forgets the row maximum, gives -gap_clip here.
    logits = torch.randn(6, 50, dtype=torch.float64).requires_grad_()
    logprobs = logits.log_softmax(-1)
    top = logprobs.detach().topk(4).indices
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    chosen = logprobs.gather(1, top)
    dense = subset_distillation(chosen, chosen.detach(), chosen.detach(), weights, gap_clip=gap_clip)
    sampled = sampled_distillation(
        logprobs[:, 0], logprobs[:, 0].detach(), logprobs[:, 0].detach(), weights, gap_clip=gap_clip
    )
    (dense + sampled).backward()
    assert dense.item() == 0.0
    assert sampled.item() == 0.0
    assert logits.grad.abs().max().item() == 0.0


def test_the_gap_on_a_sampled_token_is_clipped_and_pulls_towards_the_teacher():
    logprobs = nats(0.1, 0.5).requires_grad_()
    teacher = nats(0.8, 0.25)
    loss = sampled_distillation(logprobs, logprobs.detach(), teacher, ONE.expand(2) / 2, gap_clip=1.0)
    loss.backward()
    # gaps ln 8 = 2.079, clipped to 1, and ln 0.5 = -0.693
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.3465736], abs=1e-6)


def test_a_missing_teacher_value_is_a_mask_and_not_probability_one():
    logprobs = nats(0.1, 0.5).requires_grad_()
    teacher = torch.tensor([float("nan"), 0.0], dtype=torch.float64)
    loss = sampled_distillation(logprobs, logprobs.detach(), teacher, ONE.expand(2) / 2, gap_clip=1.0)
    loss.backward()
    assert logprobs.grad[0].item() == 0.0
    assert logprobs.grad[1].item() == pytest.approx(-0.3465736, abs=1e-6)  # -ln 2 / 2


def test_a_row_without_teacher_gives_no_gradient():
    old = nats(0.7, 0.2)[None].requires_grad_()
    nothing = torch.full((1, 2), float("nan"), dtype=torch.float64)
    loss = subset_distillation(old, old.detach(), nothing, ONE, gap_clip=1.0)
    loss.backward()
    assert loss.item() == 0.0
    assert old.grad.abs().max().item() == 0.0


def test_tokens_outside_the_subset_take_no_share_of_the_weights():
    # Of three tokens the middle one is outside: w = (.6, .2) / .8 = (.75, .25), D = (ln .5, ln 2) = (-.6931, .6931)
    # A = (-.5199, .1733); at ratio 1 the loss is .5199 - .1733 = .3466, and its gradient -A.
    old = nats(0.6, 0.1, 0.2)[None].requires_grad_()
    teacher = nats(0.3, 0.1, 0.4)[None]
    teacher[0, 1] = math.nan
    loss = subset_distillation(old, old.detach(), teacher, ONE, gap_clip=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.3465736, abs=1e-6)
    assert old.grad[0].tolist() == pytest.approx([0.5198604, 0.0, -0.1732868], abs=1e-6)


def test_the_gradient_agrees_with_finite_differences():
    old, teacher = nats(0.6, 0.3)[None], nats(0.3, 0.5)[None]
    now = nats(0.58, 0.31)[None].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: subset_distillation(x, old, teacher, ONE, gap_clip=1.0), now)


def test_the_gradient_on_sampled_tokens_agrees_with_finite_differences():
    old, teacher = nats(0.6, 0.3, 0.2), nats(0.3, 0.5, 0.1)
    now = nats(0.58, 0.31, 0.3).requires_grad_()  # the last one should fall, and is not held by the clip
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: sampled_distillation(x, old, teacher, weights, gap_clip=1.0), now)


def test_splitting_a_batch_changes_nothing():
    torch.manual_seed(0)
    now, old, teacher = (torch.randn(6, 3, dtype=torch.float64) for _ in range(3))
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    whole = subset_distillation(now, old, teacher, weights, gap_clip=1.0)
    parts = sum(
        subset_distillation(now[s], old[s], teacher[s], weights[s], gap_clip=1.0).item()
        for s in (slice(0, 2), slice(2, 6))
    )
    assert parts == pytest.approx(whole.item(), abs=1e-12)


# -- the teacher's top K and the rest ---------------------------------------------------------------------------------


def test_the_oracle_of_the_divergence_over_three_bins_is_met():
    # T2: p (.6, .3 | .1), q (.5, .2 | .3): .6 ln 1.2 + .3 ln 1.5 + .1 ln(1/3) = .109393 + .121640 - .109861
    loss = topk_distillation(nats(0.6, 0.3)[None], nats(0.5, 0.2)[None], ONE)
    assert loss.item() == pytest.approx(0.1211712, abs=1e-7)


def test_the_divergence_over_three_bins_is_what_it_is_by_hand():
    # p (.7, .2 | .1), q (.2, .6 | .2): .7 ln 3.5 + .2 ln(1/3) + .1 ln .5 = .876934 - .219722 - .069315 = .587897
    loss = topk_distillation(nats(0.7, 0.2)[None], nats(0.2, 0.6)[None], ONE)
    assert loss.item() == pytest.approx(0.5878969, abs=1e-7)


def test_its_gradient_on_the_logits_is_what_it_is_by_hand():
    # d/d logit_v = p_v (gap_v - KL), gap = ln(p/q): the rest has one gap, so its two tokens share it as their mass.
    p, q = (0.7, 0.2, 0.06, 0.04), (0.2, 0.6, 0.1, 0.1)
    logits = nats(*p)[None].requires_grad_()
    topk_distillation(logits.log_softmax(-1)[:, :2], nats(*q)[None][:, :2], ONE).backward()
    gaps = [math.log(a / b) for a, b in ((0.7, 0.2), (0.2, 0.6), (0.1, 0.2), (0.1, 0.2))]
    divergence = 0.7 * gaps[0] + 0.2 * gaps[1] + 0.1 * gaps[2]
    assert logits.grad[0].tolist() == pytest.approx([a * (g - divergence) for a, g in zip(p, gaps, strict=True)])


def test_with_every_token_in_a_bin_it_is_the_divergence_of_the_library():
    torch.manual_seed(0)
    p, q = (torch.randn(5, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    # Seven bins and an empty one, which is held at 1e-7 on both sides.
    assert topk_distillation(p, q, weights).item() == pytest.approx(expected.item(), abs=1e-5)


DIVERGENCES: list[dict[str, Any]] = [
    {"divergence": "reverse_kl"},
    {"divergence": "forward_kl"},
    {"divergence": "jsd"},
    {"divergence": "jsd", "alpha": 0.3},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_divergence_from_an_identical_teacher_is_exactly_zero_and_so_is_its_gradient(
    kind: dict[str, Any], dtype: torch.dtype
):
    torch.manual_seed(0)
    logits = torch.randn(50, 200, dtype=dtype).mul(4).requires_grad_()
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, logprobs.detach().topk(8).indices)
    weights = torch.rand(50, dtype=dtype)
    loss = topk_distillation(chosen, chosen.detach(), weights / weights.sum(), **kind)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.abs().max().item() == 0.0


def test_the_forward_divergence_is_what_it_is_by_hand():
    # q (.2, .6 | .2), p (.7, .2 | .1): .2 ln(2/7) + .6 ln 3 + .2 ln 2 = -.250553 + .659167 + .138629 = .547244
    loss = topk_distillation(nats(0.7, 0.2)[None], nats(0.2, 0.6)[None], ONE, divergence="forward_kl")
    assert loss.item() == pytest.approx(0.5472442, abs=1e-7)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        # m (.45, .4 | .15): KL(p|m) = .7 ln(14/9) + .2 ln .5 + .1 ln(2/3) = .309283 - .138629 - .040547 = .130107
        #                    KL(q|m) = .2 ln(4/9) + .6 ln 1.5 + .2 ln(4/3) = -.162186 + .243279 + .057536 = .138629
        (0.5, 0.1343681),
        # m (.575, .3 | .125): KL(p|m) = .7 ln(28/23) + .2 ln(2/3) + .1 ln .8 = .137697 - .081093 - .022314 = .034289
        #                      KL(q|m) = .2 ln(8/23) + .6 ln 2 + .2 ln 1.6 = -.211210 + .415888 + .094001 = .298679
        # .75 * .034289 + .25 * .298679: a quarter of the mixture is the teacher's
        (0.25, 0.1003865),
    ],
)
def test_the_jensen_shannon_divergence_is_what_it_is_by_hand(alpha: float, expected: float):
    loss = topk_distillation(nats(0.7, 0.2)[None], nats(0.2, 0.6)[None], ONE, divergence="jsd", alpha=alpha)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (DIVERGENCES[0], (0.384618, 0.356417)),
        (DIVERGENCES[1], (0.378489, 0.350068)),
        (DIVERGENCES[2], (0.091808, 0.084804)),
    ],
)
def test_the_values_are_those_that_trl_computes(kind: dict[str, Any], expected: tuple[float, float]):
    # TRL 1.16.0: generalized_jsd_loss over all five tokens, compute_topk_self_distillation_loss over two and the tail.
    student = torch.tensor([[2, 1, 0, -1, 0.5]], dtype=torch.float64).log_softmax(-1)
    teacher = torch.tensor([[1, 2, 0.5, -0.5, 0]], dtype=torch.float64).log_softmax(-1)
    whole, two = (topk_distillation(student[:, :k], teacher[:, :k], ONE, **kind).item() for k in (5, 2))
    assert (whole, two) == pytest.approx(expected, abs=2e-6)


def test_the_forward_gradient_on_the_logits_is_the_difference_of_the_bins():
    # d/d logit_v = p_v - q_v in a bin of its own; the rest's difference, .1 - .2, is shared as p's mass is, .6 to .4
    logits = nats(0.7, 0.2, 0.06, 0.04)[None].requires_grad_()
    topk_distillation(logits.log_softmax(-1)[:, :2], nats(0.2, 0.6)[None], ONE, divergence="forward_kl").backward()
    assert logits.grad[0].tolist() == pytest.approx([0.5, -0.4, -0.06, -0.04])


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_divergence_agrees_with_finite_differences(kind: dict[str, Any]):
    # Through the logits, where the mixture of "jsd" moves with the student.
    torch.manual_seed(0)
    logits = torch.randn(3, 6, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(3, 6, dtype=torch.float64).log_softmax(-1)[:, :3]
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: topk_distillation(x.log_softmax(-1)[:, :3], teacher, weights, **kind), logits
    )


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_rows_without_teacher_are_masked_and_splitting_changes_nothing(kind: dict[str, Any]):
    torch.manual_seed(0)
    now, teacher = (torch.randn(6, 9, dtype=torch.float64).log_softmax(-1)[:, :4] for _ in range(2))
    now.requires_grad_()
    teacher[1] = math.nan
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    whole = topk_distillation(now, teacher, weights, **kind)
    whole.backward()
    assert now.grad[1].abs().max().item() == 0.0
    assert now.grad[0].abs().max().item() > 1e-3
    parts = (topk_distillation(now[s], teacher[s], weights[s], **kind) for s in (slice(0, 2), slice(2, 6)))
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-12)


def test_steps_down_its_gradient_end_at_the_teacher_and_nothing_escapes_into_the_rest():
    torch.manual_seed(0)
    teacher = torch.randn(1, 30, dtype=torch.float64).mul(2).log_softmax(-1)
    logits = torch.randn(1, 30, dtype=torch.float64).requires_grad_()
    top = teacher.topk(4).indices
    for _ in range(4000):
        loss = topk_distillation(logits.log_softmax(-1).gather(1, top), teacher.gather(1, top), ONE)
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= gradient
    student = logits.log_softmax(-1).gather(1, top).exp()
    assert student[0].tolist() == pytest.approx(teacher.gather(1, top).exp()[0].tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_teacher_that_is_sure_gives_a_finite_loss_and_gradient(kind: dict[str, Any]):
    logits = torch.tensor([[0.0, 80.0, 0.0]], dtype=torch.float32).requires_grad_()
    sure = torch.tensor([[60.0, -60.0, -60.0]]).log_softmax(-1)
    loss = topk_distillation(logits.log_softmax(-1)[:, :2], sure[:, :2], torch.ones(1), **kind)
    loss.backward()
    assert math.isfinite(loss.item())
    assert logits.grad.isfinite().all()


def test_the_gradient_on_a_sampled_token_is_the_one_that_trl_computes():
    # TRL 1.16.0: compute_sampled_token_self_distillation_loss on token 0; its value, -0.584790, is the gap times the
    # token's log-prob, and ours at ratio 1 minus the gap
    logits = torch.tensor([2, 1, 0, -1, 0.5], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1, 2, 0.5, -0.5, 0], dtype=torch.float64).log_softmax(-1)[:1]
    logprobs = logits.log_softmax(-1)[:1]
    loss = sampled_distillation(logprobs, logprobs.detach(), teacher, ONE, gap_clip=100.0)
    loss.backward()
    assert (loss * logprobs).item() == pytest.approx(-0.584790, abs=1e-6)
    assert logits.grad.tolist() == pytest.approx([0.44485, -0.21086, -0.07757, -0.02854, -0.12789], abs=1e-5)
