"""The learning report: was it learned, from what, at what price, and was anything lost.

One record, written three ways: a terminal table, JSON for programs, one HTML file without external requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nextstate.report import account
from nextstate.report.account import Account, number
from nextstate.report.stats import Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold for the run to count as a success."""

    name: str
    before: float | None
    """For version 0; None where there is nothing to compare with."""
    after: float | None
    """For the newest version."""
    bound: str
    """What is allowed, in words."""
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    question: str
    before: str
    before_met: bool
    after: str
    after_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningReport:
    model: str
    wish: str
    seed: int
    newest_version: int
    before: Rate
    after: Rate
    p_value: float
    """One-sided exact sign test over the paired answers."""
    checks: tuple[Check, ...]
    answers: tuple[SideBySide, ...]
    account: Account
    """What the store knows: turns and why they were not trained, versions, verdicts."""
    timings: dict[str, float | None]
    """Seconds; the names say of what."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def write(report: LearningReport, folder: Path) -> tuple[Path, Path]:
    """report.html and report.json in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    html, data = folder / "report.html", folder / "report.json"
    html.write_text(account.page("learning.html.jinja", report=report))
    data.write_text(json.dumps(as_json(report), indent=1))
    return html, data


def as_json(report: LearningReport) -> dict[str, Any]:
    """The report for programs, with shares and intervals worked out."""
    rates = {"before": report.before.as_json(), "after": report.after.as_json()}
    return {**asdict(report), **rates, "account": account.as_json(report.account), "passed": report.passed}


def show(report: LearningReport, console: Console, *, examples: int = 4) -> None:
    """The report on a terminal."""
    console.print(f"\n[bold]Answers that met the wish[/bold] ({report.wish}), on questions never asked before:")
    console.print(f"  version 0:  {report.before}", highlight=False)
    console.print(f"  version {report.newest_version}:  {report.after}   p = {report.p_value:.2g}", highlight=False)
    for pair in side_by_side(report, examples):
        console.print(f"\n  {pair.question}", style="bold", markup=False)
        for version, text, met in (
            (0, pair.before, pair.before_met),
            (report.newest_version, pair.after, pair.after_met),
        ):
            mark = "✓" if met else "✗"
            shown = " ".join(text.split())
            shown = shown if len(shown) <= 160 else shown[:159] + "…"
            console.print(f"    {mark} v{version}: {shown}", markup=False, highlight=False)
    table = Table("check", "version 0", f"version {report.newest_version}", "allowed", "", title="\nChecks")
    for check in report.checks:
        table.add_row(check.name, number(check.before), number(check.after), check.bound, _mark(check.passed))
    console.print(table)


def side_by_side(report: LearningReport, n: int) -> Sequence[SideBySide]:
    """Every k-th pair, so that what is shown was not picked."""
    step = max(1, len(report.answers) // n)
    return report.answers[::step][:n]


def _mark(passed: bool) -> str:
    return "[green]ok[/green]" if passed else "[red]FAILED[/red]"
