"""`nextstate eval`: experiments that say how well the method works here."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from nextstate.cli.common import AsJson, err, friendly, out
from nextstate.errors import ConfigError

if TYPE_CHECKING:
    from nextstate.people.experiment import Run

eval_app = typer.Typer(no_args_is_help=True, help="Experiments.")


@eval_app.callback()
def _a_group_of_one_command_is_still_a_group() -> None: ...


@eval_app.command("people")
@friendly
def people(
    persona: Annotated[str, typer.Option(help="student, assistant-teacher, teacher, or all.")] = "all",
    method: Annotated[str, typer.Option(help="none, memory, binary, distillation, hybrid, or all.")] = "all",
    seeds: Annotated[int, typer.Option(help="Runs of each persona and method.", min=1)] = 3,
    first_seed: Annotated[int, typer.Option(help="Seed of the first run; the others count up.")] = 0,
    joint: Annotated[bool, typer.Option("--joint", help="One model serves all three at once.")] = False,
    sessions: Annotated[int, typer.Option(help="Of each persona.", min=3)] = 24,
    model: Annotated[str | None, typer.Option(help="A hub name, a folder, or the built-in model.")] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="A TOML file, not the built-in one.")] = None,
    into: Annotated[
        Path, typer.Option("--out", help="Folder of the records; a run that has one is not made again.")
    ] = Path("people-results"),
    play_url: Annotated[
        str | None, typer.Option("--people-url", help="An OpenAI-compatible endpoint that plays the personas.")
    ] = None,
    play_model: Annotated[str, typer.Option("--people-model", help="Its model.")] = "people",
    as_json: AsJson = False,
) -> None:
    """How many sessions until the model does what a persona wants, and how often it does: by method.

    Several of these commands may run at once on one folder: each run is made by one of them.
    """
    from nextstate.people import results
    from nextstate.people.experiment import METHODS, Run
    from nextstate.people.personas import PERSONAS

    if persona != "all" and persona not in PERSONAS:
        raise ConfigError(f"there is no persona '{persona}'. There are: {', '.join(PERSONAS)}, all.")
    if method != "all" and method not in METHODS:
        raise ConfigError(f"there is no method '{method}'. There are: {', '.join(METHODS)}, all.")
    if joint and persona != "all":
        raise ConfigError("--joint is for all personas at once; leave --persona out.")
    chosen = list(PERSONAS.values()) if persona == "all" else [PERSONAS[persona]]
    groups = [tuple(chosen)] if joint else [(one,) for one in chosen]
    plans = [
        Run(personas=group, method=one, seed=seed, sessions=sessions)
        for seed in range(first_seed, first_seed + seeds)
        for group in groups
        for one in METHODS
        if method in ("all", one)
    ]
    for plan in plans:
        with results.claimed(into, plan.name) as write:
            if write is None:
                continue
            err.print(f"{plan.name} begins", highlight=False)
            # A process of its own gives its memory back for the next; two engines and a trainer do not in one.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                run_once = process.submit(_run, plan, config_file, model, play_url, play_model)
                write(run_once.result())
    _show(into, plans, as_json=as_json)


def _run(
    plan: Run, config_file: Path | None, model: str | None, play_url: str | None, play_model: str
) -> dict[str, Any]:
    """One run's record."""
    import torch

    from nextstate.people import results
    from nextstate.people.experiment import LEARNING, run

    torch.set_num_threads(1)
    make_person = None if play_url is None else _played_by(play_url, play_model)
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="nextstate-eval-") as folder:
        outcome = asyncio.run(
            run(plan, Path(folder), config_file=config_file or LEARNING, model=model, make_person=make_person)
        )
    return results.as_json(plan, outcome, cpu_s=time.process_time() - started)


def _played_by(url: str, model: str) -> Any:
    import os

    import openai

    from nextstate.people.reacting import EndpointPerson

    key = os.environ.get("OPENAI_API_KEY", "none")
    return lambda persona, task, seed: EndpointPerson(
        persona, task, client=openai.AsyncOpenAI(base_url=url, api_key=key), model=model, seed=seed
    )


def _show(folder: Path, plans: list[Run], *, as_json: bool) -> None:
    from nextstate.people import results
    from nextstate.report.stats import mean_interval

    files = [folder / f"{plan.name}.json" for plan in plans]
    records = [json.loads(file.read_text()) for file in files if file.exists()]
    cells = []
    for group in dict.fromkeys(tuple(persona.name for persona in plan.personas) for plan in plans):
        for method in dict.fromkeys(plan.method for plan in plans):
            own = [r for r in records if r["method"] == method and r["personas"] == list(group)]
            cells += [(name, method, found) for name in group if (found := results.cell(own, name)) is not None]
    if as_json:
        print(json.dumps([{"persona": name, "method": method, **asdict(found)} for name, method, found in cells]))
        return
    table = Table("persona", "method", "runs", "sessions until it sticks", "never", "first round", "last third")
    for name, method, found in cells:
        mean, low, high = mean_interval(found.sessions_until)
        shares = [f"{sum(values) / len(values):.0%}" for values in (found.first_round, found.at_the_end)]
        interval = f"{mean:.1f}" if len(found.until) == 1 else f"{mean:.1f} ({low:.1f} to {high:.1f})"
        table.add_row(name, method, str(len(found.until)), interval, str(found.censored), *shares)
    out.print(table)
    if len(records) < len(files):
        out.print(f"{len(files) - len(records)} runs are still being made by another process.")
