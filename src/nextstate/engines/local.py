"""The local engine: a transformers model in this process, with continuous batching.

One thread owns the model. Each step it packs, for one policy version, the next token of every stream and a piece of
the prompts that wait, and runs one forward pass:

    asyncio side   generate(), score(), publish()  --inbox-->  engine thread: admit, pack, forward, sample
                   token chunks, scores            <--call_soon_threadsafe--

Why not transformers' own continuous batching: it has no seed per request, does not say which weights made a token,
delivers nothing after a cancel, and keeps no log-prob of other tokens, which judges vote with.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextstate.engines.adapters import AdapterSlots
from nextstate.engines.full import FullSlots
from nextstate.engines.grammar import Grammars, Matcher
from nextstate.engines.model import LoadedModel
from nextstate.engines.packed import KVCache, forward_packed
from nextstate.engines.prefixes import PrefixCache
from nextstate.engines.sampling import Drawn, Sampler, draw
from nextstate.engines.slots import VersionSlots
from nextstate.engines.states import recorded
from nextstate.errors import AdapterError, ContextLengthExceeded, EngineFault, SamplingError
from nextstate.types import FinishReason, PolicyRef, Sampling, ScoreRequest, TokenChunk, TokenIds, TokenScores

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class _Job:
    """A sequence on its way through the model."""

    ids: list[int]
    """Prompt and, as they come, sampled tokens."""
    version: int | None
    """Pinned version, or None for whatever serves."""
    deliver: Callable[[Any], None]
    """Hands a TokenChunk, a TokenScores or an exception to the asyncio side."""
    cache: KVCache = field(default_factory=KVCache)
    cache_version: int | None = None
    """Version that made the whole cache; None while empty, -1 when a publish landed in between."""
    cancelled: bool = False

    def rows_wanted(self, end: int) -> list[int]:
        """Positions before `end` whose logits this job wants when they are computed."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class _Generation(_Job):
    sampler: Sampler
    limit: int
    """Length at which the reply is cut."""
    sampled: int = 0

    def rows_wanted(self, end: int) -> list[int]:
        return [end - 1] if end == len(self.ids) else []


@dataclass(eq=False, kw_only=True)
class _Scoring(_Job):
    request: ScoreRequest
    logprobs: list[float] = field(default_factory=list)

    def rows_wanted(self, end: int) -> list[int]:
        last = len(self.ids) - 1
        first = max(self.cache.length, self.request.start - 1)
        return [p for p in range(first, end) if p < last or self.request.choices or self.request.layers]


class LocalEngine:
    """See the module's text. Start it with `start()`, end it with `stop()`."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_streams: int = 16,
        prefill_tokens: int = 256,
        prefill_tokens_busy: int = 64,
        score_tokens_busy: int = 24,
        prefix_cache_tokens: int = 4096,
        threads: int = 1,
    ) -> None:
        """Args:
        max_streams: replies generated at once; others wait their turn.
        prefill_tokens: prompt tokens computed in one step when no stream is running.
        prefill_tokens_busy: the same while streams run; small, so that their tokens keep coming.
        score_tokens_busy: of those, how many may be of sequences to score; nobody watches a judge's reply appear.
        prefix_cache_tokens: tokens of finished sequences whose keys and values are kept for the next prompt.
        threads: for the model's arithmetic. One: decoding gains nothing from a second, and the trainer wants it.
        """
        self.loaded = loaded
        self._max_streams = max_streams
        self._prefill_tokens, self._prefill_tokens_busy = prefill_tokens, prefill_tokens_busy
        self._score_tokens_busy = score_tokens_busy
        self._threads = threads
        self._prefixes = PrefixCache(prefix_cache_tokens)
        self._grammars = Grammars(loaded.tokenizer, loaded.end_ids)
        self._slots: VersionSlots | None = None
        self._version = 0  # to serve from the next step on
        self._wake = threading.Condition()
        self._inbox: deque[_Job] = deque()
        self._waiting: deque[_Job] = deque()
        self._active: list[_Job] = []
        self._last_group: int = -1
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- asyncio side ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests in flight are aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread that answers is running."""
        return self._thread.is_alive()

    @property
    def version(self) -> int:
        return self._version

    @property
    def versions(self) -> list[int]:
        """Versions that a request may pin."""
        return self._slots.versions if self._slots else [0]

    @property
    def load(self) -> tuple[int, int]:
        """Sequences running and waiting now."""
        return len(self._active), len(self._waiting) + len(self._inbox)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, no step begins: what is asked for meanwhile begins together, so that which sequences share a step
        does not depend on timing, and neither do the last digits of their numbers. For experiments; one thread's."""
        with self._wake:
            yield

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise ContextLengthExceeded when a prompt leaves no room for an answer."""
        if prompt_tokens >= self.loaded.context_tokens:
            raise ContextLengthExceeded(prompt_tokens, self.loaded.context_tokens)

    async def check_sampling(self, sampling: Sampling) -> None:
        """Raise what `generate` would raise for the sampling, before a stream has begun; takes long where it is new.

        Raises:
            SamplingError: a bias on a token that this model does not have; GrammarError: a grammar it cannot hold to.
        """
        vocabulary = int(self.loaded.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        for token, _ in sampling.logit_bias:
            if token >= vocabulary:
                raise SamplingError(f"logit_bias names token {token}; this model's tokens are 0 to {vocabulary - 1}.")
        await self._matcher(sampling)

    async def _matcher(self, sampling: Sampling) -> Matcher | None:
        grammar = sampling.grammar
        return None if grammar is None else await asyncio.to_thread(self._grammars.matcher, grammar)

    async def generate(self, prompt: TokenIds, sampling: Sampling, policy: PolicyRef) -> AsyncIterator[TokenChunk]:
        """See `Engine.generate`."""
        self.check_prompt(len(prompt))
        await self.check_sampling(sampling)
        chunks: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        job = _Generation(
            ids=list(prompt),
            version=policy.version,
            deliver=_from_thread(chunks.put_nowait),
            sampler=Sampler(sampling, prompt, await self._matcher(sampling)),
            limit=min(len(prompt) + sampling.max_tokens, self.loaded.context_tokens),
        )
        self._submit(job)
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            # Reached on a closed connection too; the thread drops the job before its next step.
            job.cancelled = True

    async def score(self, sequences: Sequence[ScoreRequest], policy: PolicyRef) -> list[TokenScores]:
        """See `Engine.score`."""
        jobs, futures = [], []
        for request in sequences:
            self.check_prompt(len(request.ids) - 1)
            future: asyncio.Future[TokenScores] = asyncio.get_running_loop().create_future()
            jobs.append(
                _Scoring(
                    ids=list(request.ids),
                    version=policy.version,
                    deliver=_from_thread(partial(_resolve, future)),
                    request=request,
                )
            )
            futures.append(future)
        for job in jobs:
            self._submit(job)
        try:
            return await asyncio.gather(*futures)
        finally:
            for job in jobs:
                job.cancelled = True

    def prepare_adapters(self, config: Any) -> None:
        """Make the adapter slots; once, before `start()`, since it changes the model's layers."""
        self._slots = AdapterSlots(self.loaded.model, config)

    def prepare_full_weights(self) -> None:
        """Make room for versions with full weights; once, before `start()`."""
        self._slots = FullSlots(self.loaded)

    async def publish(self, policy: PolicyRef, artifact: Path) -> None:
        """See `Engine.publish`. It loads beside the engine thread: the slot it fills is in nobody's use."""
        if self._slots is None or policy.version is None:
            raise AdapterError("this engine was started without slots for versions; it serves the base model only.")
        with self._wake:
            jobs = [*self._active, *self._waiting, *self._inbox]
        keep = {self._version, *(job.version for job in jobs if job.version is not None)}
        await asyncio.to_thread(self._slots.load, policy.version, artifact, keep)

    def serve_version(self, version: int) -> None:
        """See `Engine.serve_version`."""
        if version not in self.versions:
            raise AdapterError(f"version {version} is not loaded; publish it first.")
        # The engine thread reads it once a step, so the switch falls between two decoding steps.
        self._version = version

    def _submit(self, job: _Job) -> None:
        if job.version is not None and job.version not in self.versions:
            raise EngineFault(f"version {job.version} is not loaded; loaded now: {self.versions}.")
        with self._wake:
            if self._stopping:
                raise EngineFault("the engine has stopped.")
            self._inbox.append(job)
            self._wake.notify()

    # -- engine thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while self._wait_for_work():
                self._admit()
                group = self._next_group()
                try:
                    if group:
                        self._step(group)
                except Exception as error:  # each turn of the group gets the reason; the thread must live on
                    log.exception("an engine step failed for %d sequences", len(group))
                    for job in group:
                        job.cancelled = True
                        job.deliver(EngineFault(f"the engine failed while it computed this request: {error!r}"))
        for job in [*self._active, *self._waiting, *self._inbox]:
            job.deliver(EngineFault("the server stopped before the answer was complete."))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._inbox or self._active or self._waiting):
                self._wake.wait()
            while self._inbox:
                self._waiting.append(self._inbox.popleft())
            return not self._stopping

    def _admit(self) -> None:
        self._active = [job for job in self._active if not job.cancelled]
        streams = sum(isinstance(job, _Generation) for job in self._active)
        stay: deque[_Job] = deque()
        while self._waiting:
            job = self._waiting.popleft()
            if job.cancelled:
                continue
            if isinstance(job, _Generation) and streams >= self._max_streams:
                stay.append(job)
                continue
            streams += isinstance(job, _Generation)
            self._active.append(job)
        self._waiting = stay

    def _next_group(self) -> list[_Job]:
        """Jobs of one version; versions take turns, so that a judge on the base and the policy's streams both go on."""
        groups: dict[int, list[_Job]] = {}
        serving = self._version
        for job in self._active:
            groups.setdefault(serving if job.version is None else job.version, []).append(job)
        if not groups:
            return []
        order = sorted(groups)
        self._last_group = next((v for v in order if v > self._last_group), order[0])
        return groups[self._last_group]

    def _step(self, jobs: list[_Job]) -> None:
        version = self._last_group
        for job in jobs:
            self._note_version(job, version)
        batch: list[tuple[_Job, list[int]]] = [(j, j.ids[-1:]) for j in jobs if len(j.ids) - j.cache.length == 1]
        streaming = any(isinstance(j, _Generation) and j.sampled for j in self._active)
        budget = self._prefill_tokens_busy if streaming else self._prefill_tokens
        to_score = self._score_tokens_busy if streaming else budget
        for job in jobs:
            missing = len(job.ids) - job.cache.length
            most = min(budget, to_score) if isinstance(job, _Scoring) else budget
            if missing > 1 and most > 0:
                piece = job.ids[job.cache.length : job.cache.length + most]
                batch.append((job, piece))
                budget -= len(piece)
                to_score -= len(piece) if isinstance(job, _Scoring) else 0
        keep: list[int] = []
        wanted: list[list[int]] = []
        row = 0
        for job, piece in batch:
            past = job.cache.length
            positions = job.rows_wanted(past + len(piece))
            wanted.append(positions)
            keep.extend(row + p - past for p in positions)
            row += len(piece)
        model = self.loaded.model if self._slots is None else self._slots.activate(version)
        # A forward pass must keep some row; where nobody wants one yet, the last does no harm.
        keep = keep or [row - 1]
        layers = {layer for job, _ in batch if isinstance(job, _Scoring) for layer in job.request.layers}
        with recorded(model, layers) as states:
            logits_KV = forward_packed(
                model, [piece for _, piece in batch], keep, [job.cache for job, _ in batch]
            ).float()
        row = 0
        streams: list[_Generation] = []
        stream_rows: list[int] = []
        for (job, _), positions in zip(batch, wanted, strict=True):
            if isinstance(job, _Generation) and positions:
                streams.append(job)
                stream_rows.append(row)
            elif isinstance(job, _Scoring):
                at_last = {layer: states[layer][keep[row + len(positions) - 1]] for layer in job.request.layers}
                self._collect_scores(job, logits_KV[row : row + len(positions)], positions, at_last, version)
            row += len(positions)
        if streams:
            for stream, drawn in zip(streams, draw(logits_KV[stream_rows], [j.sampler for j in streams]), strict=True):
                self._go_on(stream, drawn, version)

    def _note_version(self, job: _Job, version: int) -> None:
        """Before a step: reuse what is cached under this version, and never mix versions inside a prompt."""
        prompt_only = not (isinstance(job, _Generation) and job.sampled)
        if job.cache.length and job.cache_version != version:
            if prompt_only:
                job.cache = KVCache()
            else:
                job.cache_version = -1
                return
        if job.cache.length == 0:
            # Log-probs inside the reused part would be lost, so a scored sequence shares only what stands before.
            most = min(len(job.ids), job.request.start) - 1 if isinstance(job, _Scoring) else len(job.ids) - 1
            job.cache = self._prefixes.take(version, job.ids, most)
            if isinstance(job, _Scoring):
                job.logprobs.clear()
        job.cache_version = version

    def _go_on(self, job: _Generation, drawn: Drawn | EngineFault, version: int) -> None:
        """Hand a stream its next token, or the reason why it has none."""
        if isinstance(drawn, EngineFault):
            job.deliver(drawn)
            job.cancelled = True
            return
        job.ids.append(drawn.token)
        job.sampled += 1
        finish = None
        if drawn.token in self.loaded.end_ids:
            finish = FinishReason.STOP
        elif len(job.ids) >= job.limit:
            finish = FinishReason.LENGTH
        job.deliver(
            TokenChunk(
                ids=(drawn.token,),
                logprobs=(drawn.logprob,),
                versions=(version,),
                top_logprobs=(drawn.top,) if job.sampler.sampling.top_logprobs else (),
                finish=finish,
            )
        )
        if finish is not None:
            self._retire(job)

    def _collect_scores(
        self, job: _Scoring, rows_KV: Tensor, positions: list[int], states: dict[int, Tensor], version: int
    ) -> None:
        logprobs_KV = (rows_KV / job.request.temperature).log_softmax(-1)
        choices: tuple[float, ...] = ()
        for row, position in zip(logprobs_KV, positions, strict=True):
            if position + 1 < len(job.ids):
                if position + 1 >= job.request.start:
                    job.logprobs.append(float(row[job.ids[position + 1]]))
            else:
                choices = tuple(float(row[c]) for c in job.request.choices)
        if job.cache.length == len(job.ids):
            job.deliver(
                TokenScores(
                    logprobs=tuple(job.logprobs),
                    choice_logprobs=choices,
                    states=tuple(tuple(states[layer].tolist()) for layer in job.request.layers),
                    version=version,
                )
            )
            self._retire(job)

    def _retire(self, job: _Job) -> None:
        self._active.remove(job)
        self._prefixes.keep_only(set(self.versions))
        if job.cache_version is not None and job.cache_version >= 0:
            self._prefixes.put(job.cache_version, job.ids, job.cache)


def _from_thread(put: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a callback so that the engine thread can call it; a loop that has closed has nobody waiting."""
    loop = asyncio.get_running_loop()

    def deliver(item: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(put, item)

    return deliver


def _resolve(future: asyncio.Future[TokenScores], result: TokenScores | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
