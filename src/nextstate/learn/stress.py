"""The stress step: one pass as in an update, before the first one, to see whether the memory plan is right.

It computes what an update computes and changes nothing. On a GPU it is as long as the longest pass that is planned; on
a CPU that may take minutes, and nobody is to wait for it: it is as long as a few seconds allow, and what a token takes
stands for the others, since memory grows with tokens in proportion. Runs out of memory: the lengths are halved, and it
is tried again.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from sqlalchemy import Connection, select

from nextstate.config import LearnConfig
from nextstate.learn.memory import Available, forget_peak, resident_bytes
from nextstate.learn.plan import SHORT_TURN, Plan, Shape, TrainingRefused, gb, make_plan, pass_bytes
from nextstate.learn.trainer import Trainer
from nextstate.store.schema import events

log = logging.getLogger(__name__)

SECONDS = 3.0
_WARM_UP_TOKENS = 32
"""They touch all weights, which are mapped and not yet read, and show how long a token takes."""
_FEWEST_TOKENS = 64
"""With fewer, what a pass takes once hides what a token takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stressed:
    """A stress step that went through."""

    tokens: int
    seconds: float
    planned_bytes: int
    """For a pass of so many tokens, with the gradients of the weights."""
    measured_bytes: int | None
    """None where the system does not say."""

    @property
    def ratio(self) -> float | None:
        """Measured over planned."""
        return None if self.measured_bytes is None else self.measured_bytes / self.planned_bytes


def settle(
    trainer: Trainer, shape: Shape, plan: Plan, found: Available, say: Callable[..., None], *, seconds: float = SECONDS
) -> Plan:
    """Hold the plan against one pass. Gives the plan to keep to: this one, or a smaller one.

    Args:
        found: what was available when the plan was made.
        say: writes an event, given its kind and data. `stress_started` is written before the pass: a process that the
            system kills in it can say nothing afterwards.
        seconds: that the pass may take on a CPU, about.

    Raises:
        TrainingRefused: not even a short turn goes through.
    """
    config, device = trainer.config, torch.device(plan.device)
    while True:
        tokens = plan.longest
        try:
            say("stress_started", tokens=min(_WARM_UP_TOKENS, tokens))
            began = time.monotonic()
            trainer.rehearse(min(_WARM_UP_TOKENS, tokens))
            if device.type == "cpu":
                a_token = (time.monotonic() - began) / min(_WARM_UP_TOKENS, tokens)
                tokens = min(tokens, max(_FEWEST_TOKENS, int(seconds / a_token)))
            say("stress_started", tokens=tokens)
            stressed = _measure(trainer, shape, plan, tokens)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            smaller = plan.longest // 2 if tokens == plan.longest else 0
            said = f"a pass of {tokens} tokens ran out of memory, though {gb(plan.available_bytes)} seemed available"
            say("stress_failed", tokens=tokens, error=str(error))
            if smaller < min(SHORT_TURN, shape.context):
                raise TrainingRefused(
                    f"{said} ({plan.available_from}): nothing is learned, and serving goes on. Free memory, or set "
                    "learn.memory_gb to what the trainer may take."
                ) from error
            log.warning("%s; %d are tried. Set learn.max_turn_tokens = %d to begin there.", said, smaller, smaller)
            config = at_most(config, smaller)
            plan = make_plan(shape, config, found, device=plan.device)
            continue
        say("stress_step", **asdict(stressed))
        log.info("%s", stressed)
        ratio = stressed.ratio
        if ratio is None or ratio <= 1:
            return plan
        corrected = make_plan(shape, config, found, device=plan.device, correction=ratio)
        if corrected.refusal is not None:
            raise TrainingRefused(corrected.refusal)
        return corrected


def at_most(config: LearnConfig, tokens: int) -> LearnConfig:
    """The settings with passes of at most so many tokens, two at least: turns first, and micro-batches beside them."""
    turn = min(config.max_turn_tokens, tokens - 1)
    micro = min(config.micro_batch_tokens, tokens - turn)
    return config.model_copy(update={"max_turn_tokens": turn, "micro_batch_tokens": micro})


def _measure(trainer: Trainer, shape: Shape, plan: Plan, tokens: int) -> Stressed:
    peak = _Peak(torch.device(plan.device))
    began = time.monotonic()
    trainer.rehearse(tokens)
    return Stressed(
        tokens=tokens,
        seconds=round(time.monotonic() - began, 3),
        planned_bytes=pass_bytes(shape, trainer.config, tokens, device=plan.device) + plan.gradient_bytes,
        measured_bytes=peak.bytes(),
    )


class _Peak:
    """How far memory rises from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif forget_peak() and (resident := resident_bytes()):
            self._before = resident[0]

    def bytes(self) -> int | None:
        """None where the system does not say."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self._before
        resident = resident_bytes()
        return resident[1] - self._before if resident else None


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocator said so: torch has a class of its own for GPUs only."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "not enough memory", "bad_alloc"))


def killed_in(db: Connection) -> int | None:
    """Tokens of the pass in which the system killed the trainer that ran last; None: it did not.

    An allocator that has no more says so; a machine or a container that has no more kills, without a word.
    """
    steps = ("stress_started", "stress_failed", "stress_step", "stress_killed", "trainer_ended", "server_started")
    newest = select(events.c.kind, events.c.data).where(events.c.kind.in_(steps)).order_by(events.c.event_id.desc())
    ended, started = ([*db.execute(newest.limit(2)), None, None])[:2]
    if ended is None or started is None or (ended.kind, started.kind) != ("trainer_ended", "stress_started"):
        return None
    return int(started.data["tokens"]) if ended.data["status"] == -signal.SIGKILL else None
