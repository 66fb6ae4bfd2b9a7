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

    def __init__(self, inner: Judge, *, plain_results: bool = False) -> None:
        """
        Args:
            inner: votes where no fact decides.
            plain_results: take a tool result without status and without an error for a good sign; see `evidence`.
        """
        self._inner = inner
        self._plain_results = plain_results

    @property
    def name(self) -> str:
        return self._inner.name

    async def verdict(self, turn: TurnToJudge) -> Verdict:
        found = evidence(turn, plain_results=self._plain_results)
        verdict = found if found is not None else await self._inner.verdict(turn)
        hints = merge_hints(user_hints(turn), verdict.hints) if verdict.value is Vote.BAD else ()
        return replace(verdict, hints=hints)
