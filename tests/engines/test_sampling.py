import math

import pytest
import torch
from torch import Tensor

from nextstate.engines.sampling import Drawn, Sampler, distribution, draw, likeliest, not_below, nucleus, pick
from nextstate.errors import EngineFault
from nextstate.types import Sampling


def sampler(prompt: tuple[int, ...] = (), **wishes: object) -> Sampler:
    return Sampler(Sampling(**{"max_tokens": 1, "seed": 0, **wishes}), prompt)


def one(logits: Tensor, by: Sampler) -> Drawn:
    (drawn,) = draw(logits[None], [by])
    assert isinstance(drawn, Drawn)
    return drawn


def probabilities(logits: list[float], by: Sampler) -> list[float]:
    return distribution(torch.tensor([logits]), [by])[0].exp().tolist()


class Allows:
    """A mask that allows certain tokens, or has failed."""

    def __init__(self, *tokens: int, error: str = "") -> None:
        self.tokens, self.error = tokens, error
        self.accepted: list[int] = []

    def mask(self, vocabulary: int) -> Tensor:
        return torch.tensor([token in self.tokens for token in range(vocabulary)])

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_the_log_prob_is_that_of_the_tempered_distribution():
    drawn = one(torch.tensor([0.0, math.log(3.0)]), sampler(temperature=0.5))
    # temperature 0.5 squares the odds: 1 to 9
    assert drawn.logprob == pytest.approx(math.log([0.1, 0.9][drawn.token]))


def test_the_log_prob_is_renormalised_over_the_nucleus():
    kept = nucleus(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), 0.7).exp()
    assert kept.tolist() == pytest.approx([0.625, 0.375, 0.0, 0.0])  # 0.5 alone is short of 0.7


def test_a_tiny_nucleus_keeps_the_most_likely_token():
    assert nucleus(torch.tensor([0.2, 0.8]).log(), 1e-9).exp().tolist() == [0.0, 1.0]
    assert nucleus(torch.tensor([0.2, 0.8]).log(), 0.0).exp().tolist() == [0.0, 1.0]


def test_a_nucleus_wider_than_the_first_look_is_found_all_the_same():
    even = torch.full((4000,), 1 / 4000).log()
    assert int((nucleus(even, 0.5) > -torch.inf).sum()) == pytest.approx(2000, abs=1)


def test_top_k_keeps_the_k_most_likely_tokens_also_when_some_are_equal():
    assert likeliest(torch.tensor([0.1, 0.5, 0.3, 0.1]).log(), 2).exp().tolist() == pytest.approx([0, 0.625, 0.375, 0])
    assert int((likeliest(torch.zeros(9), 4) > -torch.inf).sum()) == 4


def test_min_p_keeps_what_is_likely_enough_beside_the_most_likely_token():
    # 0.3 of 0.5 is 0.15: the third is just in
    assert not_below(torch.tensor([0.5, 0.3, 0.151, 0.049]).log(), 0.3).exp().tolist() == pytest.approx(
        [0.5 / 0.951, 0.3 / 0.951, 0.151 / 0.951, 0]
    )


def test_the_cuts_come_one_after_another_each_over_what_the_one_before_left():
    # top_k 3 leaves 0.5, 0.3, 0.1 of 0.9, that is 0.556, 0.333, 0.111; the nucleus of 0.85 needs the first two (0.889),
    # where it would have needed the third too (0.5 + 0.3 < 0.85) before the others were cut.
    cut = probabilities([math.log(p) for p in (0.5, 0.3, 0.1, 0.06, 0.04)], sampler(top_k=3, top_p=0.85))
    assert cut == pytest.approx([0.625, 0.375, 0, 0, 0])


def test_penalties_and_bias_move_logits_by_what_openai_and_hugging_face_say():
    by = sampler(
        prompt=(0, 1),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((3, 1.5),),
    )
    for token in (2, 2, 1):
        by.accept(token)
    # 0 (prompt): 4 / 2 = 2.  1 (both): -1 * 2 - 0.5 - 0.25 = -2.75.  2 (twice in the reply): 6 / 2 - 0.5 - 2 * 0.25 = 2
    # 3: 1 + 1.5 = 2.5.  4: as it was
    assert by.moved(torch.tensor([4.0, -1.0, 6.0, 1.0, 7.0])).tolist() == pytest.approx([2, -2.75, 2, 2.5, 7])


def test_a_drawn_token_counts_for_the_next_draw():
    by = sampler(presence_penalty=100.0, temperature=0)
    assert [one(torch.tensor([3.0, 2.0, 1.0]), by).token for _ in range(3)] == [0, 1, 2]


def test_temperature_zero_takes_the_most_likely_token_with_certainty():
    drawn = one(torch.tensor([1.0, 3.0, 2.0]), sampler(temperature=0, top_logprobs=3))
    assert drawn == Drawn(token=1, logprob=0.0, top=((1, 0.0),))


@pytest.mark.parametrize("temperature", [0, 1e-7, 5e-324])
def test_temperature_zero_stays_within_the_grammar_and_below_the_penalties(temperature: float):
    by = Sampler(Sampling(max_tokens=1, temperature=temperature, logit_bias=((2, 5.0),)), (), Allows(1, 2))
    assert one(torch.tensor([9.0, 3.0, -1.0]), by) == Drawn(token=2, logprob=0.0)


def test_a_masked_token_is_never_drawn_and_the_log_prob_is_over_the_others():
    logits = torch.tensor([9.0, 0.0, math.log(3.0), 9.0])
    mask = Allows(1, 2)
    by = Sampler(Sampling(max_tokens=1, seed=1), (), mask)
    drawn = [one(logits, by) for _ in range(300)]
    assert {d.token for d in drawn} == {1, 2}
    for d in drawn:
        assert d.logprob == pytest.approx(math.log({1: 0.25, 2: 0.75}[d.token]))
    assert mask.accepted == [d.token for d in drawn]


def test_the_most_likely_tokens_come_under_the_distribution_that_was_drawn_from_best_first():
    drawn = one(torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), sampler(top_k=3, top_logprobs=4))
    assert [token for token, _ in drawn.top] == [3, 2, 1]  # the fourth could not be drawn
    assert [math.exp(logprob) for _, logprob in drawn.top] == pytest.approx([4 / 9, 3 / 9, 2 / 9])
    assert dict(drawn.top)[drawn.token] == drawn.logprob


def test_a_seed_draws_the_same_again_and_frequencies_follow_the_probabilities():
    logits = torch.tensor([0.25, 0.75]).log()
    first = [one(logits, sampler(seed=s)).token for s in range(50)]
    assert first == [one(logits, sampler(seed=s)).token for s in range(50)]
    by = sampler(seed=7)
    share = sum(one(logits, by).token for _ in range(2000)) / 2000
    assert share == pytest.approx(0.75, abs=0.04)  # four standard deviations of a fair draw are 0.039


@pytest.mark.parametrize("vocabulary", [300, 1024, 5000])  # a block and a bit, whole blocks, many
def test_who_else_is_in_the_batch_changes_no_token_and_no_log_prob(vocabulary: int):
    torch.manual_seed(0)
    logits = torch.randn(8, vocabulary) * 2
    wishes = [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 7}, {"presence_penalty": 1.0}, {"temperature": 0}]

    def samplers() -> list[Sampler]:
        return [sampler(seed=n, top_logprobs=2, **wishes[n % 6]) for n in range(8)]

    alone, together, turned = samplers(), samplers(), samplers()
    for _ in range(20):
        expected = [one(row, by) for row, by in zip(logits, alone, strict=True)]
        assert draw(logits, together) == expected
        assert draw(logits.flip(0), turned[::-1]) == expected[::-1]


def test_the_token_is_the_first_at_which_the_cumulated_probability_passes_the_random_number():
    mass = torch.zeros(1, 700)
    mass[0, [10, 300, 650]] = torch.tensor([0.25, 0.5, 0.25])
    numbers = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53]
    assert pick(mass.expand(6, -1), numbers).tolist() == [10, 10, 300, 300, 650, 650]


def test_a_row_that_is_not_a_number_is_the_fault_of_one_request_only():
    logits = torch.tensor([[math.nan, 0.0], [0.0, 9.0], [1.0, 1.0]])
    stuck = Sampler(Sampling(max_tokens=1), (), Allows(error="too complex"))
    broken, fine, held = draw(logits, [sampler(), sampler(temperature=0), stuck])
    assert isinstance(broken, EngineFault)
    assert "not finite" in str(broken)
    assert fine == Drawn(token=1, logprob=0.0)
    assert isinstance(held, EngineFault)
    assert "too complex" in str(held)
