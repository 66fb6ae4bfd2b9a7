"""`make demo`: a simulated user talks to a served model, and the model learns what the user never asks for outright.

    serve      a server process of its own, exactly `nextstate serve`
    talk       simulated users at its HTTP endpoint, through the official client, streaming, with no header of ours
    measure    questions never asked before, put to version 0 and to the newest version
    report     both rates, what the answers are like, what became of every turn

The exit status is 0 only if the newest version meets the wish more often, its answers stayed sensible, and no turn
was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.live import Live
from rich.table import Table

from nextstate import config as configuration
from nextstate.config import Config
from nextstate.errors import NextstateError
from nextstate.people import sanity
from nextstate.people.drive import Answer, TurnLog, ask, talk
from nextstate.people.questions import Question, held_out_questions, training_questions
from nextstate.people.simulated import SimulatedUser
from nextstate.people.wishes import SHORT
from nextstate.report import learning as report_learning
from nextstate.report.account import account
from nextstate.report.learning import Check, LearningReport, SideBySide
from nextstate.report.stats import Rate, improvement_p, quantile
from nextstate.store import learning, status, timing, turns
from nextstate.store.store import Store
from nextstate.types import BASE, ScoreRequest

USERS = 6
"""Simulated users who talk at the same time, each with an own seed."""
CONTENT = 9, 12
"""The conversation ends when so many of the last so many first answers met the wish..."""
MIN_UPDATES, UPDATES = 4, 6
"""...and at least the first number of versions has served; or after the second number..."""
TALK_S = 270.0
"""...or so many seconds. What was learned is measured afterwards, on other questions."""
QUESTIONS = 48
"""Asked of both versions at the end."""
MAX_TOKENS = 160
TEMPERATURE = 0.7
CONFIG = Path(__file__).with_name("demo.toml")

# What "sensible" means: bounds on the newest version's replies, relative to version 0's where that is fair.
MAX_PERPLEXITY_RATIO = 1.5
MIN_DISTINCT_WORDS_RATIO = 0.9
MAX_REPEATED_TRIGRAMS_RISE = 0.05
MIN_DISTINCT_REPLIES = 0.8
MIN_ON_SUBJECT_RATIO = 0.75
MIN_MEAN_WORDS = 4.0
MAX_P_VALUE = 0.05


async def demo(*, seed: int, folder: Path, console: Console) -> LearningReport:
    """Run the whole demo; the data and the report stay in `folder`.

    Raises:
        NextstateError: the server could not start.
    """
    started = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    # A demo that is told to stop takes its server along.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    settings = configuration.load(CONFIG, data=data)
    async with _server(data, folder / "server.log", console) as (client, store):
        log = await _converse(client, store, seed, console)
    talked = time.monotonic()
    # A new server on the same data: what was learned survives a restart, and nothing trains while we measure.
    async with _server(data, folder / "measuring.log", console, "--no-learn") as (client, store):
        newest = await store.read(learning.serving_version)
        questions = random.Random(seed).sample(held_out_questions(), k=QUESTIONS)
        console.print(f"measuring version 0 and version {newest} on {len(questions)} questions never asked before")
        texts = [q.text for q in questions]
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": TEMPERATURE, "seed": seed}
        # One version after the other: the engine packs the streams of one version into one step.
        before = await ask(client, texts, model="policy@0", concurrency=16, **options)
        after = await ask(client, texts, model=f"policy@{newest}", concurrency=16, **options)
    store = Store.open(settings.database_url)
    made = await _report(store, settings, seed, newest, questions, before, after, log)
    made.timings["whole_demo"] = time.monotonic() - started
    made.timings["conversation"] = talked - started
    store.close()
    return made


@asynccontextmanager
async def _server(
    data: Path, log: Path, console: Console, *options: str
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Store]]:
    """`nextstate serve` in a process of its own, a client for it, and its store to look into. It logs to a file."""
    data.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "nextstate.cli.main",
        "serve",
        "--config",
        str(CONFIG),
        "--data",
        str(data),
        *options,
    ]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, "--port", "0", stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            with console.status("starting the server (the first time it fetches and converts the model)"):
                url = await _ready(process, log)
            store = Store.open(configuration.load(CONFIG, data=data).database_url)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
                yield client, store
            store.close()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


async def _ready(process: asyncio.subprocess.Process, log: Path) -> str:
    """The server's address, once it answers."""
    async with httpx.AsyncClient() as http:
        while process.returncode is None:
            lines = log.read_text(errors="replace").splitlines()
            url = next((line.split(" on ")[1].split("/v1")[0] for line in lines if line.startswith("serving ")), None)
            if url is not None:
                try:
                    if (await http.get(f"{url}/readyz")).is_success:
                        return url
                except httpx.TransportError:
                    pass  # the port is bound, and the server is about to listen
            await asyncio.sleep(0.2)
    raise NextstateError(f"the server did not start; it said:\n{log.read_text(errors='replace')[-2000:]}")


async def _converse(client: openai.AsyncOpenAI, store: Store, seed: int, console: Console) -> list[TurnLog]:
    """Let the users talk until the model has learned for a while. Returns every turn as the users saw it."""
    log: list[TurnLog] = []
    stop = asyncio.Event()

    async def one_user(n: int) -> None:
        user = SimulatedUser(training_questions(), seed=1000 * seed + n)
        while not stop.is_set():
            await talk(client, user, model="policy", max_tokens=MAX_TOKENS, temperature=TEMPERATURE, on_turn=log.append)

    users = [asyncio.create_task(one_user(n)) for n in range(USERS)]
    started = time.monotonic()
    with Live(console=console, refresh_per_second=2) as live:
        while not stop.is_set():
            await asyncio.sleep(1)
            for task in users:
                if task.done():
                    task.result()  # a user who failed ends the demo with the reason
            now = await store.read(status.status)
            elapsed = time.monotonic() - started
            live.update(_live_table(now, log, elapsed))
            recent = [turn.met for turn in log if turn.index == 0][-CONTENT[1] :]
            content = sum(recent) >= CONTENT[0] and now.version >= MIN_UPDATES
            if content or now.version >= UPDATES or elapsed > TALK_S:
                stop.set()
    with console.status("the users finish their last sentences"):
        await asyncio.gather(*users)
    return log


def _live_table(now: status.Status, log: Sequence[TurnLog], elapsed: float) -> Table:
    """One row for each version so far: how many first answers it gave, and how many met the wish."""
    waiting, left_out = sum(now.waiting.values()), sum(now.left_out.values())
    table = Table(
        title=f"{elapsed:3.0f} s   {now.turns} turns: {now.trained} trained, {waiting} waiting, {left_out} left out",
        caption="verdicts: " + (", ".join(f"{n} {name}" for name, n in now.verdicts.items()) or "none yet"),
    )
    for column in ("version", "first answers", "met the wish", "share"):
        table.add_column(column)
    by_version: dict[int, list[bool]] = {}
    for turn in log:
        # Later prompts of a session hold the user's words; only first answers show what was learned.
        if turn.index == 0 and turn.answer.policy_version is not None:
            by_version.setdefault(turn.answer.policy_version, []).append(turn.met)
    for version in range(now.version + 1):
        met = by_version.get(version, [])
        share = f"{sum(met) / len(met):.0%}" if met else ""
        table.add_row(str(version), str(len(met)), str(sum(met)), share)
    return table


async def _report(
    store: Store,
    settings: Config,
    seed: int,
    newest: int,
    questions: Sequence[Question],
    before: Sequence[Answer],
    after: Sequence[Answer],
    log: Sequence[TurnLog],
) -> LearningReport:
    wish = SHORT
    met_before, met_after = [wish.met(a.reply) for a in before], [wish.met(a.reply) for a in after]
    p_value = improvement_p(met_before, met_after)
    rates = [Rate(hits=sum(met), total=len(met)) for met in (met_before, met_after)]
    perplexities = await _perplexities(store, settings, before, after)
    now = await store.read(status.status)
    clients = [*(t.answer for t in log), *before, *after]
    gaps = [gap for turn in log for gap in turn.answer.gaps_s]
    firsts = [turn.answer.first_token_s for turn in log if turn.answer.first_token_s is not None]
    return LearningReport(
        model=settings.model,
        wish=wish.description,
        seed=seed,
        newest_version=newest,
        before=rates[0],
        after=rates[1],
        p_value=p_value,
        checks=(
            Check(
                name="answers that met the wish",
                before=rates[0].share,
                after=rates[1].share,
                bound=f"more, p < {MAX_P_VALUE}",
                passed=p_value < MAX_P_VALUE,
            ),
            *_sanity_checks(questions, before, after, perplexities),
            await _nothing_lost(store, now, clients),
        ),
        answers=tuple(
            SideBySide(question=q.text, before=b.reply, before_met=mb, after=a.reply, after_met=ma)
            for q, b, a, mb, ma in zip(questions, before, after, met_before, met_after, strict=True)
        ),
        account=await store.read(account),
        timings={
            "correction_to_first_answer_that_learned_from_it_p50": quantile(
                await store.read(timing.correction_to_behaviour), 0.5
            ),
            "first_token_p50": quantile(firsts, 0.5),
            "first_token_p99": quantile(firsts, 0.99),
            "between_tokens_p50": quantile(gaps, 0.5),
            "between_tokens_p99": quantile(gaps, 0.99),
        },
    )


def _sanity_checks(
    questions: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer], perplexities: tuple[float, float]
) -> list[Check]:
    old = sanity.measure(questions, [a.reply for a in before])
    new = sanity.measure(questions, [a.reply for a in after])

    def at_least(name: str, b: float | None, a: float | None, bound: float) -> Check:
        passed = a is not None and a >= bound
        return Check(name=name, before=b, after=a, bound=f"at least {bound:.3g}", passed=passed)

    def at_most(name: str, b: float | None, a: float | None, bound: float) -> Check:
        passed = a is not None and a <= bound
        return Check(name=name, before=b, after=a, bound=f"at most {bound:.3g}", passed=passed)

    return [
        at_most("perplexity under the base", *perplexities, MAX_PERPLEXITY_RATIO * perplexities[0]),
        at_least(
            "distinct words in ten",
            old.distinct_word_share,
            new.distinct_word_share,
            MIN_DISTINCT_WORDS_RATIO * (old.distinct_word_share or 1.0),
        ),
        at_most(
            "repeated runs of three words",
            old.repeated_trigram_share,
            new.repeated_trigram_share,
            (old.repeated_trigram_share or 0.0) + MAX_REPEATED_TRIGRAMS_RISE,
        ),
        at_least("distinct replies", old.distinct_reply_share, new.distinct_reply_share, MIN_DISTINCT_REPLIES),
        at_least(
            "replies that name their subject",
            old.on_subject_share,
            new.on_subject_share,
            MIN_ON_SUBJECT_RATIO * (old.on_subject_share or 1.0),
        ),
        at_least("words a reply", old.mean_words, new.mean_words, MIN_MEAN_WORDS),
    ]


async def _nothing_lost(store: Store, now: status.Status, answers: Sequence[Answer]) -> Check:
    """Every answer that a client saw is in the store, and every turn there is trained, waiting or explained."""
    stored = {row.turn_id: row for row in await store.read(status.list_turns, limit=10**9)}
    missing = sum(
        a.turn_id is None or int(a.turn_id) not in stored or stored[int(a.turn_id)].answer != a.reply for a in answers
    )
    faults = sum(now.left_out.get(reason, 0) for reason in ("quarantined", "engine_fault", "update_failed"))
    lost = missing + faults + (0 if now.accounted_for else 1)
    return Check(name="turns lost", before=None, after=float(lost), bound="0", passed=lost == 0)


async def _perplexities(
    store: Store, settings: Config, before: Sequence[Answer], after: Sequence[Answer]
) -> tuple[float, float]:
    """exp of the mean negative log-prob a token of both sets of replies, under the base model at temperature 1."""
    from nextstate.engines.local import LocalEngine
    from nextstate.engines.model import load

    engine = LocalEngine(load(settings.model, dtype=settings.engine.dtype, device=settings.engine.device))
    engine.start()
    try:
        found = []
        for answers in (before, after):
            requests = []
            for answer in answers:
                turn = await store.read(turns.load_turn, int(answer.turn_id or 0))
                requests.append(ScoreRequest(ids=turn.prompt_ids + turn.reply_ids, start=len(turn.prompt_ids)))
            logprobs = [lp for scores in await engine.score(requests, BASE) for lp in scores.logprobs]
            found.append(math.exp(-sum(logprobs) / len(logprobs)))
    finally:
        engine.stop()
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nextstate.recipes.demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the simulated users and of the measurement")
    parser.add_argument("--folder", type=Path, default=Path("demo-report"), help="for the data and the report")
    options = parser.parse_args()
    console = Console()
    try:
        report = asyncio.run(demo(seed=options.seed, folder=options.folder, console=console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped")
        sys.exit(130)
    except (NextstateError, openai.OpenAIError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
    report_learning.show(report, console)
    html, data = report_learning.write(report, options.folder)
    console.print(f"The same in {html} and {data}; the server's data in {options.folder / 'data'}.", highlight=False)
    console.print("It learned." if report.passed else "Not shown to have learned.", style="bold")
    sys.exit(0 if report.passed else 1)


if __name__ == "__main__":
    main()
