"""`nextstate config`: what can be set, as a page; docs/configuration.md is what it prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel, SecretStr

from nextstate.config import Config

config_app = typer.Typer(no_args_is_help=True, help="What can be set.")

_HEAD = """# Configuration

All settings, with their defaults. They are read once, at the start, from weakest to strongest: these defaults, a TOML
file (`nextstate serve --config FILE.toml`), environment variables (`NEXTSTATE_LEARN__RANK=8`; two underscores between
section and setting), options of the command. An unknown name or a value out of range stops the start with a sentence
about it; `nextstate serve --check-config` only looks, and says what would be in force.

This page is printed by `nextstate config reference`, from the types that check the settings.
"""


@config_app.callback()
def settings() -> None:
    """What can be set."""


@config_app.command()
def reference() -> None:
    """All settings with their types, defaults and meanings, as Markdown."""
    print(reference_page(), end="")


def reference_page() -> str:
    sections = [("", Config), *((name, kind) for name, kind in _fields(Config) if _is_section(kind))]
    return _HEAD + "".join(_table(name, section) for name, section in sections)


def in_force(config: Config) -> dict[str, Any]:
    """The settings that are not as they ship, by their whole names; of secrets only that they are set."""
    shipped, found = Config.model_construct(), {}
    for section, kind in [("", Config), *_fields(Config)]:
        if not _is_section(kind):
            continue
        ours, theirs = (config, shipped) if not section else (getattr(config, section), getattr(shipped, section))
        for name, of in _fields(kind):
            value = getattr(ours, name)
            if not _is_section(of) and value != getattr(theirs, name):
                found[f"{section}.{name}".lstrip(".")] = str(value) if isinstance(value, Path | SecretStr) else value
    return found


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    return ((name, field.annotation) for name, field in model.model_fields.items())


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _table(section: str, model: type[BaseModel]) -> str:
    lines = [f"\n## {f'`[{section}]`' if section else 'At the top'}\n", "| setting | default | values | meaning |"]
    lines.append("| --- | --- | --- | --- |")
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            continue
        values = _values(field.annotation, field.metadata)
        meaning = " ".join((field.description or "").split())
        lines.append(f"| `{name}` | {_shown(field.default)} | {values} | {meaning} |")
    return "\n".join(lines) + "\n"


def _values(annotation: Any, constraints: Iterable[Any] = ()) -> str:
    """What a setting may be, e.g. 'number > 0'."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _values(annotation.__origin__, annotation.__metadata__)
    if parts := [part for part in get_args(annotation) if part is not type(None)]:
        return _values(parts[0])
    kind = {int: "whole number", float: "number", bool: "true or false"}.get(annotation, "text")
    return " ".join(filter(None, [kind, ", ".join(filter(None, map(_limit, constraints)))]))


def _limit(constraint: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return ", ".join(f"{sign} {getattr(constraint, name)}" for name, sign in signs.items() if hasattr(constraint, name))


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"
