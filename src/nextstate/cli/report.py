"""`nextstate report`: what was learned, from what, and why from nothing else, as one file."""

from __future__ import annotations

import json
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nextstate.cli.common import Data, err, friendly, open_store, out
from nextstate.errors import ConfigError


@friendly
def report(
    version: Annotated[int | None, typer.Option(help="Only this version, and what began with its update.")] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            help="Only what began then or later.", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
        ),
    ] = None,
    as_html: Annotated[bool, typer.Option("--html", help="A page that needs no other file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    as_text: Annotated[bool, typer.Option("--text", help="For a terminal; the default.")] = False,
    file: Annotated[Path | None, typer.Option("--out", help="Write it there.")] = None,
    no_examples: Annotated[bool, typer.Option("--no-examples", help="Without pieces of conversations.")] = False,
    data: Data = None,
) -> None:
    """What was learned, from what, and why from nothing else: for you, or to send to a colleague."""
    from nextstate.report import account

    if as_html + as_json + as_text > 1:
        raise ConfigError("--html, --json and --text exclude one another. Nothing was written. Choose one.")
    if version is not None and since is not None:
        raise ConfigError("--version and --since exclude one another. Nothing was written. Choose one.")
    store = open_store(data)
    try:
        made = store.read_now(
            account.account,
            version=version,
            since=None if since is None else since.timestamp(),
            whose=lambda owner: not no_examples,
        )
    except LookupError as error:
        raise ConfigError(f"{error}. `nextstate versions list` shows what there is.") from error
    if file is None and not as_html and not as_json:
        account.show(made, out)
        return
    if as_html:
        text = account.as_html(made)
    elif as_json:
        text = json.dumps(account.as_json(made), indent=1)
    else:
        page = StringIO()
        account.show(made, Console(file=page, width=160))
        text = page.getvalue()
    if file is None:
        print(text)
        return
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}. Choose another: --out FILE.") from error
    err.print(f"written to {file}", markup=False, highlight=False, soft_wrap=True)
