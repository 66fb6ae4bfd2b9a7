"""`nextstate traffic`: recorded traffic, to see where each request would belong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from nextstate.cli.common import AsJson, friendly, out

traffic_app = typer.Typer(no_args_is_help=True, help="Recorded traffic.")


@traffic_app.callback()
def traffic() -> None:
    """Recorded traffic."""


@traffic_app.command("replay")
@friendly
def traffic_replay(
    file: Annotated[Path, typer.Argument(help="JSON lines of type request, scripted_response and event.")],
    without_ids: Annotated[
        bool, typer.Option("--without-ids", help="Take headers and naming fields away first: content decides alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say for each request of a recording which session it belongs to, after which answer, and why. Needs no model."""
    from nextstate.collect.replay import replay

    rows = replay(file, without_ids=without_ids)
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row), ensure_ascii=False))
        return
    table = Table("seq", "session", "kind", "parent", "next state", "why")
    for row in rows:
        said = " / ".join(f"{message['role']}: {' '.join(message['text'].split())}" for message in row.next_state)
        shown = said if len(said) <= 60 else f"{said[:59]}…"
        parent = "" if row.parent is None else row.parent
        cells = [row.seq, row.session or "", row.kind, parent, shown, row.reason]
        table.add_row(*(escape(str(cell)) for cell in cells))
    out.print(table)
