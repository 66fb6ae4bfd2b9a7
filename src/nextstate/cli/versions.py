"""`nextstate versions`: what made each version, what the gate measured, and what people said since."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from nextstate.cli.common import AsJson, Data, friendly, open_store, out
from nextstate.errors import ConfigError

versions_app = typer.Typer(no_args_is_help=True, help="The policy's versions.")


@versions_app.command("list")
@friendly
def versions_list(data: Data = None, as_json: AsJson = False) -> None:
    """All versions: what made them, and what the gate measured."""
    from nextstate.learn.watch import comparisons
    from nextstate.report.account import TERMS
    from nextstate.store import learning

    store = open_store(data)
    rows = store.read_now(learning.list_versions)
    watched = {one.version: asdict(one) for one in store.read_now(comparisons)}
    if as_json:
        print(json.dumps([{**row._mapping, "watch": _watch(row, watched)} for row in rows]))
        return
    table = Table("version", "state", "parent", "turns", "loss terms", "divergence", "probe", "watch", "gate")
    for row in rows:
        metrics, gate = row.metrics or {}, row.gate or {}
        terms = ", ".join(f"{name} {metrics[name]:.4f}" for name in TERMS if name in metrics)
        table.add_row(
            str(row.version),
            row.state,
            "" if row.parent_version is None else str(row.parent_version),
            str(metrics.get("turns", "")),
            terms,
            f"{gate['divergence']:.4f}" if "divergence" in gate else "",
            f"{gate['probe_difference']:.1e}" if "probe_difference" in gate else "",
            _watch_cell(_watch(row, watched)),
            escape(gate.get("why", "passed" if gate else "")),
        )
    out.print(table)


@versions_app.command("show")
@friendly
def versions_show(version: int, data: Data = None, as_json: AsJson = False) -> None:
    """One version: its update, the turns it was trained on, what the gate measured, what people said since."""
    from nextstate.learn.watch import comparisons
    from nextstate.store import status as queries
    from nextstate.store.forgetting import marked_versions

    store = open_store(data)
    found = store.read_now(queries.show_version, version)
    if found is None:
        raise ConfigError(f"there is no version {version}. `nextstate versions list` shows what there is.")
    row = found.row
    watch = _watch(row, {one.version: asdict(one) for one in store.read_now(comparisons)})
    turns = [{name: getattr(turn, name) for name in ("turn_id", "state", "reason", "reward")} for turn in found.turns]
    history = [{"at": event.at, "kind": event.kind, **event.data} for event in found.history]
    marked = version in store.read_now(marked_versions)
    if as_json:
        shown = {**row._mapping, "marked": marked, "watch": watch, "turns": turns, "history": history}
        print(json.dumps(shown))
        return
    parent = "the base" if row.parent_version is None else f"built on version {row.parent_version}"
    lines = [f"version {row.version}: {row.state}, {parent}"]
    if row.update_id is not None:
        took = f" in {row.finished_at - row.started_at:.1f} s" if row.finished_at else ""
        lines.append(f"update {row.update_id} ({row.update_state}){took}, on {len(turns)} turns:")
        for turn in turns:
            reward = {1: "good", -1: "bad", None: "no verdict"}[turn["reward"]]
            because = f" ({turn['reason']})" if turn["reason"] else ""
            lines.append(f"  turn {turn['turn_id']}: {reward}, {turn['state']}{because}")
    lines += [f"  {name}: {_number(value)}" for name, value in (row.metrics or {}).items()]
    gate = {name: value for name, value in (row.gate or {}).items() if name not in ("watch", "why")}
    lines += ["gate:", *(f"  {name}: {_number(value)}" for name, value in gate.items())] if gate else []
    lines += ["goes back to turns that were forgotten since"] if marked else []
    lines += [f"why: {row.gate['why']}"] if "why" in (row.gate or {}) else []
    lines.append(f"watch: {_watch_cell(watch) or 'not watched'}")
    lines.append("history:")
    for event in found.history:
        said = ", ".join(f"{name} {value}" for name, value in event.data.items() if isinstance(value, int | str))
        lines.append(f"  {datetime.fromtimestamp(event.at):%Y-%m-%d %H:%M:%S} {event.kind}: {said}")
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _watch(row: Any, watched: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """What the watch knows of a version now, or knew when it took it back; None: it is not watched."""
    taken_back: Mapping[str, Any] | None = (row.gate or {}).get("watch")
    return taken_back or watched.get(row.version)


def _watch_cell(watch: Mapping[str, Any] | None) -> str:
    if watch is None:
        return ""
    live = f"{watch['live_good']} of {watch['live_good'] + watch['live_bad']} good"
    before = f"{watch['reference_good']} of {watch['reference_good'] + watch['reference_bad']} before"
    return f"{live}, {before}, e {watch['e_value']:.3g}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
