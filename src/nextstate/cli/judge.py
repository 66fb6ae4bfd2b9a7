"""`nextstate judge`: how good the configured judge is on labelled turns, and a head for a model that has none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from nextstate import config
from nextstate.cli.common import AsJson, err, friendly, out

if TYPE_CHECKING:
    from nextstate.judge.labelled import LabelledTurn
    from nextstate.judge.measure import Measured

judge_app = typer.Typer(no_args_is_help=True, help="What judges, how well, and fitting it to a model.")

BAR_AFTER_S = 2.0

Model = Annotated[str | None, typer.Option(help="Hub name or folder of the model that judges, as for `serve`.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file; options here win over it.")]


@judge_app.command("eval")
@friendly
def judge_eval(
    file: Annotated[Path, typer.Argument(help="Labelled turns, one JSON object a line; see docs/judge.md.")],
    model: Model = None,
    base_url: Annotated[
        str | None, typer.Option(help="Ask this OpenAI-compatible endpoint instead, up to its version.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.")] = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Run the configured judge over labelled turns, and say how often it is right."""
    from nextstate.judge.labelled import read_labelled
    from nextstate.judge.measure import measure

    rows = read_labelled(file)
    settings = _settings(config_file, model, base_url, judge_model)
    name, verdicts, seconds, tokens = asyncio.run(_judge(settings, rows))
    found = measure(rows, verdicts, seconds)
    if as_json:
        print(json.dumps({"judge": name, "file": str(file), "tokens_per_vote": tokens, **asdict(found)}))
        return
    _show(name, file, found, tokens)


@judge_app.command("fit")
@friendly
def judge_fit(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Labelled turns beside the package's own cases; see docs/judge.md.")
    ] = None,
    model: Model = None,
    config_file: ConfigFile = None,
) -> None:
    """Fit the judge to a model, on labelled turns; kept in the cache folder, and used from the next start on."""
    from nextstate.judge.labelled import read_labelled

    sources = [read_labelled(path, first_id=(at + 1) * 1_000_000) for at, path in enumerate(files or [])]
    settings = _settings(config_file, model, None, None)
    path, rows = asyncio.run(_fit(settings, sources))
    out.print(f"Fitted on {rows} rows: {path}. A server that starts now judges with it.", soft_wrap=True)


def _settings(
    config_file: Path | None, model: str | None, base_url: str | None, judge_model: str | None
) -> config.Config:
    options: dict[str, Any] = {} if model is None else {"model": model}
    judge = {name: value for name, value in (("base_url", base_url), ("model", judge_model)) if value is not None}
    return config.load(config_file, **options, **({"judge": judge} if judge else {}))


async def _judge(settings: config.Config, rows: list[LabelledTurn]) -> tuple[str, list[Any], list[float], float | None]:
    """The judge's name, its verdicts, the seconds of each, and the tokens of a vote of the local engine."""
    from nextstate.judge.evaluating import judged
    from nextstate.judge.sampled import SampledJudge
    from nextstate.recipes import personal

    def local() -> tuple[Any, Any]:
        loaded = _load(settings)
        engine = personal.make_engine(loaded, settings)
        engine.start()
        return loaded, engine

    loaded, engine = (None, None) if settings.judge.base_url is not None else local()
    judge = personal.make_judge(engine, loaded, settings)
    try:
        with _bar("judging", len(rows)) as advance:
            verdicts, seconds = await judged(judge, rows, advance)
    finally:
        if engine is not None:
            engine.stop()
        if isinstance(judge.inner, SampledJudge):
            await judge.inner.aclose()
    asked = getattr(judge.inner, "asked", None)
    return judge.name, verdicts, seconds, asked.tokens / asked.votes if asked is not None and asked.votes else None


async def _fit(settings: config.Config, sources: list[list[LabelledTurn]]) -> tuple[Path, int]:
    from nextstate.judge import fitting
    from nextstate.judge.head import fit, save
    from nextstate.judge.scored import ScoredJudge, layers_of
    from nextstate.recipes import personal

    loaded = _load(settings)
    engine = personal.make_engine(loaded, settings)
    engine.start()
    try:
        judge = ScoredJudge(engine, loaded.tokenizer, model=loaded.name)
        layers = layers_of(int(loaded.model.config.num_hidden_layers))
        to_vote_on = [rows for rows in map(fitting.to_vote_on, [fitting.own_cases(), *sources]) if rows]
        with _bar("reading", sum(map(len, to_vote_on))) as advance:
            folds = [await fitting.seen(judge, rows, layers, advance) for rows in to_vote_on]
        head = fit(folds, await fitting.blank_head(judge, loaded.name, layers))
    finally:
        engine.stop()
    path = personal.heads_dir() / f"{loaded.name}.safetensors"
    save(head, path)
    return path, head.rows


def _load(settings: config.Config) -> Any:
    from nextstate.engines.model import load, resolve

    resolve(settings.model, lambda text: err.print(text, highlight=False))
    return load(settings.model, dtype=settings.engine.dtype, device=settings.engine.device)


@contextmanager
def _bar(what: str, rows: int) -> Iterator[Callable[[int], None]]:
    """A progress bar, on the error stream, that appears once it has taken longer than two seconds."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    progress, began = Progress(*columns, console=err, transient=True), time.monotonic()
    task = progress.add_task(what, total=rows)
    shown = False

    def advance(n: int) -> None:
        nonlocal shown
        progress.advance(task, n)
        if not shown and time.monotonic() - began > BAR_AFTER_S:
            progress.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            progress.stop()


def _show(name: str, file: Path, found: Measured, tokens: float | None) -> None:
    from nextstate.judge.measure import BINS

    title = f"{name}, after hard evidence, on {found.rows} rows of {file}"
    out.print(title, highlight=False, markup=False, soft_wrap=True)
    figures = Table("", "all rows, abstention as neutral", f"the {found.voted} rows it voted on")
    figures.add_row("accuracy", f"{found.accuracy:.3f}", f"{found.voted_accuracy:.3f}")
    figures.add_row("macro-F1", f"{found.macro_f1:.3f}", f"{found.voted_macro_f1:.3f}")
    out.print(figures)
    words = ("good", "neutral", "bad", "abstained")
    confusion = Table("label", *(f"judged {word}" for word in words), "F1")
    for label, cells in found.confusion.items():
        confusion.add_row(label, *(str(cells[word]) for word in words), f"{found.f1[label]:.3f}")
    out.print(confusion)
    lines = [
        f"abstained on {found.abstained:.1%} of rows; hard evidence decided {found.by_evidence}",
        f"wrong sign on {found.wrong_sign:.1%} of good and bad rows",
    ]
    if found.signed_precision is not None:
        lines.append(f"{found.signed_precision:.1%} of good and bad verdicts are right")
    if found.calibration is not None:
        error, of = found.calibration.error, found.calibration.rows
        lines.append(f"calibration error {error:.3f}, in {BINS} bins, on {of} rows that came to a vote")
    if found.hints is not None:
        lines.append(
            f"hints on bad rows called bad: {found.hints['precision']:.1%} of rows with hints hold a directive, "
            f"{found.hints['recall']:.1%} of rows with a directive got hints"
        )
    if found.seconds_per_vote is not None:
        read = "" if tokens is None else f", {tokens:.0f} tokens of the turn read"
        lines.append(f"{found.seconds_per_vote:.3f} s a vote{read}")
    if found.wrong_by_kind:
        kinds = (f"{kind} {wrong} of {rows}" for kind, (wrong, rows) in found.wrong_by_kind.items())
        lines.append(f"wrong, by kind: {', '.join(kinds)}")
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
