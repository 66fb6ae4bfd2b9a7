"""`nextstate keys`: who may use a server, also while it runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from nextstate import config
from nextstate.cli.common import AsJson, Data, err, friendly, open_store, out

keys_app = typer.Typer(no_args_is_help=True, help="Who may use the server, and as whom.")


@keys_app.command("add")
@friendly
def keys_add(
    name: Annotated[str, typer.Argument(help="What the key is called here, say the device that has it.")],
    user: Annotated[
        str | None, typer.Option(help="Whose conversations it opens; a user of the key's own name by default.")
    ] = None,
    no_learn: Annotated[bool, typer.Option("--no-learn", help="Never learn from what it asks.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once. The first one makes every request need one."""
    from nextstate.store.keys import add_key
    from nextstate.store.store import Store, make_folder

    # Unlike looking, this may come first: an address that others reach is not served before there is a key.
    settings = config.load(None, **({} if data is None else {"data": data}))
    make_folder(settings.data)
    store = Store.open(settings.database_url)
    user = name if user is None else user
    key = store.write_now(add_key, name, user, learn=not no_learn)
    if as_json:
        print(json.dumps({"name": name, "user": user, "learn": not no_learn, "key": key}))
        return
    print(key)
    said = "what it asks is never learned from" if no_learn else "the model learns from what it asks"
    err.print(
        f"Keep it: it is shown this once and stored as a hash. It belongs to user '{user}'; {said}.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


@keys_app.command("list")
@friendly
def keys_list(data: Data = None, as_json: AsJson = False) -> None:
    """All keys, revoked ones too; never the keys themselves."""
    from nextstate.store.keys import list_keys

    found = open_store(data).read_now(list_keys)
    if as_json:
        print(json.dumps([{k: v for k, v in asdict(key).items() if k != "digest"} for key in found]))
        return
    table = Table("name", "user", "learns", "key", "created", "last used", "revoked")
    for key in found:
        learns = "yes" if key.learn else "no"
        times = [_minute(at) for at in (key.created_at, key.used_at, key.revoked_at)]
        table.add_row(escape(key.name), escape(key.user), learns, f"ns-{key.key_id}…", *times)
    out.print(table)


@keys_app.command("revoke")
@friendly
def keys_revoke(name: str, data: Data = None) -> None:
    """Let a key open nothing any more, within a second also on a server that runs."""
    from nextstate.store.keys import revoke_key

    open_store(data).write_now(revoke_key, name)
    print(f"Key '{name}' opens nothing any more.")


def _minute(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
