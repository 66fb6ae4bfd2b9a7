"""What the endpoints work with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nextstate.chat.formats import OutputFormat
from nextstate.collect.redaction import Redactor
from nextstate.config import Config
from nextstate.engines.base import Engine
from nextstate.serve.metrics import Metrics
from nextstate.store.store import Store
from nextstate.types import Sampling

if TYPE_CHECKING:
    from nextstate.engines.model import LoadedModel
    from nextstate.serve.answer import Answer


class ServingEngine(Engine, Protocol):
    """An engine that holds a model of its own, as the local one does."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def versions(self) -> list[int]:
        """Versions that a request may pin."""
        ...

    @property
    def load(self) -> tuple[int, int]:
        """Sequences running and waiting now."""
        ...

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise ContextLengthExceeded when a prompt leaves no room for an answer."""
        ...

    async def check_sampling(self, sampling: Sampling) -> None:
        """Raise SamplingError when this model cannot sample so; GrammarError, if it is for the grammar."""
        ...


@dataclass(slots=True)
class Places:
    """How many answers are under way, those that are about to begin included.

    Counted here and not in the engine: there, a request arrives only when its turn is written down, and a burst would
    slip through before.
    """

    taken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    store: Store
    engine: ServingEngine
    form: OutputFormat
    """How the model writes reasoning and tool calls."""
    config: Config
    metrics: Metrics
    learning: bool
    """False: turns are kept and never judged or trained."""
    ready: Callable[[], tuple[bool, str]]
    """Whether answers can be had now, and a sentence about it."""
    wake_judge: Callable[[], None]
    """Called when a turn may have become ready for a verdict."""
    redactor: Redactor
    """What is taken out of texts before they are stored."""
    answers: set[Answer] = field(default_factory=set)
    """Turns being answered now."""
    places: Places = field(default_factory=lambda: Places())
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server stops: an answer that ends early from then on was not given up by its client."""

    @property
    def capacity(self) -> int:
        """Answers that may be under way at once: being generated, or waiting for a free stream."""
        return self.config.engine.max_streams + self.config.serve.max_queue
