from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from tests.report.accounts import an_account

from nextstate.report import learning
from nextstate.report.learning import Check, LearningReport, SideBySide
from nextstate.report.stats import Rate


def a_report(*, passed: bool = True) -> LearningReport:
    return LearningReport(
        model="tiny",
        wish="at most 25 words",
        seed=3,
        newest_version=2,
        before=Rate(hits=10, total=20),
        after=Rate(hits=18, total=20),
        p_value=0.004,
        checks=(Check(name="turns lost", before=None, after=0.0, bound="0", passed=passed),),
        answers=(SideBySide(question="<b>?", before="long", before_met=False, after="short.", after_met=True),),
        account=an_account(),
        timings={"first_token_p50": 0.2, "never_seen": None},
    )


def test_the_file_for_programs_holds_rates_with_their_intervals(tmp_path: Path):
    _, data = learning.write(a_report(), tmp_path)
    read = json.loads(data.read_text())
    assert read["before"] == {
        "hits": 10,
        "total": 20,
        "share": 0.5,
        "interval_95": list(Rate(hits=10, total=20).interval),
    }
    assert read["passed"] is True


def test_the_page_says_what_happened_and_asks_no_other_host_for_anything(tmp_path: Path):
    page = learning.write(a_report(), tmp_path)[0].read_text()
    assert "<h1>It learned</h1>" in page
    assert "10 of 20, 50% (30% to 70%)" in page
    assert "not measured" in page
    assert "&lt;b&gt;?" in page
    assert "http" not in page


def test_one_failed_check_is_a_failed_run(tmp_path: Path):
    report = a_report(passed=False)
    assert not report.passed
    assert "Not shown to have learned" in learning.write(report, tmp_path)[0].read_text()


def test_the_terminal_shows_both_rates_and_each_check():
    console = Console(record=True, width=120, file=None, force_terminal=False)
    learning.show(a_report(passed=False), console)
    text = console.export_text()
    assert "18 of 20, 90%" in text
    assert "FAILED" in text


def test_the_pairs_that_are_shown_are_not_picked():
    report = a_report()
    many = [SideBySide(question=str(n), before="", before_met=False, after="", after_met=True) for n in range(10)]
    shown = learning.side_by_side(LearningReport(**{**_fields(report), "answers": tuple(many)}), 4)
    assert [pair.question for pair in shown] == ["0", "2", "4", "6"]


def _fields(report: LearningReport) -> dict:
    return {name: getattr(report, name) for name in LearningReport.__slots__}
