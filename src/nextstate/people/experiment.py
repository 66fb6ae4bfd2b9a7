"""One run of the paper's experiment: personas talk to a model that learns from them, or does not.

All parts are the product's own, in this process: requests go through the HTTP application without a socket, turns are
placed and kept in a store, the configured judge reads what the persona said next, `run_update` trains, and the gate
decides about the version. Only the loops' timing is replaced by lockstep rounds, so that a seed gives the same run:

    round    sessions opened at once: first answers ─▶ reactions (─▶ second answers ─▶ ...)
             ─▶ verdicts on all turns ─▶ updates ─▶ gate ─▶ the next round begins on the new version

The persona's rule measures the answers. It never reaches the model: verdicts and hints come from the judge, which
reads words.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import httpx
import torch

from nextstate import config as configuration
from nextstate.config import Config
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import load
from nextstate.errors import NextstateError
from nextstate.judge.judge import Judge
from nextstate.learn import process
from nextstate.learn.publish import publish_next
from nextstate.learn.trainer import Trainer
from nextstate.people.personas import Persona
from nextstate.people.reacting import Person, TemplatePerson
from nextstate.people.tasks import Task, make_tasks
from nextstate.people.wishes import Fault
from nextstate.recipes.personal import make_engine, make_judge
from nextstate.serve.app import create_app
from nextstate.store import judging, learning, status
from nextstate.store.store import Store, make_folder
from nextstate.types import Vote

Method = Literal["none", "memory", "binary", "distillation", "hybrid"]
METHODS: tuple[Method, ...] = get_args(Method)
"""none      the model stays as it is
memory      it stays as it is, and the persona's corrections so far stand in the system prompt
the others  what `learn.objective` is called"""

LEARNING = Path(__file__).with_name("experiment.toml")

MEMORY = "What this user has asked for before:\n{corrections}"
MEMORY_CORRECTIONS = 5
"""The newest different ones; more would push the question out of a small model's sight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    personas: tuple[Persona, ...]
    """Whom the model serves; more than one share it, each as a user of its own."""
    method: Method
    seed: int
    """Of tasks, words and sampling. Runs that differ in nothing but the method have the same tasks."""
    sessions: int = 24
    """Of each persona."""
    round_sessions: int = 8
    """Of each persona, at once; the model learns between rounds."""
    answers: int = 1
    """Most answers that a persona reacts to in one session. With one, the first answer is all that is judged and
    trained, and it is what is measured."""
    temperature: float = 0.7

    @property
    def name(self) -> str:
        who = self.personas[0].name if len(self.personas) == 1 else "joint"
        return f"{who}-{self.method}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAnswer:
    """What a session is measured by."""

    fault: Fault | None
    """None: it is as wished."""
    version: int
    finish: str
    """'stop', or 'length' where it was cut off, and not learned from."""
    text: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    first_answers: dict[str, list[FirstAnswer]]
    """By persona, in session order."""
    verdicts: Counter[tuple[bool, str]]
    """How often an answer that the rule takes (True) or not had which verdict: good, bad, neutral, abstained."""
    turns: Mapping[str, int]
    """What became of all turns: 'trained', or why not."""
    updates: list[dict[str, Any]]
    settings: Mapping[str, Any]
    """The model, and every setting of engine, learn and gate that is not at its default."""


MakePerson = Callable[[Persona, Task, int], Person]
"""A persona in one session, from its task and a seed."""


async def run(
    plan: Run,
    folder: Path,
    *,
    config_file: Path = LEARNING,
    model: str | None = None,
    make_person: MakePerson | None = None,
    tasks: Callable[..., Sequence[Task]] = make_tasks,
) -> Outcome:
    """Run one experiment.

    Args:
        folder: for the store and the versions; made, and left behind.
        model: None for the configured one.
        make_person: None for people who speak in templates.
        tasks: makes so many, given a seed and a share of planted errors, as `make_tasks` does.

    Raises:
        NextstateError: the model, the configuration or the tasks cannot be had.
    """
    config = settings(plan, folder, config_file=config_file, model=model)
    learns = plan.method not in ("none", "memory")
    brought = {
        persona.name: tasks(plan.sessions, seed=_seed(plan.seed, persona.name), error_share=persona.error_share)
        for persona in plan.personas
    }
    make_person = make_person or (lambda persona, task, seed: TemplatePerson(persona, task, seed=seed))
    found = Outcome(
        first_answers={persona.name: [] for persona in plan.personas}, verdicts=Counter(), turns={}, updates=[],
        settings=_changed(config),
    )  # fmt: skip
    memory: dict[str, list[str]] = {persona.name: [] for persona in plan.personas}
    async with _lab(config, learns=learns) as lab:
        for begin in range(0, plan.sessions, plan.round_sessions):
            talks = [
                _Talk(
                    persona=persona,
                    person=make_person(persona, brought[persona.name][n], _seed(plan.seed, persona.name, n)),
                    seed=_seed(plan.seed, persona.name, n, "answers"),
                    answers=plan.answers,
                    system=remembered(memory[persona.name]) if plan.method == "memory" else None,
                )
                for persona in plan.personas
                for n in range(begin, min(begin + plan.round_sessions, plan.sessions))
            ]
            await _converse(lab, talks, plan.temperature)
            for talk in talks:
                assert talk.first_answer is not None
                found.first_answers[talk.persona.name].append(talk.first_answer)
                memory[talk.persona.name] += talk.corrections
            if learns:
                met = {turn.turn_id: turn.met for talk in talks for turn in talk.turns}
                found.verdicts += await _judge(lab, met)
                await _learn(lab)
        now = await lab.store.read(status.status)
        found.turns = {"trained": now.trained, **now.waiting, **now.left_out}
        found.updates = [_update(row) for row in await lab.store.read(learning.list_versions) if row.version > 0]
    return found


def settings(plan: Run, folder: Path, *, config_file: Path = LEARNING, model: str | None = None) -> Config:
    options: dict[str, Any] = {"data": folder}
    if model is not None:
        options["model"] = model
    if plan.method not in ("none", "memory"):
        options["learn"] = {"objective": plan.method, "seed": plan.seed}
    return configuration.load(config_file, **options)


def _changed(config: Config) -> dict[str, Any]:
    sections = {"engine": config.engine, "learn": config.learn, "gate": config.gate}
    changed = {name: section.model_dump(exclude_defaults=True) for name, section in sections.items()}
    return {"model": config.model, **changed}


@dataclass(slots=True, kw_only=True)
class _Turn:
    turn_id: int
    met: bool


@dataclass(slots=True, kw_only=True)
class _Talk:
    """One session of one persona."""

    persona: Persona
    person: Person
    seed: int
    answers: int
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    """Those that the person reacted to."""
    corrections: list[str] = field(default_factory=list)
    first_answer: FirstAnswer | None = None
    over: bool = False

    def begin(self) -> None:
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": self.person.opening()})

    async def go_on(self, response: httpx.Response) -> None:
        """Read an answer and say something to it."""
        choice = response.json()["choices"][0]
        text, finish = choice["message"]["content"] or "", choice["finish_reason"]
        fault = self.persona.wish.fault(text)
        if not self.turns:
            version = int(response.headers["x-nextstate-policy-version"])
            self.first_answer = FirstAnswer(fault=fault, version=version, finish=finish, text=text)
        self.turns.append(_Turn(turn_id=int(response.headers["x-nextstate-turn-id"]), met=fault is None))
        reaction = await self.person.react(text)
        if reaction.correction:
            self.corrections.append(reaction.words)
        self.over = not reaction.correction or len(self.turns) == self.answers
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reaction.words}]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lab:
    """The product's parts around one model."""

    config: Config
    store: Store
    engine: LocalEngine
    http: httpx.AsyncClient
    judge: Judge
    trainer: Trainer | None


@asynccontextmanager
async def _lab(config: Config, *, learns: bool) -> AsyncIterator[_Lab]:
    make_folder(config.data)
    loaded = load(config.model, dtype=config.engine.dtype, device=config.engine.device)
    engine = make_engine(loaded, config)
    # A second copy, as the trainer's process has one; both map the same file.
    trainer = (
        Trainer(load(config.model, dtype=config.engine.dtype, device=config.engine.device), config.learn)
        if learns
        else None
    )
    store = Store.open(config.database_url)
    app = create_app(
        store=store,
        engine=engine,
        config=config,
        learning=learns,
        ready=lambda: (True, "ready"),
        wake_judge=lambda: None,
    )
    engine.start()
    try:
        # The address is never looked up: requests are function calls.
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=None
        ) as http:
            judge = make_judge(engine, loaded, config)
            yield _Lab(config=config, store=store, engine=engine, http=http, judge=judge, trainer=trainer)
    finally:
        engine.stop()
        store.close()


async def _converse(lab: _Lab, talks: Sequence[_Talk], temperature: float) -> None:
    """All sessions at once, until everybody has left. The last words go out as a request of one token: they are the
    next state of the answer before, and nobody waits for more."""
    for talk in talks:
        talk.begin()
    going = list(talks)
    while going:
        for talk, response in zip(going, await _ask(lab, going, temperature), strict=True):
            await talk.go_on(response)
        await _ask(lab, [talk for talk in going if talk.over], temperature)
        going = [talk for talk in going if not talk.over]


async def _ask(lab: _Lab, talks: Sequence[_Talk], temperature: float) -> list[httpx.Response]:
    """The next answer of each session; in the same order into the store and into the engine's steps each time."""
    asked: list[asyncio.Task[httpx.Response]] = []
    with lab.engine.held():
        for talk in talks:
            body = {
                "model": "policy",
                "messages": talk.messages,
                "user": talk.persona.name,
                "max_tokens": 1 if talk.over else talk.persona.max_tokens,
                "temperature": temperature,
                "seed": _seed(talk.seed, len(talk.turns)),
                "session_done": talk.over,
            }
            asked.append(asyncio.create_task(lab.http.post("/v1/chat/completions", json=body)))
            # The engine's queue is no event to wait for.
            while sum(lab.engine.load) < len(asked) and not asked[-1].done():  # noqa: ASYNC110
                await asyncio.sleep(0.0005)
    responses = await asyncio.gather(*asked)
    for response in responses:
        if not response.is_success:
            raise NextstateError(f"the experiment's request was answered {response.status_code}: {response.text}")
    return responses


async def _judge(lab: _Lab, met: Mapping[int, bool]) -> Counter[tuple[bool, str]]:
    """Verdicts on all turns that wait for one, and how they compare with the rule.

    A judge that cannot be asked ends the experiment: it would not measure what it says.
    """
    compared: Counter[tuple[bool, str]] = Counter()
    while turns := await lab.store.write(judging.claim_unjudged, limit=len(met), lease_s=3600.0):
        with lab.engine.held():
            judging_now = [asyncio.create_task(lab.judge.verdict(turn)) for turn in turns]
            await asyncio.sleep(0)
        for turn, verdict in zip(turns, await asyncio.gather(*judging_now), strict=True):
            await lab.store.write(judging.write_verdict, verdict, turn.lease_until)
            name = "abstained" if verdict.value is None else Vote(verdict.value).name.lower()
            compared[met[turn.turn_id], name] += 1
    return compared


async def _learn(lab: _Lab) -> None:
    """Updates until no turn waits, each decided about before the next; a lone turn need not wait for a batch."""
    config, store, trainer = lab.config, lab.store, lab.trainer
    assert trainer is not None
    exact = next(trainer.model.parameters()).dtype == torch.float32
    while store.read_now(learning.waiting_samples)[0]:
        process.load_version(store, trainer, config, store.read_now(learning.serving_version))
        update_id = store.write_now(
            learning.start_update, limit=config.learn.max_update_turns, session_limit=config.learn.max_session_turns
        )
        if process.run_update(store, trainer, config, update_id) is None:
            break  # its row says why; its turns wait for the next round
        await publish_next(store, lab.engine, config.data, config.gate, exact=exact)


def remembered(corrections: Sequence[str]) -> str | None:
    """What the memory method puts before a session; nothing before there is anything to remember."""
    newest = list(dict.fromkeys(reversed(corrections)))[:MEMORY_CORRECTIONS]
    if not newest:
        return None
    return MEMORY.format(corrections="\n".join(f"- {words}" for words in reversed(newest)))


def _update(row: Any) -> dict[str, Any]:
    names = ("turns", "mean_reward", "policy_gradient", "distillation", "grad_norm", "divergence", "seconds")
    gate = {name: value for name, value in (row.gate or {}).items() if name in ("perplexity_ratio", "why")}
    return {
        "version": row.version,
        "state": row.state,
        **{name: row.metrics[name] for name in names if name in row.metrics},
        **gate,
    }


def _seed(*parts: object) -> int:
    """The same in every process, unlike hash()."""
    return zlib.crc32(":".join(map(str, parts)).encode())
