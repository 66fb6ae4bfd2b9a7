"""Labelled turns to a head: the only place where a judge model is asked for more than a vote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import as_file, files

import torch

from nextstate.judge.evidence import evidence
from nextstate.judge.head import Fold, Head
from nextstate.judge.labelled import LabelledTurn, read_labelled
from nextstate.judge.prompts import prompts_hash, reply_of
from nextstate.judge.scored import ScoredJudge

_AT_ONCE = 4


def own_cases() -> list[LabelledTurn]:
    """The labelled turns that come with the package, written by hand for it."""
    with as_file(files("nextstate.judge").joinpath("cases.jsonl")) as path:
        return read_labelled(path)


def to_vote_on(rows: Sequence[LabelledTurn]) -> list[LabelledTurn]:
    """The rows that come to a vote: a user speaks, and no fact decides."""
    return [row for row in rows if reply_of(row.turn) and evidence(row.turn) is None]


async def seen(
    judge: ScoredJudge, rows: Sequence[LabelledTurn], layers: Sequence[int], advance: Callable[[int], None]
) -> Fold:
    """What a head that reads these layers sees of the rows.

    Args:
        rows: of one source, each of which comes to a vote.
        advance: told how many more rows are done.
    """
    parts = []
    for at in range(0, len(rows), _AT_ONCE):
        chunk = rows[at : at + _AT_ONCE]
        parts.append(await judge.features([row.turn for row in chunk], layers))
        advance(len(chunk))
    return Fold(features=torch.cat(parts), labels=[row.label for row in rows], groups=[f"{row.group}" for row in rows])


async def blank_head(judge: ScoredJudge, model: str, layers: Sequence[int]) -> Head:
    """A head that knows what it is for, and nothing else yet."""
    nothing = torch.zeros(0)
    fingerprint = await judge.fingerprint() if layers else ()
    return Head(
        model=model if layers else "",
        prompts_hash=prompts_hash() if layers else "",
        fingerprint=tuple(fingerprint),
        layers=tuple(layers),
        rows=0,
        centre=nothing,
        scale=nothing,
        weights=nothing,
        bias=nothing,
    )
