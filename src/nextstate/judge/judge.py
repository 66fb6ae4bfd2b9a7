"""What a judge is, and the one that serves: facts first, then votes, then hints.

turn ──▶ evidence ──▶ decided? ──yes──▶ verdict, judge 'evidence'
                         └──no──▶ the inner judge's votes ──▶ verdict
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from nextstate.judge.evidence import evidence
from nextstate.judge.hints import merge_hints, user_hints
from nextstate.types import TurnToJudge, Verdict, Vote


class Judge(Protocol):
    @property
    def name(self) -> str:
        """Who judges, as it stands in a verdict, e.g. 'scored:smollm2:9f31ab'."""
        ...

    async def verdict(self, turn: TurnToJudge) -> Verdict:
        """Judge one turn.

        Raises:
            JudgeUnavailable: nobody could be asked; the turn waits and is judged later.
        """
        ...


class EvidenceFirst:
    """Hard facts decide where there are any, else the inner judge does; a bad verdict carries hints, no other does."""

    def __init__(self, inner: Judge, *, data_results: bool = True) -> None:
        """
        Args:
            inner: votes where no fact decides.
            data_results: take a tool result that is data and shows no error for a good sign; see `evidence`.
        """
        self.inner = inner
        self._data_results = data_results

    @property
    def name(self) -> str:
        return self.inner.name

    async def verdict(self, turn: TurnToJudge) -> Verdict:
        found = evidence(turn, data_results=self._data_results)
        verdict = found if found is not None else await self.inner.verdict(turn)
        hints = merge_hints(user_hints(turn), verdict.hints) if verdict.value is Vote.BAD else ()
        return replace(verdict, hints=hints)
