"""`nextstate export`: the recorded turns and the trained adapters, for other tools."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextstate import config
from nextstate.cli.common import AsJson, Data, err, friendly, open_store
from nextstate.errors import ConfigError

if TYPE_CHECKING:
    from nextstate.export.rows import NotExported, Row

export_app = typer.Typer(no_args_is_help=True, help="Take turns and adapters with you.")


class Format(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


Out = Annotated[Path | None, typer.Option(help="The file to write; else standard output.")]
As = Annotated[Format, typer.Option("--format", help="Parquet needs --out.")]


@export_app.command("turns")
@friendly
def export_turns(data: Data = None, out: Out = None, form: As = Format.JSONL, as_json: AsJson = False) -> None:
    """Every judged turn: prompt, completion, and whether it was good (TRL: KTO)."""
    _export("turns", data, out, form, as_json)


@export_app.command("preferences")
@friendly
def export_preferences(data: Data = None, out: Out = None, form: As = Format.JSONL, as_json: AsJson = False) -> None:
    """Bad answers beside the good ones that took their place: prompt, chosen, rejected (TRL: DPO)."""
    _export("preferences", data, out, form, as_json)


@export_app.command("distillation")
@friendly
def export_distillation(data: Data = None, out: Out = None, form: As = Format.JSONL, as_json: AsJson = False) -> None:
    """Turns with a hint: prompt, and the hint that a teacher reads beside it (TRL: SDFT)."""
    _export("distillation", data, out, form, as_json)


@export_app.command("adapter")
@friendly
def export_adapter(
    version: Annotated[int, typer.Argument(help="Which version.")],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="The whole model, with the adapter in its weights.")] = False,
    model: Annotated[str | None, typer.Option(help="The base model, if it is not the built-in one.")] = None,
    data: Data = None,
) -> None:
    """A version as PEFT and transformers load it."""
    from nextstate.engines import builtin
    from nextstate.engines.model import resolve
    from nextstate.export import adapter
    from nextstate.store.forgetting import marked_versions
    from nextstate.store.store import bound_model

    settings = config.load(None, **{k: v for k, v in (("model", model), ("data", data)) if v is not None})
    store = open_store(data)
    artifact = settings.data / store.read_now(adapter.artifact_of, version)
    marked = version in store.read_now(marked_versions)
    bound = store.read_now(bound_model)
    if bound["model"] not in (settings.model, Path(settings.model).name):
        raise ConfigError(
            f"the data folder belongs to model '{bound['model']}', not to '{settings.model}'. Nothing was written. Say "
            "which that is, as `serve` was told: --model NAME."
        )
    if merge:
        adapter.merge(artifact, folder, model=settings.model, fingerprint=bound["fingerprint"])
    else:
        # A name on the hub means the same everywhere; a folder does not, but is all there is.
        here = settings.model == builtin.NAME or Path(settings.model).is_dir()
        adapter.copy_adapter(artifact, folder, base=str(resolve(settings.model)) if here else settings.model)
    if marked:
        err.print(f"Version {version} goes back to turns that were forgotten since.", highlight=False)
    what = "the model with version" if merge else "the adapter of version"
    err.print(f"{folder} holds {what} {version}.", highlight=False, markup=False, soft_wrap=True)


def _export(kind_name: str, data: Path | None, out: Path | None, form: Format, as_json: bool) -> None:
    from nextstate.export.files import write_jsonl, write_parquet
    from nextstate.export.rows import Kind, rows

    if out is None and form is Format.PARQUET:
        raise ConfigError("a Parquet file cannot go to standard output. Nothing was written. Name a file: --out FILE.")
    if out is None and as_json:
        raise ConfigError("standard output cannot hold both the rows and --json. Nothing was written. Add --out FILE.")
    store, kind = open_store(data), Kind(kind_name)
    left_out: Counter[NotExported] = Counter()

    def made() -> Iterator[Row]:
        left_out.clear()  # Parquet is written in two passes
        return rows(store, kind, left_out)

    if out is None:
        count = write_jsonl(made(), sys.stdout)
    else:
        # The whole file or none, so that a name never stands for half of it.
        part = out.with_name(f"{out.name}.part")
        try:
            if form is Format.PARQUET:
                count = write_parquet(made, kind, part)
            else:
                with part.open("w") as stream:
                    count = write_jsonl(made(), stream)
            part.rename(out)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error.strerror}. Choose another file: --out FILE.") from error
        finally:
            part.unlink(missing_ok=True)
    if as_json:
        print(json.dumps({"rows": count, "left_out": left_out}))
        return
    why = ", ".join(f"{n} {reason}" for reason, n in left_out.most_common())
    err.print(f"{count} rows; left out: {why or 'none'}.", highlight=False, markup=False, soft_wrap=True)
