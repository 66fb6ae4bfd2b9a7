"""The command line: noun, then verb. A sentence for people, --json for programs."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from nextstate import __version__, config, logs
from nextstate.cli.common import AsJson, Data, err, friendly, open_store, out
from nextstate.cli.evaluate import eval_app
from nextstate.cli.export import export_app
from nextstate.cli.forget import forget
from nextstate.cli.judge import judge_app
from nextstate.cli.keys import keys_app
from nextstate.cli.learn import learn_app
from nextstate.cli.report import report
from nextstate.cli.settings import config_app, in_force
from nextstate.cli.steering import pause_app, paused_line, resume_app
from nextstate.cli.traffic import traffic_app
from nextstate.cli.versions import versions_app
from nextstate.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
turns_app = typer.Typer(no_args_is_help=True, help="What happened to each answer.")
model_app = typer.Typer(no_args_is_help=True, help="The built-in model.")
app.add_typer(turns_app, name="turns")
app.add_typer(versions_app, name="versions")
app.add_typer(learn_app, name="learn")
app.add_typer(model_app, name="model")
app.add_typer(judge_app, name="judge")
app.add_typer(keys_app, name="keys")
app.add_typer(traffic_app, name="traffic")
app.add_typer(pause_app, name="pause")
app.add_typer(resume_app, name="resume")
app.command()(forget)
app.add_typer(export_app, name="export")
app.add_typer(config_app, name="config")
app.command()(report)
app.add_typer(eval_app, name="eval")


@app.command()
@friendly
def serve(
    model: Annotated[
        str | None, typer.Option(help="Hub name or folder of a chat model; the default is built in.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the store and the policy versions.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback by default.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 8700 by default, 0 for any free one.")] = None,
    no_learn: Annotated[bool, typer.Option("--no-learn", help="Serve only: nothing is judged or trained.")] = False,
    config_file: Annotated[Path | None, typer.Option("--config", help="A TOML file; options here win over it.")] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Say what would be in force, and start nothing.")
    ] = False,
) -> None:
    """Serve a model over OpenAI's API, and learn from what happens next after every answer."""
    options: dict[str, Any] = {}
    if model is not None:
        options["model"] = model
    if data is not None:
        options["data"] = data
    if host is not None or port is not None:
        options["serve"] = {k: v for k, v in (("host", host), ("port", port)) if v is not None}
    if no_learn:
        options["learn"] = {"enabled": False}
    settings = config.load(config_file, **options)
    if check_config:
        changed = in_force(settings)
        print("The configuration is accepted. " + ("All is as it ships." if not changed else "Not as it ships:"))
        for name, value in changed.items():
            print(f"  {name} = {json.dumps(value)}")
        return
    logs.configure(settings.log, process="server")
    from nextstate.recipes import personal

    try:
        asyncio.run(personal.run(settings, lambda text: err.print(text, highlight=False, soft_wrap=True, markup=False)))
    except KeyboardInterrupt:
        err.print("stopped")


@app.command()
@friendly
def status(data: Data = None, as_json: AsJson = False) -> None:
    """Where all turns stand, and why the rest were not trained."""
    from nextstate.learn.watch import comparisons
    from nextstate.store import status as queries

    store = open_store(data)
    found, watched = store.read_now(queries.status), store.read_now(comparisons)
    if as_json:
        watch = [asdict(one) for one in watched]
        print(json.dumps({**asdict(found), "accounted_for": found.accounted_for, "watch": watch}))
        return
    out.print(f"version {found.version} serves; {found.turns} turns in {found.sessions} sessions")
    if found.paused_since is not None:
        out.print(paused_line(found.paused_since), soft_wrap=True)
    table = Table("turns", "", "why")
    table.add_row("trained", str(found.trained), "")
    for reason, count in found.waiting.items():
        table.add_row("waiting", str(count), str(reason))
    for reason, count in found.left_out.items():
        table.add_row("left out", str(count), str(reason))
    out.print(table)
    out.print("verdicts: " + (", ".join(f"{n} {name}" for name, n in found.verdicts.items()) or "none yet"))
    if found.judge_left_alone_since is not None:
        since = datetime.fromtimestamp(found.judge_left_alone_since)
        out.print(f"judge: down since {since:%Y-%m-%d %H:%M:%S}, tried now and then; turns wait and lose nothing")
    compared = found.judge_against_feedback
    if sum(compared.values()):
        out.print(
            f"judge against explicit feedback: {compared['right']} right, {compared['wrong']} wrong, of these "
            f"{compared['opposite']} opposite, {compared['abstained']} abstained",
            soft_wrap=True,
        )
    out.print("updates: " + (", ".join(f"{n} {name}" for name, n in found.updates.items()) or "none yet"))
    if found.not_learning is not None:
        out.print(f"not learning: {found.not_learning}", markup=False, highlight=False, soft_wrap=True)
    if watched:
        out.print(f"watch: {max(watched, key=lambda one: one.e_value)}", soft_wrap=True)
    if found.version in found.marked:
        out.print(
            f"version {found.version} goes back to turns that were forgotten since; `nextstate forget --retrain` goes "
            "back to before them",
            soft_wrap=True,
        )
    if found.rolled_back:
        numbers = ", ".join(map(str, found.rolled_back))
        out.print(f"rolled back by the watch: {numbers}; `nextstate versions show {found.rolled_back[-1]}` says why")


@turns_app.command("list")
@friendly
def turns_list(
    data: Data = None,
    limit: Annotated[int, typer.Option(help="How many, newest first.")] = 20,
    state: Annotated[str | None, typer.Option(help="Only turns in this state.")] = None,
    reason: Annotated[str | None, typer.Option(help="Only turns left out for this reason.")] = None,
    before: Annotated[int | None, typer.Option(help="Only turns before this one, to page on.")] = None,
    as_json: AsJson = False,
) -> None:
    """The newest turns."""
    from nextstate.store import status as queries
    from nextstate.types import SkipReason, TurnState

    for given, known in ((state, TurnState), (reason, SkipReason)):
        if given is not None and given not in set(known):
            raise ConfigError(f"'{given}' is not one of: {', '.join(known)}.")

    rows = open_store(data).read_now(queries.list_turns, limit=limit, state=state, reason=reason, before=before)
    if as_json:
        print(json.dumps([_turn_json(row) for row in rows]))
        return
    table = Table("turn", "session", "kind", "state", "reason", "tokens", "answer")
    for row in rows:
        answer = " ".join((row.answer or "").split())
        shown = answer if len(answer) <= 60 else answer[:59] + "…"
        cells = [row.turn_id, row.session, row.kind, row.state, row.reason or "", row.reply_tokens or 0, shown]
        table.add_row(*(escape(str(cell)) for cell in cells))
    out.print(table)


@turns_app.command("show")
@friendly
def turns_show(turn_id: int, data: Data = None, as_json: AsJson = False) -> None:
    """One turn: the conversation, the answer, what came next, the verdicts, and what became of it."""
    from nextstate.store import judging, turns
    from nextstate.store import status as queries

    store = open_store(data)
    row = store.read_now(queries.show_turn, turn_id)
    if row is None:
        raise ConfigError(f"there is no turn {turn_id}. `nextstate turns list` shows what there is.")
    verdicts = store.read_now(judging.list_verdicts, turn_id)
    messages = store.read_now(turns.load_messages, turn_id)
    if as_json:
        shown = {**_turn_json(row), "messages": messages, "next_state": row.next_state, "why": queries.why(row)}
        print(json.dumps({**shown, "verdicts": [asdict(v) for v in verdicts]}))
        return
    for message in messages:
        out.print(f"[bold]{escape(message['role'])}[/bold]: ", end="")
        out.print(str(message.get("content") or ""), markup=False, highlight=False, soft_wrap=True)
    for message in row.next_state or []:
        out.print(f"[bold]next, {escape(message['role'])}[/bold]: ", end="")
        out.print(str(message.get("content") or ""), markup=False, highlight=False, soft_wrap=True)
    for verdict in verdicts:
        value = "abstained" if verdict.value is None else verdict.value.name.lower()
        out.print(f"verdict {value} by {verdict.judge}: {verdict.reason}", markup=False, highlight=False)
        for hint in verdict.hints:
            out.print(f"  hint: {hint}", markup=False, highlight=False)
    out.print(queries.why(row), markup=False, highlight=False, soft_wrap=True)


@turns_app.command("why")
@friendly
def turns_why(turn_id: int, data: Data = None) -> None:
    """Why a turn was trained, waits, or was left out."""
    from nextstate.store import status as queries

    row = open_store(data).read_now(queries.show_turn, turn_id)
    if row is None:
        raise ConfigError(f"there is no turn {turn_id}. `nextstate turns list` shows what there is.")
    print(queries.why(row))


@app.command()
@friendly
def rollback(
    version: Annotated[int | None, typer.Argument(help="If not given, the one that served before.")] = None,
    data: Data = None,
) -> None:
    """Let an earlier version serve again; 0 is the model without anything learned."""
    from nextstate.store import learning

    try:
        wanted = open_store(data).write_now(learning.roll_back, version)
    except LookupError as error:
        raise ConfigError(f"{error}. Nothing has changed; `nextstate versions list` shows what there is.") from error
    out.print(
        f"Version {wanted} serves as soon as it has passed the gate: in a moment if a server is learning, else when "
        "one starts. The next update goes on from it.",
        soft_wrap=True,
    )


@model_app.command("fetch")
@friendly
def model_fetch() -> None:
    """Fetch and convert the built-in model, unless it is there."""
    from nextstate.engines.builtin import builtin_model

    print(builtin_model(lambda text: err.print(text, highlight=False)))


@app.command()
def version() -> None:
    """The version of nextstate itself."""
    print(__version__)


def _turn_json(row: Any) -> dict[str, Any]:
    names = [
        *("turn_id", "session", "kind", "placed_because", "parent_turn_id", "state", "reason", "detail"),
        *("prompt_tokens", "reply_tokens", "reply_versions", "finish_reason", "sampling", "answer"),
        *("created_at", "finished_at", "update_id"),
    ]
    return {name: getattr(row, name) for name in names}


def main() -> None:
    """Entry point of the `nextstate` command."""
    # A terminal that cannot show a character must not end a command.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    app()


if __name__ == "__main__":
    main()
