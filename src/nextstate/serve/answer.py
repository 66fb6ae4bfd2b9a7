"""One turn while it is answered: written down before the first token, and again before the client sees the end.

    open_answer   prompt checked ─▶ placed and committed ─▶ Answer starts
    Answer        engine ─▶ detokeniser ─▶ stop strings ─▶ pieces() ─▶ client
                      └─▶ ids, log-probs, versions ─▶ committed ─▶ pieces() ends

An answer runs in a task of its own, not in the request's: a request ends with its connection, in whatever line it
happens to be, and the turn has to be written down all the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import cast

from sqlalchemy import Connection

from nextstate.chat.detokenize import Detokenizer
from nextstate.chat.stops import StopStrings
from nextstate.chat.template import MessagesRefused, render
from nextstate.collect.placement import place
from nextstate.collect.request import Incoming
from nextstate.collect.spine import answer_spine, request_spine
from nextstate.errors import ContextLengthExceeded, EngineFault
from nextstate.serve.errors import ApiError
from nextstate.serve.services import Services
from nextstate.store.turns import NewTurn, Placement, end_session, find_session, finish_turn, leave_out, open_turn
from nextstate.types import FinishReason, Message, PolicyRef, Sampling, SkipReason, TokenChunk, TokenIds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, whatever dialect it came in."""

    user: str
    """Whose conversations it may continue."""
    messages: tuple[Message, ...]
    sampling: Sampling
    policy: PolicyRef
    session_key: str | None
    side: bool
    session_done: bool
    """End the session after this answer."""
    retry_count: int
    """How often the client says it has sent this before."""


async def open_answer(services: Services, ask: Ask) -> Answer:
    """Write a request down and start to answer it.

    Raises:
        ApiError: the messages cannot be rendered, the prompt is too long, or too many requests wait; nothing was
            written.
    """
    received_at = time.monotonic()
    engine = services.engine
    if services.overloaded:
        raise _too_many(services)
    try:
        # In a thread: a prompt of many thousand tokens must not hold up the streams of others.
        prompt = await asyncio.to_thread(render, engine.loaded.tokenizer, ask.messages)
        engine.check_prompt(len(prompt))
    except MessagesRefused as error:
        raise ApiError(400, str(error), param="messages") from error
    except ContextLengthExceeded as error:
        raise ApiError(400, str(error), param="messages", code="context_length_exceeded") from error
    answer = Answer(services, ask, prompt, received_at)
    # No await between the check and the count, so that a burst cannot slip through between the two.
    if services.overloaded:
        raise _too_many(services)
    services.answers.add(answer)
    try:
        turn_id, session_key, placement = await services.store.write(_open, services, ask, prompt)
    except BaseException:
        services.answers.discard(answer)
        raise
    answer.start(turn_id, session_key)
    services.metrics.placements.labels(placement.kind).inc()
    services.metrics.prompt_tokens.inc(len(prompt))
    if placement.next_state:
        services.wake_judge()
    return answer


def _too_many(services: Services) -> ApiError:
    services.metrics.overloaded.inc()
    return ApiError(
        429,
        f"{len(services.answers)} requests are being answered or wait, as many as this server takes. Try again soon.",
        type="rate_limit_error",
        code="overloaded",
        headers={"Retry-After": "1"},
    )


def _open(db: Connection, services: Services, ask: Ask, prompt: TokenIds) -> tuple[int, str, Placement]:
    said = {"session_id": ask.session_key, "turn_type": "side" if ask.side else None}
    placement = place(db, Incoming(user=ask.user, messages=ask.messages, body=said, retry_count=ask.retry_count))
    new = NewTurn(
        user=ask.user,
        placement=placement,
        messages=ask.messages,
        prompt_ids=prompt,
        request_spine=request_spine(ask.messages),
        sampling=ask.sampling,
        learn=services.learning and not ask.side,
    )
    return *open_turn(db, new), placement


class Answer:
    """A turn that is being answered. `start` it once; read `pieces` once, or `abandon` it."""

    def __init__(self, services: Services, ask: Ask, prompt: TokenIds, received_at: float) -> None:
        self._services, self._ask, self._prompt = services, ask, prompt
        self._received_at = received_at
        self._pieces: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._generating = self._abandoned = False
        self.created_at = int(time.time())
        self.turn_id, self.session_key = 0, ""
        self.start_version = services.engine.version if ask.policy.version is None else ask.policy.version
        """Version that answers when the answer begins."""
        self.text = ""
        """As far as it was shown."""
        self.finish: FinishReason | None = None
        """Set when the turn is finished and written down."""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._counted = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self._prompt)

    @property
    def reply_tokens(self) -> int:
        return len(self._ids)

    @property
    def version(self) -> int:
        """Version behind the newest token."""
        return self._versions[-1] if self._versions else self.start_version

    def start(self, turn_id: int, session_key: str) -> None:
        self.turn_id, self.session_key = turn_id, session_key
        self._task = asyncio.create_task(self._run(), name=f"turn {turn_id}")

    async def pieces(self, keep_alive_s: float) -> AsyncIterator[str]:
        """Text as it is generated; an empty piece whenever there was none for `keep_alive_s` seconds.

        Ends when the turn is written down.

        Raises:
            EngineFault: the engine failed; the turn is left out.
        """
        while True:
            try:
                async with asyncio.timeout(keep_alive_s):
                    piece = await self._pieces.get()
            except TimeoutError:
                yield ""
                continue
            if piece is None:
                return
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def abandon(self) -> None:
        """Nobody wants the rest: stop generating at once, and keep the turn as aborted. Harmless when finished."""
        self._abandoned = True
        if self._generating and self._task is not None:
            self._task.cancel()

    async def written(self) -> None:
        """Wait until the turn is written down, finished or not."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            finish = await self._generate()
            await self._services.store.write(self._close, finish)
            self.finish = finish
            self._pieces.put_nowait(None)
        except Exception as error:
            # A fault that is not the engine's is a bug of ours: its turn gets a row all the same.
            if not isinstance(error, EngineFault):
                log.exception("turn %d failed", self.turn_id)
            detail = str(error) if isinstance(error, EngineFault) else f"The server failed: {error!r}."
            try:
                # Before the client hears of it: it may ask again at once, and that is then a retry.
                await self._services.store.write(leave_out, [self.turn_id], SkipReason.ENGINE_FAULT, detail)
            finally:
                self._pieces.put_nowait(error)
        finally:
            self._services.answers.discard(self)

    async def _generate(self) -> FinishReason:
        if self._abandoned:
            return FinishReason.ABORTED
        metrics = self._services.metrics
        detokenizer = Detokenizer(self._services.engine.loaded.tokenizer)
        stops = StopStrings(self._ask.sampling.stop)
        # An engine's iterator is a generator, whose `aclose` frees the request.
        chunks = cast(
            AsyncGenerator[TokenChunk],
            self._services.engine.generate(self._prompt, self._ask.sampling, self._ask.policy),
        )
        self._generating = True
        last_at = None
        try:
            async for chunk in chunks:
                now = time.monotonic()
                if last_at is None:
                    metrics.first_token_s.observe(now - self._received_at)
                else:
                    metrics.between_tokens_s.observe(now - last_at)
                last_at = now
                self._ids.extend(chunk.ids)
                self._logprobs.extend(chunk.logprobs)
                self._versions.extend(chunk.versions)
                self._counted += len(chunk.ids)
                metrics.reply_tokens.inc(len(chunk.ids))
                self._show(stops.add(detokenizer.add(chunk.ids)))
                if chunk.finish is not None and not stops.stopped:
                    self._show(stops.add(detokenizer.finish()))
                if stops.stopped:
                    return FinishReason.STOP
                if chunk.finish is not None:
                    self._show(stops.finish())
                    return chunk.finish
            raise EngineFault("the engine ended an answer without saying why.")
        except asyncio.CancelledError:
            return FinishReason.ABORTED
        finally:
            self._generating = False
            await chunks.aclose()

    def _show(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._pieces.put_nowait(piece)

    def _close(self, db: Connection, finish: FinishReason) -> None:
        finish_turn(
            db,
            self.turn_id,
            answer=self.text,
            answer_spine=answer_spine(self._ask.messages, {"role": "assistant", "content": self.text}),
            reply_ids=tuple(self._ids),
            reply_logprobs=self._logprobs,
            reply_versions=self._versions,
            finish_reason=finish,
            counted_tokens=self._counted,
        )
        if finish is FinishReason.ABORTED and self._services.stopping.is_set():
            detail = "The server stopped before the answer was complete."
            leave_out(db, [self.turn_id], SkipReason.SERVER_STOPPED, detail)
        if self._ask.session_done:
            session_id = find_session(db, self._ask.user, self.session_key)
            if session_id is not None:
                end_session(db, session_id)
