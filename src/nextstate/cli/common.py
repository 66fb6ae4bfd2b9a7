"""What the commands share: where to print, which data folder, and how to fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape

from nextstate import config
from nextstate.errors import ConfigError, NextstateError

if TYPE_CHECKING:
    from nextstate.store.store import Store

P = ParamSpec("P")

out = Console()
err = Console(stderr=True)

Data = Annotated[
    Path | None,
    typer.Option("--data", help="The data folder that `serve` was given; else $NEXTSTATE_DATA, or the default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def friendly(command: Callable[P, None]) -> Callable[P, None]:
    """End with one sentence and status 1 where the user can do something about it."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except NextstateError as error:
            err.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
            raise typer.Exit(1) from error

    return wrapped


def open_store(data: Path | None) -> Store:
    """The store of a data folder, which must be there: looking must not create one."""
    from nextstate.store.store import Store

    settings = config.load(None, **({} if data is None else {"data": data}))
    data = settings.data
    if not (data / "nextstate.db").exists():
        raise ConfigError(
            f"{data} holds no nextstate data. Start `nextstate serve --data {data}` first, or name another."
        )
    return Store.open(settings.database_url)
