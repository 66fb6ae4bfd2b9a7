from __future__ import annotations

import pytest
import torch

from nextstate.learn.hints import best_by_token, best_for_reply, in_order, overlap, shared

STUDENT = torch.tensor([[1, 2], [3, 4], [5, 6]])
HINT_0 = torch.tensor([[1, 2], [3, 9], [5, 6]])
HINT_1 = torch.tensor([[1, 9], [3, 4], [5, 6]])


def test_the_oracle_of_the_overlap_counts_is_met():
    # T3: O = [[2, 1, 2], [1, 2, 2]]; the reply ties at 5, so the shorter; by token the larger, or the shorter
    overlaps = torch.stack([overlap(STUDENT, HINT_0), overlap(STUDENT, HINT_1)])
    assert overlaps.tolist() == [[2, 1, 2], [1, 2, 2]]
    assert best_for_reply(overlaps) == 0
    assert best_by_token(overlaps).tolist() == [0, 1, 0]


def test_the_larger_overlap_wins_wherever_it_stands():
    overlaps = torch.tensor([[0, 3, 1], [2, 2, 1], [4, 0, 1]])  # sums 4, 5, 5
    assert best_for_reply(overlaps) == 1
    assert best_by_token(overlaps).tolist() == [2, 0, 0]


def test_tokens_are_shared_whatever_their_rank():
    assert shared(torch.tensor([[7, 8, 9]]), torch.tensor([[9, 1, 7]])).tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    ("choice", "order"),
    [("first", [0, 1, 2]), ("longest", [1, 0, 2]), ("overlap", [2, 0, 1]), ("overlap_by_token", [2, 0, 1])],
)
def test_candidates_stand_in_the_order_that_the_choice_wants(choice, order):
    assert in_order(["be brief", "answer in one short sentence", "shorter"], choice, seed=0) == order


def test_candidates_of_one_length_stay_in_the_order_of_trust():
    assert in_order(["bb", "aa"], "overlap", seed=0) == [0, 1]
    assert in_order(["bb", "aa"], "longest", seed=0) == [0, 1]


def test_a_random_order_is_one_of_all_and_the_same_again():
    orders = [tuple(in_order(["a", "b", "c"], "random", seed=seed)) for seed in range(200)]
    assert len(set(orders)) == 6
    assert orders == [tuple(in_order(["a", "b", "c"], "random", seed=seed)) for seed in range(200)]
