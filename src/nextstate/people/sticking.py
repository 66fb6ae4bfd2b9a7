"""When has a wish been learned? The metrics of both versions of the paper, over first answers in session order."""

from __future__ import annotations

from collections.abc import Sequence

IN_A_ROW = 3


def sessions_until_it_sticks(met: Sequence[bool]) -> int | None:
    """The number, from 1, of the first session whose first answer is the third in a row to be as wished.

    None: it never was within these sessions, which is known as censored. The least is 3.
    """
    run = 0
    for number, as_wished in enumerate(met, start=1):
        run = run + 1 if as_wished else 0
        if run == IN_A_ROW:
            return number
    return None


def share(met: Sequence[bool]) -> float | None:
    """Of first answers, how many were as wished; None of none."""
    return sum(met) / len(met) if met else None


def last_third(met: Sequence[bool]) -> Sequence[bool]:
    """The last third, rounded down: of 32 sessions the last 10."""
    return met[len(met) - len(met) // 3 :]
