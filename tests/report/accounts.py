"""A valid account for tests."""

from __future__ import annotations

from typing import Any

from nextstate.report.account import Account, Example, ReasonLine, VersionLine
from nextstate.report.satisfaction import marks, satisfaction
from nextstate.report.stats import Rate
from nextstate.store.status import Status
from nextstate.store.watching import SignedTurn

START = 1_800_000_000.0


def signed(*good: bool, step_s: float = 60.0) -> list[SignedTurn]:
    """Turns that were judged one minute after another."""
    return [SignedTurn(turn_id=n, version=0, good=one, at=START + step_s * n) for n, one in enumerate(good)]


def an_account(**changes: Any) -> Account:
    turns = signed(*[False] * 7, *[True] * 3, *[True] * 10)
    line = VersionLine(
        version=1,
        state="serving",
        parent_version=0,
        created_at=START,
        served_at=START + 601,
        turns=8,
        good=3,
        bad=5,
        hints=4,
        off_policy=0,
        reply_tokens=320,
        stale_tokens=0,
        terms={"distillation": 0.08},
        divergence=0.01,
        gate={"probe_difference": 1e-5},
        why="passed",
        said=Rate(hits=10, total=10),
        watch=None,
        seconds=9.0,
    )
    left_out = ReasonLine(
        reason="neutral",
        final=True,
        count=3,
        explanation="No evidence is no reward.",
        examples=(Example(turn_id=4, session_id=1, asked="<i>why?", answer="because", detail="It says nothing."),),
    )
    counts = Status(
        version=1,
        sessions=2,
        turns=11,
        trained=8,
        waiting={},
        left_out={"neutral": 3},
        verdicts={"bad": 5, "good": 3},
        updates={"done": 1},
        rolled_back=(),
        marked=(),
        paused_since=None,
    )
    fields: dict[str, Any] = {
        "model": "tiny",
        "made_at": START + 9000,
        "since": None,
        "counts": counts,
        "reasons": (left_out,),
        "said": Rate(hits=13, total=20),
        "satisfaction": satisfaction(turns),
        "marks": marks(turns, [(1, START + 601)]),
        "versions": (line,),
    }
    return Account(**{**fields, **changes})
