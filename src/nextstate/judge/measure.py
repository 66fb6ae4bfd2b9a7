"""How good a judge is, on turns whose labels are known.

Two readings of an abstention stand side by side. In the main figures it counts as neutral, because that is what it
does: the turn trains nothing. The second reading leaves out the rows on which the judge abstained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nextstate.judge.labelled import LabelledTurn
from nextstate.types import Verdict, Vote

BINS = 10
"""Equally wide bins of confidence, 0 to 1, in the calibration error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How often a judge is right, beside how sure it says it is."""

    error: float
    """Expected calibration error: sum over bins of (rows in bin / rows) * |share right - mean confidence|."""
    rows: int
    """Rows for which the judge gave probabilities; hard evidence gives none. Abstentions count with the value that was
    most probable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of one judge on one set of rows; shares are 0 to 1."""

    rows: int
    accuracy: float
    macro_f1: float
    """Mean F1 of good, neutral and bad, an abstention counted as neutral."""
    f1: dict[str, float]
    voted: int
    """Rows on which the judge did not abstain."""
    voted_accuracy: float
    voted_macro_f1: float
    abstained: float
    wrong_sign: float
    """Good rows called bad and bad rows called good, over all good and bad rows."""
    signed_precision: float | None
    """Signed verdicts that are right, over signed verdicts; None where there is none."""
    confusion: dict[str, dict[str, int]]
    """confusion[label][verdict], with 'abstained' among the verdicts."""
    by_evidence: int
    """Rows that hard evidence decided."""
    calibration: Calibration | None
    """None where the judge gave no probabilities."""
    hints: dict[str, float] | None
    """Over bad rows called bad whose file says whether there is a directive: 'precision', the share of rows with hints
    that have one, and 'recall', the share of rows with one that got hints. None where the file does not say."""
    wrong_by_kind: dict[str, tuple[int, int]]
    """Rows that went wrong, and rows, of each kind of which some went wrong; an abstention is wrong on a signed row."""
    seconds_per_vote: float | None
    """Mean time to a verdict of the rows that came to a vote, one after another; None: no row did."""


def measure(rows: Sequence[LabelledTurn], verdicts: Sequence[Verdict], seconds: Sequence[float]) -> Measured:
    """
    Args:
        verdicts: of the judge, one a row.
        seconds: that each took.
    """
    labels = [row.label for row in rows]
    values = [verdict.value for verdict in verdicts]
    as_neutral = [Vote.NEUTRAL if value is None else value for value in values]
    on_voted = [(label, value) for label, value in zip(labels, values, strict=True) if value is not None]
    signed = [(label, value) for label, value in zip(labels, as_neutral, strict=True) if label is not Vote.NEUTRAL]
    called = [(label, value) for label, value in on_voted if value is not Vote.NEUTRAL]
    asked = [took for verdict, took in zip(verdicts, seconds, strict=True) if verdict.votes]
    wrong = Counter(row.kind for row, value in zip(rows, as_neutral, strict=True) if row.label is not value)
    of_kind = Counter(row.kind for row in rows)
    f1 = _f1(labels, as_neutral)
    voted_f1 = _f1(*([pair[side] for pair in on_voted] for side in (0, 1)))
    return Measured(
        rows=len(rows),
        accuracy=_share([label is value for label, value in zip(labels, as_neutral, strict=True)]),
        macro_f1=sum(f1.values()) / len(f1),
        f1=f1,
        voted=len(on_voted),
        voted_accuracy=_share([label is value for label, value in on_voted]),
        voted_macro_f1=sum(voted_f1.values()) / len(voted_f1),
        abstained=_share([value is None for value in values]),
        wrong_sign=_share([label * value < 0 for label, value in signed]),
        signed_precision=_share([label is value for label, value in called]) if called else None,
        confusion={
            _word(label): {_word(value): n for value in (*Vote, None) for n in [_count(labels, values, label, value)]}
            for label in Vote
        },
        by_evidence=sum(verdict.value is not None and not verdict.votes for verdict in verdicts),
        calibration=_calibration(labels, verdicts),
        hints=_hints(rows, verdicts),
        wrong_by_kind={kind: (n, of_kind[kind]) for kind, n in wrong.most_common() if kind},
        seconds_per_vote=sum(asked) / len(asked) if asked else None,
    )


def _f1(labels: Sequence[Vote], values: Sequence[Vote]) -> dict[str, float]:
    """F1 of each value: 2 * hits / (rows with the label + rows with the verdict); 0 where there are neither."""
    found = {}
    for vote in Vote:
        hits = sum(label is vote and value is vote for label, value in zip(labels, values, strict=True))
        among = sum(label is vote for label in labels) + sum(value is vote for value in values)
        found[_word(vote)] = 2 * hits / among if among else 0.0
    return found


def _calibration(labels: Sequence[Vote], verdicts: Sequence[Verdict]) -> Calibration | None:
    bins: dict[int, list[tuple[bool, float]]] = {}
    for label, verdict in zip(labels, verdicts, strict=True):
        if verdict.probabilities is not None:
            best = max(verdict.probabilities, key=verdict.probabilities.__getitem__)
            sure = verdict.probabilities[best]
            bins.setdefault(min(BINS - 1, int(sure * BINS)), []).append((best == _word(label), sure))
    rows = sum(map(len, bins.values()))
    if not rows:
        return None
    gaps = (abs(sum(right for right, _ in held) - sum(sure for _, sure in held)) for held in bins.values())
    return Calibration(error=sum(gaps) / rows, rows=rows)


def _hints(rows: Sequence[LabelledTurn], verdicts: Sequence[Verdict]) -> dict[str, float] | None:
    bad = [
        (row.directive, bool(verdict.hints))
        for row, verdict in zip(rows, verdicts, strict=True)
        if row.directive is not None and row.label is Vote.BAD and verdict.value is Vote.BAD
    ]
    with_hint, with_directive = [pair for pair in bad if pair[1]], [pair for pair in bad if pair[0]]
    if not with_hint or not with_directive:
        return None
    return {
        "precision": _share([directive is True for directive, _ in with_hint]),
        "recall": _share([hint for _, hint in with_directive]),
    }


def _count(labels: Sequence[Vote], values: Sequence[Vote | None], label: Vote, value: Vote | None) -> int:
    return sum(one is label and other is value for one, other in zip(labels, values, strict=True))


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 0.0


def _word(vote: Vote | None) -> str:
    return "abstained" if vote is None else vote.name.lower()
