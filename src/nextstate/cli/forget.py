"""`nextstate forget`: take conversations back, and what was learned from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextstate.cli.common import AsJson, Data, friendly, open_store, out
from nextstate.errors import ConfigError

if TYPE_CHECKING:
    from nextstate.store.forgetting import Forgetting
    from nextstate.store.store import Store


@friendly
def forget(
    session: Annotated[str | None, typer.Option(help="All turns of this session.")] = None,
    user: Annotated[
        str | None, typer.Option(help="All turns of this user; beside --session, whose session it is.")
    ] = None,
    turn: Annotated[int | None, typer.Option(help="This turn, and what was said with it in view.")] = None,
    retrain: Annotated[
        bool,
        typer.Option(
            "--retrain", help="Go back to before any update with forgotten turns, and train the others again."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Remove the texts and tokens of turns, for good, and say which versions were trained on them."""
    if turn is not None and (session is not None or user is not None):
        raise ConfigError(
            "--turn names one turn, whoever's it is. Nothing was forgotten. Leave --session and --user out."
        )
    if not retrain and turn is None and session is None and user is None:
        raise ConfigError("nothing was named, so nothing was forgotten. Say --session KEY, --user NAME or --turn ID.")
    if as_json and not yes:
        raise ConfigError("--json asks nobody, so it needs --yes. Nothing was forgotten.")
    store = open_store(data)
    said: dict[str, Any] = {}
    if turn is not None or session is not None or user is not None:
        chosen = _choose(store, session, user, turn)
        if not yes:
            _confirm(store, chosen)
        said |= _forget(store, chosen, as_json)
    if retrain:
        said |= _retrain(store, as_json)
    if as_json:
        print(json.dumps(said))


def _choose(store: Store, session: str | None, user: str | None, turn: int | None) -> list[int]:
    from nextstate.store import forgetting

    try:
        if turn is not None:
            return store.read_now(forgetting.choose_turn, turn)
        if session is not None:
            return store.read_now(forgetting.choose_session, session, user)
        return store.read_now(forgetting.choose_user, user or "")
    except LookupError as error:
        raise ConfigError(
            f"{error.args[0]}. Nothing was forgotten; `nextstate turns list` shows what there is."
        ) from error


def _confirm(store: Store, chosen: Sequence[int]) -> None:
    from nextstate.store import forgetting

    found = store.read_now(forgetting.preview, chosen)
    out.print(
        f"{_count(found.turns)} will be forgotten, for good; of these, {found.trained} were trained.", highlight=False
    )
    _say_about_versions(found)
    if not typer.confirm("Go on?"):
        out.print("Nothing was forgotten.")
        raise typer.Exit(1)


def _forget(store: Store, chosen: Sequence[int], as_json: bool) -> dict[str, Any]:
    from nextstate.store import forgetting

    found = store.write_now(forgetting.forget, chosen)
    scrubbed = store.scrub()
    if not as_json:
        out.print(f"{_count(found.turns)} forgotten; their texts and tokens are removed.", highlight=False)
        if found.without_evidence:
            out.print(
                f"{_count(found.without_evidence)} before them lost what followed, and what it taught.", highlight=False
            )
        if found.stopped_updates:
            out.print("An update was training on some of them; nothing comes of it.")
        _say_about_versions(found)
        if not scrubbed:
            out.print(
                "Somebody is reading the store, so its write-ahead log still has the texts. Forget anything again, or "
                "stop the server, and they go.",
                soft_wrap=True,
            )
    return {**asdict(found), "scrubbed": scrubbed}


def _say_about_versions(found: Forgetting) -> None:
    if found.versions:
        numbers = ", ".join(map(str, found.versions))
        out.print(
            f"Versions that go back to them: {numbers}. `nextstate forget --retrain` goes back to before those.",
            soft_wrap=True,
            highlight=False,
        )


def _retrain(store: Store, as_json: bool) -> dict[str, Any]:
    from nextstate.store import forgetting

    try:
        found = store.write_now(forgetting.start_over)
    except LookupError as error:
        raise ConfigError(
            f"{error}, so nothing is trained again yet. What was forgotten stays forgotten. When the gate has decided, "
            "or a server has been started that lets it: nextstate forget --retrain."
        ) from error
    if found is None:
        if not as_json:
            out.print("The version that serves goes back to nothing that was forgotten, or is being replaced already.")
        return {"retraining": None}
    if not as_json:
        retired = ", ".join(map(str, found.retired))
        out.print(
            f"Version {found.version} serves as soon as it has passed the gate: in a moment if a server is learning, "
            f"else when one starts. Of the turns that made version {retired}, {found.turns} wait to be trained again.",
            soft_wrap=True,
            highlight=False,
        )
    return {"retraining": asdict(found)}


def _count(turns: int) -> str:
    return "1 turn" if turns == 1 else f"{turns} turns"
