"""The tables of docs/results.md, from the records beside it: `python -m benchmarks.results_page`.

A table stands between two marks in the page, and what is around it is written by hand:

    <!-- table: separate -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flaws import FLAWS as FLAWS_IN_ORDER
from nextstate.people import results
from nextstate.people.experiment import METHODS
from nextstate.people.personas import PERSONAS
from nextstate.people.results import Cell, agreement, cell
from nextstate.report.stats import Rate, mean_interval

PAGE = Path("docs/results.md")
PEOPLE, FLAWS = Path("docs/results/people"), Path("docs/results/flaws")

_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Record = Mapping[str, Any]


def page_with_tables(text: str, people: Sequence[Record], flaws: Sequence[Record]) -> str:
    """The page with every table made anew; a name that no table has is a KeyError."""
    separate = [record for record in people if len(record["personas"]) == 1]
    joint = [record for record in people if len(record["personas"]) > 1]
    made = {
        "untaught": untaught_table(separate),
        "separate-until": until_table(separate),
        "separate-share": share_table(separate),
        "joint-until": until_table(joint),
        "joint-share": share_table(joint),
        "judge": judge_table(people),
        "updates": update_table(people),
        "flaws": flaws_table(flaws),
    }
    return _TABLE.sub(lambda found: f"{found[1]}{made[found[2]]}{found[3]}", text)


def untaught_table(records: Sequence[Record]) -> str:
    """How often the model as it is does what a persona wants."""
    rows = []
    for name in PERSONAS:
        own = [record["first_answers"][name] for record in records if record["personas"] == [name]
               and record["method"] == "none"]  # fmt: skip
        if own:
            met, cut = "".join(one["met"] for one in own), "".join(one["cut"] for one in own)
            rows.append([name, str(Rate(hits=met.count("#"), total=len(met))), f"{cut.count('x') / len(cut):.0%}"])
    return _markdown(["", "first answers as wished", "broke off at the token limit"], rows)


def until_table(records: Sequence[Record]) -> str:
    """Sessions until a wish stuck, by method and persona, with the mean over personas."""
    rows = []
    for method in METHODS:
        own = [record for record in records if record["method"] == method]
        cells = {name: found for name in PERSONAS if (found := cell(own, name)) is not None}
        if not cells:
            continue
        columns = [_until(cells[name]) if name in cells else "" for name in PERSONAS]
        # Of each seed the mean over personas, so that the interval is over runs.
        per_seed = [
            sum(values) / len(values) for values in zip(*(c.sessions_until for c in cells.values()), strict=False)
        ]
        rows.append([method, *columns, _interval(per_seed)])
    return _markdown(["method", *PERSONAS, "mean"], rows)


def share_table(records: Sequence[Record]) -> str:
    """Share of first answers as wished in the last third of the sessions, by method and persona."""
    rows = []
    for method in METHODS:
        own = [record for record in records if record["method"] == method]
        found = [cell(own, name) for name in PERSONAS]
        if any(found):
            rows.append([method, *(_shares(one) if one is not None else "" for one in found)])
    return _markdown(["method", *PERSONAS], rows)


def judge_table(records: Iterable[Record]) -> str:
    """What the judge made of answers that were as wished, and of those that were not."""
    rows = []
    for name in PERSONAS:
        counts = agreement(record for record in records if record["personas"] == [name])
        for met in (True, False):
            row = {verdict: counts[met, verdict] for verdict in ("good", "bad", "neutral", "abstained")}
            total = sum(row.values())
            if total:
                right = Rate(hits=row["good" if met else "bad"], total=total)
                rows.append([name, "as wished" if met else "not as wished", *map(str, row.values()), str(right)])
    return _markdown(["persona", "answers", "good", "bad", "neutral", "abstained", "right"], rows)


def update_table(records: Sequence[Record]) -> str:
    """What training did: turns that took part, versions that the gate refused, and how far the last one went."""
    rows = []
    groups = [[name] for name in PERSONAS] + [list(PERSONAS)]
    for group in groups:
        for method in METHODS:
            own = [r for r in records if r["personas"] == group and r["method"] == method and r["updates"]]
            if not own:
                continue
            made = [update for record in own for update in record["updates"]]
            refused = sum(update["state"] == "rejected" for update in made)
            last = [record["updates"][-1]["divergence"] for record in own]
            trained = sum(record["turns"].get("trained", 0) for record in own) / len(own)
            cpu = sum(record["cpu_s"] for record in own) / len(own)
            who = group[0] if len(group) == 1 else "joint"
            numbers = f"{trained:.0f}", f"{len(made) / len(own):.1f}", str(refused), f"{sum(last) / len(last):.2f}"
            rows.append([who, method, *numbers, f"{cpu:.0f}"])
    return _markdown(
        ["personas", "method", "turns trained", "updates", "refused", "last divergence", "CPU seconds"], rows
    )


def flaws_table(records: Sequence[Record]) -> str:
    """What each flaw costs, beside the same experiment without it."""
    rows = []
    for flaw in FLAWS_IN_ORDER:
        own = [record for record in records if record["flaw"] == flaw]
        if not own:
            continue
        found = cell(own, own[0]["personas"][0])
        assert found is not None
        last = [record["updates"][-1]["divergence"] for record in own if record["updates"]]
        refused = sum(update["state"] == "rejected" for record in own for update in record["updates"])
        first = [u["distillation"] for record in own for u in record["updates"][:1] if "distillation" in u]
        rows.append(
            [
                flaw.replace("-", " "),
                _until(found),
                _shares(found),
                f"{sum(first) / len(first):.3f}" if first else "",
                f"{sum(last) / len(last):.2f}" if last else "",
                str(refused),
            ]
        )
    header = ["flaw", "sessions until it sticks", "last third", "first distillation loss", "last divergence", "refused"]
    return _markdown(header, rows)


_ENOUGH = 3
"""Runs from which an interval says something; of fewer each is shown."""


def _until(found: Cell) -> str:
    if len(found.until) < _ENOUGH:
        return ", ".join("never" if until is None else str(until) for until in found.until)
    never = f", {found.censored} of {len(found.until)} never" if found.censored else ""
    return f"{_interval(found.sessions_until)}{never}"


def _shares(found: Cell) -> str:
    if len(found.at_the_end) < _ENOUGH:
        return ", ".join(f"{share:.0%}" for share in found.at_the_end)
    mean, low, high = mean_interval(found.at_the_end)
    return f"{mean:.0%} ({max(0.0, low):.0%} to {min(1.0, high):.0%})"


def _interval(values: Sequence[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.1f} ({low:.1f} to {high:.1f})" if len(values) >= _ENOUGH else f"{mean:.1f}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    made = page_with_tables(PAGE.read_text(), results.read(PEOPLE), results.read(FLAWS))
    PAGE.write_text(made)
    print(f"{PAGE}: tables of {len(results.read(PEOPLE))} + {len(results.read(FLAWS))} runs")


if __name__ == "__main__":
    main()
