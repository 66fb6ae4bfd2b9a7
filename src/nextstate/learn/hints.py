"""Which of a turn's candidate hints the teacher reads (spec 1.9).

    first               the most trusted one
    longest, random     for comparison with the published methods
    overlap             the one after which the teacher's likely tokens are most often the student's, over the reply
    overlap_by_token    the same for every token of the reply by itself

A teacher whose preferred tokens the student already considers gives a correction that it can learn; a hint that drags
the teacher elsewhere gives large and noisy gaps. Between hints with equal overlap the shortest is taken.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from nextstate.config import HintChoice


def in_order(hints: Sequence[str], choice: HintChoice, *, seed: int) -> list[int]:
    """The numbers of the candidates, best first as far as that can be known before the teacher has read them.

    Args:
        hints: most trusted first.
        seed: of "random"; the same seed gives the same order.
    """
    numbers = list(range(len(hints)))
    if choice == "random":
        random.Random(seed).shuffle(numbers)
    elif choice == "longest":
        numbers.sort(key=lambda n: -len(hints[n]))
    elif choice != "first":
        numbers.sort(key=lambda n: len(hints[n]))
    return numbers


def shared(student_top_NK: Tensor, teacher_top_NK: Tensor) -> Tensor:
    """[N, K] bool: which of the student's K tokens are among the teacher's K, both as token ids."""
    return (student_top_NK[:, :, None] == teacher_top_NK[:, None, :]).any(-1)


def overlap(student_top_NK: Tensor, teacher_top_NK: Tensor) -> Tensor:
    """[N] how many tokens the student's K most likely and the teacher's K most likely have in common."""
    return shared(student_top_NK, teacher_top_NK).sum(-1)


def best_for_reply(overlaps_HN: Tensor) -> int:
    """The hint with the largest sum of overlaps over the reply; of several, the first.

    Args:
        overlaps_HN: [H, N] one row for each hint, shortest hint first.
    """
    sums = overlaps_HN.sum(-1).tolist()
    return sums.index(max(sums))


def best_by_token(overlaps_HN: Tensor) -> Tensor:
    """[N] for each token the hint with the largest overlap; of several, the first. overlaps_HN: as `best_for_reply`."""
    hints = overlaps_HN.shape[0]
    # argmax may take any of several equal ones; a larger number for earlier hints leaves one, and no other order.
    earlier_H1 = overlaps_HN.new_tensor(range(hints, 0, -1))[:, None]
    return (overlaps_HN * (hints + 1) + earlier_H1).argmax(0)
