"""The account of what was learned: from what, with what effect, and why from nothing else.

One record of what the store knows. `nextstate report` writes it to a file, the page at / shows it, and the demo report
contains it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy import Connection, select

from nextstate.learn.watch import comparisons
from nextstate.report.charts import as_svg, satisfaction_chart
from nextstate.report.reasons import explanations
from nextstate.report.satisfaction import Bin, Mark, marks, satisfaction
from nextstate.report.stats import Rate
from nextstate.store import learning, looking, watching
from nextstate.store.schema import meta
from nextstate.store.status import WAITS, Status, status
from nextstate.store.store import AnyRow
from nextstate.store.watching import SignedTurn
from nextstate.types import TurnState, WaitReason

TERMS = ("policy_gradient", "distillation", "anchor_kl")
"""Parts of an update's loss."""

NEWEST_VERSIONS = 50

_EXAMPLES = 3
_MOST_LETTERS = 160
_LOOKED_AT = 20
"""Newest turns with a reason among which examples are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A turn, in short."""

    turn_id: int
    session_id: int
    asked: str
    answer: str
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonLine:
    reason: str
    """A WaitReason or a SkipReason."""
    final: bool
    """False: these turns may still be trained."""
    count: int
    explanation: str
    """What it means and what to do about it."""
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLine:
    """One version: the update that made it, what the gate measured, and what people said."""

    version: int
    state: str
    parent_version: int | None
    created_at: float
    served_at: float | None
    turns: int | None
    """Trained on. None, here and below: this version has no update, or its update did not measure that."""
    good: int | None
    """Of these turns, by their verdicts."""
    bad: int | None
    hints: int | None
    """Turns with a hint that the teacher read."""
    off_policy: int | None
    """Turns that the update kept out."""
    reply_tokens: int | None
    stale_tokens: int | None
    terms: Mapping[str, float]
    """Of the loss, by name."""
    divergence: float | None
    """nats a token from the base, on the probe."""
    gate: Mapping[str, float]
    """What it measured, by name."""
    why: str
    """What the gate, or the watch, said about it."""
    said: Rate
    """Good verdicts among the good and bad ones on its own answers."""
    watch: Mapping[str, Any] | None
    """Counts and e-value against what served before, see learn/watch.py; None: it is not watched."""
    seconds: float | None
    """That the update took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    model: str
    made_at: float
    """Seconds since the epoch, as all times here."""
    since: float | None
    """Only turns, verdicts and versions from then on; None: all."""
    counts: Status
    reasons: tuple[ReasonLine, ...]
    """The waiting ones first, then by how many turns."""
    said: Rate
    """Good verdicts among the good and bad ones."""
    satisfaction: tuple[Bin, ...]
    """The same as it went on."""
    marks: tuple[Mark, ...]
    versions: tuple[VersionLine, ...]
    """Newest first."""


def account(
    db: Connection,
    *,
    since: float | None = None,
    version: int | None = None,
    newest: bool = False,
    whose: Callable[[str], bool] = lambda owner: True,
) -> Account:
    """What the store knows.

    Args:
        version: only this one's line; and as `since` the moment when its update began.
        newest: of the versions the newest NEWEST_VERSIONS, of the verdicts the newest MAX_VERDICTS: for those who look
            again and again.
        whose: of which owners turns may be shown as examples. Counts are of everybody's.

    Raises:
        LookupError: there is no such version.
    """
    rows = learning.list_versions(db, newest=NEWEST_VERSIONS if newest else None)
    if version is not None:
        rows = [row for row in rows if row.version == version]
        if not rows:
            raise LookupError(f"there is no version {version}")
        since = rows[0].started_at or rows[0].created_at
    elif since is not None:
        rows = [row for row in rows if row.created_at >= since]
    rows.reverse()
    signed = watching.signed_turns(db, since=watching.window_start(db) if newest else since or 0.0)
    watched = {one.version: asdict(one) for one in comparisons(db)}
    said: dict[int, list[SignedTurn]] = {}
    for turn in signed:
        said.setdefault(turn.version, []).append(turn)
    counts = status(db, since=since)
    return Account(
        model=db.execute(select(meta.c.value).where(meta.c.key == "model")).scalar() or "unknown",
        made_at=time.time(),
        since=since,
        counts=counts,
        reasons=_reasons(db, counts, since, whose),
        said=_rate(signed),
        satisfaction=satisfaction(signed),
        marks=marks(signed, [(row.version, row.served_at) for row in rows if row.served_at is not None]),
        versions=tuple(_version_line(row, _rate(said.get(row.version, ())), watched.get(row.version)) for row in rows),
    )


def _rate(signed: Sequence[SignedTurn]) -> Rate:
    return Rate(hits=sum(turn.good for turn in signed), total=len(signed))


def _reasons(
    db: Connection, counts: Status, since: float | None, whose: Callable[[str], bool]
) -> tuple[ReasonLine, ...]:
    states = {reason: state for state, reason in WAITS.items()}
    waiting = [(reason, False, count) for reason, count in counts.waiting.items()]
    left_out = [(reason, True, count) for reason, count in counts.left_out.items()]
    lines = []
    for reason, final, count in sorted([*waiting, *left_out], key=lambda line: (line[1], -line[2])):
        in_state = (TurnState.LEFT_OUT, reason) if final else (states[WaitReason(reason)], None)
        newest = looking.turns_in(db, *in_state, limit=_LOOKED_AT)
        own = [row for row in newest if whose(row.user) and row.created_at >= (since or 0.0)]
        examples = tuple(example(row) for row in own[:_EXAMPLES])
        explanation = explanations()[reason]
        lines.append(ReasonLine(reason=reason, final=final, count=count, explanation=explanation, examples=examples))
    return tuple(lines)


def example(row: AnyRow) -> Example:
    """A turn of `looking.list_turns`, cut to what fits on a line."""
    asked = next((m["content"] for m in reversed(row.messages) if isinstance(m.get("content"), str)), "")
    return Example(
        turn_id=row.turn_id,
        session_id=row.session_id,
        asked=_short(asked),
        answer=_short(row.answer or ""),
        detail=row.detail,
    )


def _short(text: str) -> str:
    words = " ".join(text[: 4 * _MOST_LETTERS].split())
    return words if len(words) <= _MOST_LETTERS else words[: _MOST_LETTERS - 1] + "…"


def _version_line(row: AnyRow, said: Rate, watched: Mapping[str, Any] | None) -> VersionLine:
    metrics, gate = row.metrics or {}, row.gate or {}
    mean, count = metrics.get("mean_reward"), metrics.get("turns")
    # A reward is 1 or -1, so mean and count say how many there were of each.
    good = None if mean is None or count is None else round(count * (1 + mean) / 2)
    return VersionLine(
        version=row.version,
        state=row.state,
        parent_version=row.parent_version,
        created_at=row.created_at,
        served_at=row.served_at,
        turns=count,
        good=good,
        bad=None if good is None else count - good,
        hints=metrics.get("turns_with_teacher"),
        off_policy=metrics.get("turns_off_policy"),
        reply_tokens=metrics.get("reply_tokens"),
        stale_tokens=metrics.get("stale_tokens"),
        terms={name: metrics[name] for name in TERMS if name in metrics},
        divergence=metrics.get("divergence", gate.get("divergence")),
        gate={name: value for name, value in gate.items() if name not in ("why", "watch")},
        why=gate.get("why", ""),
        said=said,
        watch=gate.get("watch") or watched,
        seconds=metrics.get("seconds"),
    )


def as_json(made: Account) -> dict[str, Any]:
    """The account for programs, with shares and intervals worked out."""
    return {
        **asdict(made),
        "accounted_for": made.counts.accounted_for,
        "said": made.said.as_json(),
        "satisfaction": [{**asdict(one), "rate": one.rate.as_json()} for one in made.satisfaction],
        "versions": [{**asdict(line), "said": line.said.as_json()} for line in made.versions],
    }


def as_html(made: Account) -> str:
    """One file that needs no other."""
    return page("account.html.jinja", account=made)


def page(template: str, **values: Any) -> str:
    """An HTML file from one of our templates; whatever is put into it stays text."""
    environment = Environment(
        loader=PackageLoader("nextstate.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["moment"] = moment
    environment.filters["number"] = number
    environment.globals["chart"] = lambda made: Markup(as_svg(satisfaction_chart(made.satisfaction, made.marks)))
    return environment.get_template(template).render(**values)


def moment(at: float | None) -> str:
    return "" if at is None else f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"


def number(value: float | None) -> str:
    """Three digits that mean something; nothing for what is not known."""
    return "" if value is None else f"{value:.3g}"


def show(made: Account, console: Console) -> None:
    """The account on a terminal."""
    counts = made.counts
    since = "" if made.since is None else f", since {moment(made.since)}"
    console.print(f"[bold]{escape(made.model)}[/bold]: version {counts.version} serves{since}")
    console.print(
        f"{counts.turns} turns, of which {counts.trained} trained; good verdicts: {made.said}", highlight=False
    )
    if made.satisfaction:
        table = Table("verdicts", "from", "to", "good", title="How content people were", title_justify="left")
        for one in made.satisfaction:
            table.add_row(f"{one.start + 1}-{one.end}", moment(one.first_at), moment(one.last_at), str(one.rate))
        console.print(table)
    table = Table(
        *("version", "state", "turns", "good/bad", "hints", "loss terms", "divergence", "said since", "gate"),
        title="Versions",
        title_justify="left",
    )
    for line in made.versions:
        terms = ", ".join(f"{name} {value:.4f}" for name, value in line.terms.items())
        signed = "" if line.good is None else f"{line.good}/{line.bad}"
        table.add_row(
            *(str(line.version), line.state, _count(line.turns), signed, _count(line.hints), terms),
            *(number(line.divergence), str(line.said), escape(line.why)),
        )
    console.print(table)
    table = Table("turns", "", "why", title="Not trained", title_justify="left")
    for reason in made.reasons:
        table.add_row(str(reason.count), "left out" if reason.final else "waiting", f"[bold]{reason.reason}[/bold]")
        table.add_row("", "", reason.explanation)
    console.print(table)


def _count(value: int | None) -> str:
    return "" if value is None else str(value)
