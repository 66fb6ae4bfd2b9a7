"""`nextstate pause learning`, `nextstate resume learning`: serve and record as ever, and train nothing meanwhile."""

from __future__ import annotations

import time

import typer

from nextstate.cli.common import Data, friendly, open_store, out

pause_app = typer.Typer(no_args_is_help=True, help="Stop something for a while.")
resume_app = typer.Typer(no_args_is_help=True, help="Let go on what was paused.")


@pause_app.callback()
def pause() -> None:
    """Stop something for a while."""


@resume_app.callback()
def resume() -> None:
    """Let go on what was paused."""


@pause_app.command("learning")
@friendly
def pause_learning(data: Data = None) -> None:
    """Train and publish nothing until it is resumed. Answers are given, recorded and judged as ever."""
    from nextstate.store import steering

    new = open_store(data).write_now(steering.pause_learning)
    said = "Learning is paused" if new else "Learning was paused already"
    out.print(
        f"{said}: nothing is trained or published, also after a restart. Answers are given, recorded and judged as "
        "ever. An update that runs now comes to nothing, and its turns wait with the others. "
        "`nextstate resume learning` goes on.",
        soft_wrap=True,
        highlight=False,
    )


@resume_app.command("learning")
@friendly
def resume_learning(data: Data = None) -> None:
    """Train and publish again, what has waited first."""
    from nextstate.store import learning, steering

    store = open_store(data)
    if not store.write_now(steering.resume_learning):
        out.print("Learning was not paused; nothing has changed.")
        return
    waiting, _ = store.read_now(learning.waiting_samples)
    out.print(f"Learning goes on; {waiting} judged turns wait for it.", highlight=False)


def paused_line(since: float) -> str:
    """What `status` says."""
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(since))
    return f"learning is paused since {at}: nothing is trained or published; `nextstate resume learning` goes on"
