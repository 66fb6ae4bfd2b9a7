"""What a streaming client notices of learning: `python -m benchmarks.latency`.

A `nextstate serve` process learns as it does in production: default settings (but for one that keeps single turns from
starting an update), the local judge, the trainer in its own process. One client after another streams an answer of up
to 64 tokens through the official client. Meanwhile, in turn:

    idle        nothing but the stream
    judge       the local judge votes on a turn, with the base weights, in the engine that serves the stream
    update      the trainer trains 8 turns (prompts and replies are real ones from this run, half of them with a hint)
    publish     a candidate is loaded, examined by the gate and begins to serve, up to half a second after that

Which of these was so is read from the store afterwards, by time: a wait belongs to the last line above that it touches.
Measured are the time to the first text, from sending the request, and the gaps between pieces of text, nearly always
one token each. The rounds are short, so that other work on the machine meets all conditions alike.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
from sqlalchemy import Connection, func, select

from benchmarks import machine
from benchmarks.server import serving
from nextstate.collect.spine import answer_spine, request_spine
from nextstate.config import Config
from nextstate.engines.builtin import NAME
from nextstate.people.questions import training_questions
from nextstate.report.stats import quantile
from nextstate.store import judging, learning, turns
from nextstate.store.schema import events, next_states, policy_versions, updates, verdicts
from nextstate.store.schema import turns as turns_table
from nextstate.store.store import Store
from nextstate.store.turns import NewTurn, Placement
from nextstate.types import FinishReason, Hint, Message, Sampling, Source, Turn, Verdict, Vote

CONDITIONS = ("idle", "judge", "update", "publish")
"""Weakest claim first: a wait that touches several belongs to the last of them."""
MAX_TOKENS = 64
BATCH_TURNS = 8
IDLE_STREAMS = 2
"""A round begins with so many."""
JUDGE_AFTER_S = 1.0
"""Into a stream, so that the votes meet it while its tokens come."""
AFTER_PUBLISH_S = 0.5
REMARK = "Hm. And what else would you say about that?"
"""Follows an answer; no fact decides whether it is a complaint, so the judge model has to vote."""
HINT = "Answer in one short sentence, please."

Window = tuple[float, float]
"""Beginning and end, seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An answer as the client saw it."""

    sent_at: float
    arrivals: tuple[float, ...]
    """One a piece of text, seconds since the epoch."""
    fingerprints: tuple[str, ...]
    """Of the version behind each piece."""

    @property
    def first(self) -> Window | None:
        return (self.sent_at, self.arrivals[0]) if self.arrivals else None

    @property
    def gaps(self) -> list[Window]:
        return list(pairwise(self.arrivals))

    @property
    def switches(self) -> list[Window]:
        """The gaps between the last piece of one version and the first of the next."""
        marked = zip(self.arrivals, self.fingerprints, strict=True)
        return [(a, b) for (a, old), (b, new) in pairwise(marked) if old != new]


def condition(wait: Window, windows: Mapping[str, Sequence[Window]]) -> str:
    """What went on during a wait: the last of CONDITIONS whose windows it touches, idle if it touches none."""
    start, end = wait
    met = [name for name in CONDITIONS if any(a < end and start < b for a, b in windows.get(name, ()))]
    return met[-1] if met else "idle"


def summary(streams: Sequence[Stream], windows: Mapping[str, Sequence[Window]]) -> dict[str, dict[str, Any]]:
    """Condition -> count, p50, p99 and most of first waits and of gaps, ms; absent is None."""
    firsts: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    gaps: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    for stream in streams:
        if stream.first is not None:
            firsts[condition(stream.first, windows)].append(_ms(stream.first))
        for gap in stream.gaps:
            gaps[condition(gap, windows)].append(_ms(gap))
    return {name: {"first_ms": _spread(firsts[name]), "gap_ms": _spread(gaps[name])} for name in CONDITIONS}


def _ms(window: Window) -> float:
    return 1000 * (window[1] - window[0])


def _spread(values: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "count": len(values),
        "p50": quantile(values, 0.5),
        "p99": quantile(values, 0.99),
        "max": max(values, default=None),
    }


async def measure(model: str, rounds: int, limit_s: float) -> dict[str, Any]:
    load_at_start = machine.load_average()
    # Else the turn that the judge gave a verdict on would start an update of its own, a minute later.
    settings = {"NEXTSTATE_LEARN__MAX_WAIT_S": "3600"}
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(Path(scratch), "--model", model, settings=settings) as served,
    ):
        store = Store.open(Config(data=served.data).database_url)
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=600)
        await _until(store, _trainer_started, 120)
        numbers = count()
        while len(await store.read(_newest_answers)) < BATCH_TURNS:
            await _stream(client, next(numbers), max_tokens=24)
        streams: list[Stream] = []
        # A round that does not count: until a version serves, streams run without an adapter, and faster.
        await _round(store, client, served.url, [], numbers)
        ends = time.monotonic() + limit_s
        try:
            for _ in range(rounds):
                if time.monotonic() > ends:
                    break
                await _round(store, client, served.url, streams, numbers)
        finally:
            await client.close()
        windows = store.read_now(_windows)
        trained = store.read_now(lambda db: [row.metrics for row in db.execute(select(updates)) if row.metrics])
        memory = {"server": {"peak": machine.peak_mb(served.pid), "pss": machine.pss_mb(served.pid)}}
        trainer = store.read_now(_trainer_pid)
        memory["trainer"] = {"peak": machine.peak_mb(trainer), "pss": machine.pss_mb(trainer)}
        store.close()
    return {
        "machine": machine.facts(),
        "model": model,
        "load_average": [load_at_start, machine.load_average()],
        "streams": len(streams),
        "waits": summary(streams, windows),
        "switch_gaps_ms": [_ms(gap) for stream in streams for gap in stream.switches],
        "updates_s": [b - a for a, b in windows["update"]],
        "update_tokens_computed": [metrics["tokens_computed"] for metrics in trained],
        "publish_s": [b - a - AFTER_PUBLISH_S for a, b in windows["publish"]],
        "judge_s": [b - a for a, b in windows["judge"]],
        "memory_mb": memory,
    }


async def _round(
    store: Store, client: openai.AsyncOpenAI, url: str, streams: list[Stream], numbers: count[int]
) -> None:
    """Idle, then a turn to judge, then turns to train until their version serves and half a second longer."""
    for _ in range(IDLE_STREAMS):
        streams.append(await _stream(client, next(numbers)))
    answered = await store.read(_newest_answers)
    stream = asyncio.create_task(_stream(client, next(numbers)))
    await asyncio.sleep(JUDGE_AFTER_S)
    turn_id = await store.write(_turn_to_judge, answered[0])
    async with httpx.AsyncClient() as http:
        # Feedback that comes to nothing, as that other turn was cut off; it wakes the judge all the same.
        await http.post(f"{url}/v1/feedback", json={"turn_id": answered[0].turn.turn_id, "value": "good"})
    streams.append(await stream)
    await _until(store, lambda db: bool(judging.list_verdicts(db, turn_id)), 60)
    await store.write(_turns_to_train, answered)
    before = await store.read(learning.serving_version)
    while True:
        streams.append(await _stream(client, next(numbers)))
        if await store.read(learning.serving_version) != before:
            return


async def _stream(client: openai.AsyncOpenAI, n: int, max_tokens: int = MAX_TOKENS) -> Stream:
    questions = training_questions()
    text = questions[7 * n % len(questions)].text
    sent_at = time.time()
    arrivals, fingerprints = [], []
    chunks = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": f"{text} Answer at length."}],
        max_tokens=max_tokens,
        temperature=0.7,
        stream=True,
    )
    async for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append(time.time())
            fingerprints.append(chunk.system_fingerprint or "")
    return Stream(sent_at=sent_at, arrivals=tuple(arrivals), fingerprints=tuple(fingerprints))


async def _until(store: Store, found: Callable[[Connection], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not await store.read(found):
        if time.monotonic() > ends:
            raise RuntimeError(f"waited {seconds:.0f} s in vain; the server's loops do not do what this expects")
        await asyncio.sleep(0.2)


# -- what the store is asked and told ----------------------------------------------------------------------------------


def _trainer_started(db: Connection) -> bool:
    return db.execute(select(events).where(events.c.kind == "trainer_started")).first() is not None


def _trainer_pid(db: Connection) -> int:
    started = select(events.c.data).where(events.c.kind == "trainer_started").order_by(events.c.event_id.desc())
    return int(db.execute(started.limit(1)).scalar_one()["pid"])


def _windows(db: Connection) -> dict[str, list[Window]]:
    judged = (
        select(next_states.c.created_at, func.min(verdicts.c.created_at))
        .join(verdicts, verdicts.c.turn_id == next_states.c.turn_id)
        .where(verdicts.c.judge != "benchmark")
        .group_by(next_states.c.turn_id)
    )
    ran = select(updates.c.started_at, updates.c.finished_at).where(updates.c.finished_at.is_not(None))
    served = select(policy_versions.c.created_at, policy_versions.c.served_at + AFTER_PUBLISH_S).where(
        policy_versions.c.version > 0, policy_versions.c.served_at.is_not(None)
    )
    queries = {"judge": judged, "update": ran, "publish": served}
    return {name: [(a, b) for a, b in db.execute(query)] for name, query in queries.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    messages: tuple[Message, ...]
    answer: str
    turn: Turn

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.answer}


def _newest_answers(db: Connection) -> list[_Answered]:
    """Answers cut off at the limit that clients have just got, newest first; turns to judge and to train copy them."""
    query = select(turns_table.c.turn_id, turns_table.c.answer).where(
        turns_table.c.placed_because != "a benchmark", turns_table.c.finish_reason == FinishReason.LENGTH
    )
    rows = db.execute(query.order_by(turns_table.c.turn_id.desc()).limit(BATCH_TURNS)).all()
    return [
        _Answered(
            messages=turns.load_messages(db, row.turn_id)[:-1],
            answer=row.answer,
            turn=turns.load_turn(db, row.turn_id),
        )
        for row in rows
    ]


def _copied(db: Connection, answered: _Answered) -> tuple[int, int]:
    """A finished turn with this answer, in a session of its own: the turn's id and the session's.

    A copy, since the answers above reached the token limit, and such a turn is never judged.
    """
    place = Placement(session_id=None, session_key=None, parent_turn_id=None, kind="new", because="a benchmark")
    new = NewTurn(
        user="benchmark",
        placement=place,
        messages=answered.messages,
        dialect="chat",
        tools=(),
        prompt_ids=answered.turn.prompt_ids,
        request_spine=request_spine(answered.messages),
        sampling=Sampling(max_tokens=MAX_TOKENS, temperature=answered.turn.temperature),
        learn=True,
    )
    turn_id, _, _ = turns.open_turn(db, new)
    turns.finish_turn(
        db,
        turn_id,
        answer=answered.message,
        malformed_calls=0,
        answer_spine=answer_spine(answered.messages, answered.message),
        reply_ids=answered.turn.reply_ids,
        reply_logprobs=answered.turn.reply_logprobs,
        reply_versions=answered.turn.reply_versions,
        finish_reason=FinishReason.STOP,
        counted_tokens=len(answered.turn.reply_ids),
    )
    session = select(turns_table.c.session_id).where(turns_table.c.turn_id == turn_id)
    return turn_id, int(db.execute(session).scalar_one())


def _turn_to_judge(db: Connection, answered: _Answered) -> int:
    """A turn that the judge claims next, since somebody has said something after it."""
    turn_id, session_id = _copied(db, answered)
    said: Message = {"role": "user", "content": REMARK}
    place = Placement(
        session_id=session_id,
        session_key=None,
        parent_turn_id=turn_id,
        kind="continuation",
        because="a benchmark",
        next_state=(said,),
        source=Source.USER,
    )
    messages = (*answered.messages, answered.message, said)
    turns.open_turn(
        db,
        NewTurn(
            user="benchmark",
            placement=place,
            messages=messages,
            dialect="chat",
            tools=(),
            prompt_ids=answered.turn.prompt_ids + answered.turn.reply_ids,
            request_spine=request_spine(messages),
            sampling=Sampling(max_tokens=1),
            learn=False,
        ),
    )
    return turn_id


def _turns_to_train(db: Connection, answers: Sequence[_Answered]) -> None:
    """Judged turns, every second one good, the others bad with a hint."""
    for n, answered in enumerate(answers):
        turn_id = _turn_to_judge(db, answered)
        value = Vote.GOOD if n % 2 else Vote.BAD
        hints = (Hint(text=HINT, source=Source.USER),) if value is Vote.BAD else ()
        verdict = Verdict(turn_id=turn_id, judge="benchmark", value=value, reason="A benchmark.", hints=hints)
        judging.write_verdict(db, verdict)


def show(result: dict[str, Any]) -> None:
    start, end = result["load_average"]
    idle = result["waits"]["idle"]
    rows = []
    for what, key in (("first text", "first_ms"), ("between pieces", "gap_ms")):
        for name in CONDITIONS:
            found = result["waits"][name][key]
            added = [
                None if name == "idle" or found[q] is None or idle[key][q] is None else found[q] - idle[key][q]
                for q in ("p50", "p99")
            ]
            rows.append([what, name, found["count"], found["p50"], found["p99"], found["max"], *added])
    machine.show(
        f"waits of a streaming client, ms; {result['streams']} streams, load average {start} to {end}",
        ["wait for", "while", "count", "p50", "p99", "most", "added p50", "added p99"],
        rows,
    )
    columns = ["", "count", "median", "most"]
    timed = [("update, s", "updates_s"), ("publish, s", "publish_s"), ("verdict, s", "judge_s")]
    timed.append(("gap in which the version changed, ms", "switch_gaps_ms"))
    machine.show(
        "",
        columns,
        [[t, len(result[k]), quantile(result[k], 0.5), max(result[k], default=None)] for t, k in timed],
    )
    columns = ["memory, MB", "peak resident", "proportional (PSS)"]
    machine.show("", columns, [[name, found["peak"], found["pss"]] for name, found in result["memory_mb"].items()])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=170, help="begin no round after this many seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    result = asyncio.run(measure(options.model, options.rounds, options.limit_s))
    show(result)
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
