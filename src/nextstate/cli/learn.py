"""`nextstate learn`: what training will take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nextstate import config
from nextstate.cli.common import AsJson, Data, friendly, out
from nextstate.config import Config

learn_app = typer.Typer(no_args_is_help=True, help="The trainer.")


@learn_app.callback()
def learn() -> None:
    """The trainer."""


@learn_app.command("plan")
@friendly
def learn_plan(
    model: Annotated[str | None, typer.Option(help="As of `serve`.")] = None,
    data: Data = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="A TOML file; options here win over it.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a trainer that started now would take, and what there is. Reads the model's config, not its weights."""
    from nextstate.engines.model import outline
    from nextstate.learn.plan import Shape, TrainingRefused, available, gb, make_plan

    options: dict[str, Any] = {k: v for k, v in (("model", model), ("data", data)) if v is not None}
    settings = config.load(config_file, **options)
    base, context, device = outline(settings.model, dtype=settings.engine.dtype, device=settings.engine.device)
    shape = Shape.of(base, settings.learn, context=context)
    plan = make_plan(shape, settings.learn, available(settings.learn, device), device=device.type)
    stress = _last_stress_step(settings)
    if as_json:
        print(json.dumps({**plan.as_json(), "last_stress_step": stress}))
        return
    table = Table("memory", "")
    for name, size in (
        ("base weights, mapped and shared with the server, not counted", plan.base_bytes),
        (f"trained weights ({plan.weights})", plan.trained_bytes),
        ("their gradients", plan.gradient_bytes),
        ("the optimiser's moments", plan.optimizer_bytes),
        ("the moving average", plan.average_bytes),
        (f"the longest pass, {plan.longest} tokens", plan.pass_bytes),
        ("needed, without the base", plan.needed_bytes),
        (f"available ({plan.available_from})", plan.available_bytes),
    ):
        table.add_row(name, gb(size))
    out.print(table)
    say = [f"turns of up to {plan.max_turn_tokens} tokens, micro-batches of {plan.micro_batch_tokens}", *plan.messages]
    if stress is not None and stress["measured_bytes"] is not None:
        say.append(
            f"the last stress step: {stress['tokens']} tokens took {gb(stress['measured_bytes'])}, planned "
            f"{gb(stress['planned_bytes'])}"
        )
    for line in say:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if plan.refusal is not None:
        raise TrainingRefused(plan.refusal)


def _last_stress_step(settings: Config) -> dict[str, Any] | None:
    """Of the data folder's last trainer; None where there was none yet."""
    from nextstate.store.status import last_event
    from nextstate.store.store import Store

    if not (settings.data / "nextstate.db").exists():
        return None
    return Store.open(settings.database_url).read_now(last_event, "stress_step")
