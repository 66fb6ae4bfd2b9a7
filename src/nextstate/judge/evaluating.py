"""Run a judge over labelled turns, as it would judge live ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from nextstate.judge.judge import Judge
from nextstate.judge.labelled import LabelledTurn
from nextstate.types import Verdict


async def judged(
    judge: Judge, rows: Sequence[LabelledTurn], advance: Callable[[int], None]
) -> tuple[list[Verdict], list[float]]:
    """A verdict for each row and the seconds that it took, one row after another.

    Args:
        advance: told how many more rows are done.

    Raises:
        JudgeUnavailable: the judge could not be asked.
    """
    verdicts, seconds = [], []
    for row in rows:
        began = time.perf_counter()
        verdicts.append(await judge.verdict(row.turn))
        seconds.append(time.perf_counter() - began)
        advance(1)
    return verdicts, seconds
