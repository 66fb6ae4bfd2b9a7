"""One turn while it is answered: written down before the first token, and again before the client sees the end.

    open_answer   prompt checked ─▶ placed and committed ─▶ Answer starts
    Answer        engine ─▶ detokeniser ─▶ stop strings ─▶ parser ─▶ events() ─▶ client
                      └─▶ ids, log-probs, versions ─▶ committed ─▶ events() ends

An answer runs in a task of its own, not in the request's: a request ends with its connection, in whatever line it
happens to be, and the turn has to be written down all the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from sqlalchemy import Connection

from nextstate.chat.detokenize import Detokenizer
from nextstate.chat.events import AnswerEvent, ReasoningDelta, TextDelta, ToolCall
from nextstate.chat.formats import opens_reasoning
from nextstate.chat.output import OutputParser
from nextstate.chat.stops import StopStrings
from nextstate.chat.template import MessagesRefused, render
from nextstate.collect.placement import place
from nextstate.collect.request import Incoming
from nextstate.collect.spine import answer_spine, request_spine
from nextstate.errors import ContextLengthExceeded, EngineFault, GrammarError, SamplingError
from nextstate.serve.errors import ApiError
from nextstate.serve.services import Services
from nextstate.store.forgetting import is_forgotten
from nextstate.store.store import note
from nextstate.store.turns import NewTurn, Placement, end_session, finish_turn, leave_out, open_turn
from nextstate.types import FinishReason, Message, PolicyRef, Sampling, SkipReason, TokenChunk, TokenIds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, whatever dialect it came in."""

    incoming: Incoming
    sampling: Sampling
    policy: PolicyRef
    learn: bool = True
    """False: answer as ever, and never judge or train."""
    session_done: bool = False
    """End the session after this answer."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Those that the model may call now: all of the request's, or none."""
    parallel_calls: bool = True
    """False: the answer ends behind its first tool call."""
    prompt_ids: TokenIds | None = None
    """The prompt itself, where the client sent tokens; None: the messages are rendered."""
    prompt_field: str = "messages"
    """What the dialect calls the field that the prompt is made of."""
    keep_raw: bool = False
    """The text as it was sampled, without looking for reasoning or tool calls in it."""
    report_logprobs: bool = False
    """Keep every token with its log-prob for the client."""
    beside: Answer | None = None
    """An answer to the same request, which asks for several: this one belongs where that one does."""


async def open_answer(services: Services, ask: Ask) -> Answer:
    """Write a request down and start to answer it. It has a place, which the answer gives back when it ends.

    Raises:
        ApiError: the messages cannot be rendered, the prompt is too long, or nothing can be sampled so; nothing was
            written, and the place is still taken.
    """
    received_at = time.monotonic()
    engine = services.engine
    try:
        # In a thread: a prompt of many thousand tokens must not hold up the streams of others.
        prompt = ask.prompt_ids
        if prompt is None:
            prompt = await asyncio.to_thread(render, engine.loaded.tokenizer, ask.incoming.messages, ask.tools)
        engine.check_prompt(len(prompt))
        # A schema that this model's tokens cannot be held to shows here; later, it would be a fault of the engine.
        await engine.check_sampling(ask.sampling)
    except MessagesRefused as error:
        raise ApiError(400, str(error), param="messages") from error
    except ContextLengthExceeded as error:
        raise ApiError(400, str(error), param=ask.prompt_field, code="context_length_exceeded") from error
    except SamplingError as error:
        if isinstance(error, GrammarError):
            field = "tools" if ask.tools else "response_format"
            raise ApiError(400, str(error), param=field, code="invalid_schema") from error
        raise ApiError(400, str(error)) from error
    # From here on, what is told of the request is what may be stored; the prompt stays whole, for the engine.
    redacted: Counter[str] = Counter()
    if services.redactor.patterns:
        ask = await asyncio.to_thread(_redact, services, ask, redacted)
    answer = Answer(services, ask, prompt, received_at, redacted)
    services.answers.add(answer)
    try:
        kept = () if redacted else prompt
        turn_id, session_id, session_key, placement = await services.store.write(_open, services, ask, kept)
    except BaseException:
        services.answers.discard(answer)
        raise
    answer.start(turn_id, session_id, session_key, placement)
    services.metrics.placements.labels(placement.kind).inc()
    services.metrics.prompt_tokens.inc(len(prompt))
    if placement.next_state:
        services.wake_judge()
    return answer


def _redact(services: Services, ask: Ask, found: Counter[str]) -> Ask:
    """A request without what must not be stored; `found` is counted up by what was taken out."""
    messages = tuple(services.redactor.message(message, found) for message in ask.incoming.messages)
    return replace(ask, incoming=replace(ask.incoming, messages=messages))


def _open(db: Connection, services: Services, ask: Ask, prompt: TokenIds) -> tuple[int, int, str, Placement]:
    beside = ask.beside
    if beside is not None and is_forgotten(db, beside.turn_id):
        beside = None
    placement = place(db, ask.incoming) if beside is None else _beside(beside)
    if not ask.learn:
        # What it says must not teach either: not as a verdict on the answer before it, and not as a hint.
        placement = replace(placement, next_state=(), source=None)
    new = NewTurn(
        user=ask.incoming.user,
        placement=placement,
        messages=ask.incoming.messages,
        dialect=ask.incoming.dialect,
        tools=ask.tools,
        prompt_ids=prompt,
        request_spine=request_spine(ask.incoming.messages),
        sampling=ask.sampling,
        learn=services.learning and ask.learn,
    )
    return *open_turn(db, new), placement


def _beside(answer: Answer) -> Placement:
    because = f"The request asks for several answers; turn {answer.turn_id} is another."
    first = answer.placement
    session_id = first.session_id if first.session_id is not None else answer.session_id
    return replace(first, session_id=session_id, kind="regeneration", because=because, next_state=(), source=None)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token as `logprobs` reports it."""

    id: int
    logprob: float
    """nats, under the sampling transform in use."""
    version: int
    top: tuple[tuple[int, float], ...]
    """The most likely tokens in its place, best first."""


class Answer:
    """A turn that is being answered. `start` it once; read `events` once, or `abandon` it."""

    def __init__(
        self, services: Services, ask: Ask, prompt: TokenIds, received_at: float, redacted: Counter[str]
    ) -> None:
        """Args:
        ask: as it may be stored.
        prompt: as the model reads it.
        redacted: what was taken out of `ask`, by kind.
        """
        self._services, self._ask, self._prompt = services, ask, prompt
        self._redacted = redacted
        self._received_at = received_at
        self._events: asyncio.Queue[AnswerEvent | Exception | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._generating = self._abandoned = False
        self._parser: OutputParser | None = None
        self.created_at = int(time.time())
        self.turn_id, self.session_id, self.session_key = 0, 0, ""
        self.placement: Placement
        self.start_version = services.engine.version if ask.policy.version is None else ask.policy.version
        """Version that answers when the answer begins."""
        self.text = self.reasoning = ""
        """As far as they were shown."""
        self.tool_calls: list[ToolCall] = []
        self.parts: list[AnswerEvent] = []
        """The three in order; no two texts in a row."""
        self.stop_string: str | None = None
        """The one that ended the answer."""
        self.tokens: list[SampledToken] = []
        """All so far, where the request asks for log-probs."""
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
        """As the client is told; what is stored must agree."""
        return self._counted

    @property
    def version(self) -> int:
        """Version behind the newest token."""
        return self._versions[-1] if self._versions else self.start_version

    def start(self, turn_id: int, session_id: int, session_key: str, placement: Placement) -> None:
        self.turn_id, self.session_id, self.session_key = turn_id, session_id, session_key
        self.placement = placement
        self._task = asyncio.create_task(self._run(), name=f"turn {turn_id}")

    @property
    def message(self) -> Message:
        """The answer as far as it was shown, as the next request will carry it."""
        return assistant_message(self.text, self.reasoning, self.tool_calls)

    async def events(self, keep_alive_s: float) -> AsyncIterator[AnswerEvent | None]:
        """The answer as it is generated; None whenever there was nothing for `keep_alive_s` seconds.

        Ends when the turn is written down.

        Raises:
            EngineFault: the engine failed; the turn is left out.
        """
        while True:
            try:
                async with asyncio.timeout(keep_alive_s):
                    event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            yield event

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
            self._events.put_nowait(None)
        except Exception as error:
            # A fault that is not the engine's is a bug of ours: its turn gets a row all the same.
            if not isinstance(error, EngineFault):
                log.exception("turn %d failed", self.turn_id, extra={"turn_id": self.turn_id})
            detail = str(error) if isinstance(error, EngineFault) else f"The server failed: {error!r}."
            try:
                # Before the client hears of it: it may ask again at once, and that is then a retry.
                await self._services.store.write(leave_out, [self.turn_id], SkipReason.ENGINE_FAULT, detail)
            finally:
                self._events.put_nowait(error)
        finally:
            self._services.answers.discard(self)
            self._services.places.taken -= 1

    async def _generate(self) -> FinishReason:
        if self._abandoned:
            return FinishReason.ABORTED
        metrics = self._services.metrics
        tokenizer, form = self._services.engine.loaded.tokenizer, self._services.form
        raw = self._ask.keep_raw
        detokenizer = Detokenizer(tokenizer, keep=frozenset() if raw else form.markers)
        stops = StopStrings(self._ask.sampling.stop)
        self._parser = (
            None
            if raw
            else OutputParser(
                form, parse_tools=bool(self._ask.tools), in_reasoning=opens_reasoning(tokenizer, self._prompt)
            )
        )
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
                self._take(chunk)
                text = stops.add(detokenizer.add(chunk.ids))
                if chunk.finish is not None and not stops.stopped:
                    text += stops.add(detokenizer.finish())
                    text += "" if stops.stopped else stops.finish()
                ended = stops.stopped or chunk.finish is not None
                if self._show(text, last=ended):
                    return FinishReason.STOP
                if ended:
                    self.stop_string = stops.matched
                    return FinishReason.STOP if stops.stopped else cast(FinishReason, chunk.finish)
            raise EngineFault("the engine ended an answer without saying why.")
        except asyncio.CancelledError:
            return FinishReason.ABORTED
        finally:
            self._generating = False
            await chunks.aclose()

    def _take(self, chunk: TokenChunk) -> None:
        self._ids.extend(chunk.ids)
        self._logprobs.extend(chunk.logprobs)
        self._versions.extend(chunk.versions)
        self._counted += len(chunk.ids)
        self._services.metrics.reply_tokens.inc(len(chunk.ids))
        if self._ask.report_logprobs:
            tops = chunk.top_logprobs or ((),) * len(chunk.ids)
            self.tokens += map(SampledToken, chunk.ids, chunk.logprobs, chunk.versions, tops)

    def _show(self, text: str, *, last: bool) -> bool:
        """Pass text on as events. True: the request wants nothing behind the call that came."""
        parser = self._parser
        events: list[AnswerEvent] = [TextDelta(text)] if text and parser is None else []
        if parser is not None:
            events = parser.add(text) + (parser.finish() if last else [])
        for event in events:
            match event:
                case TextDelta(text=piece):
                    self.text += piece
                case ReasoningDelta(text=piece):
                    self.reasoning += piece
                case ToolCall():
                    self.tool_calls.append(event)
            self._add_part(event)
            self._events.put_nowait(event)
            if isinstance(event, ToolCall) and not self._ask.parallel_calls:
                return True
        return False

    def _add_part(self, event: AnswerEvent) -> None:
        match self.parts[-1] if self.parts else None, event:
            case TextDelta(text=before), TextDelta(text=more):
                self.parts[-1] = TextDelta(before + more)
            case ReasoningDelta(text=before), ReasoningDelta(text=more):
                self.parts[-1] = ReasoningDelta(before + more)
            case _:
                self.parts.append(event)

    def _close(self, db: Connection, finish: FinishReason) -> None:
        message = self._services.redactor.message(self.message, self._redacted)
        # Tokens say what the text says. Those of a turn that held what must not be stored are not stored either.
        kept = None if not self._redacted else 0
        finish_turn(
            db,
            self.turn_id,
            answer=message,
            malformed_calls=len(self._parser.malformed) if self._parser is not None else 0,
            answer_spine=answer_spine(self._ask.incoming.messages, message),
            reply_ids=tuple(self._ids[:kept]),
            reply_logprobs=self._logprobs[:kept],
            reply_versions=self._versions[:kept],
            finish_reason=finish,
            counted_tokens=self._counted if kept is None else kept,
        )
        if self._redacted:
            self._services.metrics.count_redactions(self._redacted)
            note(db, "redacted", self.turn_id, kinds=dict(self._redacted))
            # What was not finished, or is work on the side, says so: later requests are placed by that.
            if finish is not FinishReason.ABORTED and self.placement.kind != "side":
                what = ", ".join(f"{times} of {kind}" for kind, times in self._redacted.items())
                leave_out(db, [self.turn_id], SkipReason.REDACTED, f"It held what is not stored: {what}.")
        if finish is FinishReason.ABORTED and self._services.stopping.is_set():
            detail = "The server stopped before the answer was complete."
            leave_out(db, [self.turn_id], SkipReason.SERVER_STOPPED, detail)
        if self._ask.session_done:
            end_session(db, self.session_id)


def assistant_message(text: str, reasoning: str, tool_calls: Sequence[ToolCall]) -> Message:
    """An answer in OpenAI's shape; what it does not have is left out."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in tool_calls
        ]
    return message
