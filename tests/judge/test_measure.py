from __future__ import annotations

import pytest

from nextstate.judge.labelled import LabelledTurn
from nextstate.judge.measure import measure
from nextstate.types import Hint, Source, Verdict, Vote

from .rows import a_turn, user

GOOD, NEUTRAL, BAD = Vote.GOOD, Vote.NEUTRAL, Vote.BAD


def a_row(label: Vote, kind: str = "k", directive: bool | None = None) -> LabelledTurn:
    return LabelledTurn(turn=a_turn(user("x")), label=label, kind=kind, directive=directive, group="")


def a_vote(value: Vote | None, sure: float = 0.95, best: Vote | None = None, hint: bool = False) -> Verdict:
    best = value if best is None else best
    probabilities = {vote.name.lower(): sure if vote is best else (1 - sure) / 2 for vote in Vote}
    hints = (Hint(text="Say it in French.", source=Source.USER),) if hint else ()
    return Verdict(
        turn_id=7, judge="j", value=value, votes=(value,), probabilities=probabilities, reason="", hints=hints
    )


def test_figures_worked_out_by_hand():
    labels = [GOOD, GOOD, BAD, BAD, BAD, NEUTRAL, NEUTRAL, GOOD]
    values = [GOOD, BAD, BAD, None, GOOD, NEUTRAL, None, GOOD]
    rows = [a_row(label, kind=f"k{n}") for n, label in enumerate(labels)]
    verdicts = [a_vote(value, best=value if value is not None else BAD) for value in values]
    # The last was decided by evidence: no vote, no probabilities.
    verdicts[-1] = Verdict(turn_id=7, judge="evidence", value=GOOD, reason="")
    found = measure(rows, verdicts, [0.2] * 7 + [9.0])
    assert found.accuracy == 5 / 8  # the abstention on a neutral row counts as right
    # good: 2 hits of 3 labels and 3 verdicts; bad: 1 of 3 and 2; neutral: 2 of 2 and 3 (two abstentions).
    assert found.f1 == pytest.approx({"good": 4 / 6, "neutral": 4 / 5, "bad": 2 / 5})
    assert found.macro_f1 == pytest.approx((4 / 6 + 4 / 5 + 2 / 5) / 3)
    assert (found.voted, found.voted_accuracy) == (6, 4 / 6)
    assert found.abstained == 2 / 8
    assert found.wrong_sign == 2 / 6  # of six signed rows
    assert found.signed_precision == 3 / 5
    assert found.confusion["bad"] == {"good": 1, "neutral": 0, "bad": 1, "abstained": 1}
    assert found.by_evidence == 1
    assert found.seconds_per_vote == pytest.approx(0.2)
    assert found.wrong_by_kind == {"k1": (1, 1), "k3": (1, 1), "k4": (1, 1)}
    # Seven rows with a confidence of 0.95, most probable value right on rows 0, 2, 3 and 5: |4/7 - 0.95|.
    assert found.calibration is not None
    assert found.calibration.error == pytest.approx(abs(4 / 7 - 0.95))


def test_the_calibration_error_weighs_bins_by_their_rows():
    rows = [a_row(GOOD)] * 4
    verdicts = [a_vote(GOOD, 0.95), a_vote(GOOD, 0.95), a_vote(BAD, 0.95), a_vote(GOOD, 0.55)]
    # Three rows at 0.95, two right: |2/3 - 0.95| * 3/4; one at 0.55, right: 0.45 * 1/4.
    found = measure(rows, verdicts, [0.1] * 4).calibration
    assert found is not None
    assert found.error == pytest.approx((0.95 - 2 / 3) * 3 / 4 + 0.45 / 4)


def test_hints_are_measured_on_bad_rows_called_bad():
    rows = [
        a_row(BAD, directive=True),
        a_row(BAD, directive=True),
        a_row(BAD, directive=False),
        a_row(GOOD, directive=True),
    ]
    verdicts = [a_vote(BAD, hint=True), a_vote(BAD), a_vote(BAD, hint=True), a_vote(GOOD)]
    assert measure(rows, verdicts, [0.1] * 4).hints == {"precision": 0.5, "recall": 0.5}
    assert measure([a_row(BAD)], [a_vote(BAD)], [0.1]).hints is None


def test_a_judge_that_only_abstains_has_no_calibration_and_no_precision():
    silent = Verdict(turn_id=7, judge="j", value=None, reason="")
    found = measure([a_row(GOOD)], [silent], [0.1])
    assert (found.calibration, found.signed_precision, found.seconds_per_vote) == (None, None, None)
    assert (found.accuracy, found.abstained) == (0.0, 1.0)
