"""How answers reach a client, whatever its dialect: event by event, or whole; and what happens when it leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nextstate.chat.events import AnswerEvent
from nextstate.errors import EngineFault
from nextstate.serve.answer import Answer
from nextstate.serve.errors import ApiError

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 8.0
"""A stream that has nothing to say for this long gets an empty event: clients give up on silence, and proxies on 10 s
of it. Comments do not count as life with all of them, events do."""


class Reply(Protocol):
    """Answers in the words of a dialect."""

    def whole(self) -> dict[str, Any]:
        """The body, once the answers are written down."""
        ...

    def events(self) -> AsyncGenerator[str]:
        """The server-sent events; the last one leaves after the turns are written down."""
        ...

    def failed(self, message: str, code: str) -> str:
        """The event that ends a stream which cannot go on: its headers are out, so nothing else can say it."""
        ...


async def respond(request: Request, answers: Sequence[Answer], reply: Reply, *, stream: bool) -> Response:
    """Answers whole or as a stream, with the headers that name their turns.

    Raises:
        ApiError: the engine failed before there was anything to send.
    """
    headers = turn_headers(answers)
    if stream:
        return AnswerStream(answers, _to_the_end(reply), headers)
    try:
        if not await finished(answers, request):
            return Response(status_code=499)  # nobody reads it; nginx's number for a client that left
    except EngineFault as error:
        raise ApiError(500, str(error), type="server_error", code="engine_fault", headers=headers) from error
    return JSONResponse(reply.whole(), headers=headers)


async def _to_the_end(reply: Reply) -> AsyncIterator[str]:
    """A reply's events, and one more where they break off: no stream ends without a word."""
    async with aclosing(reply.events()) as events:
        try:
            async for event in events:
                yield event
        except EngineFault as error:
            yield reply.failed(str(error), "engine_fault")
        except Exception:  # as an unexpected fault of any request: the log has it, and the client is told
            log.exception("a stream broke off")
            yield reply.failed("The server failed on this request; its log says more.", "internal_error")


class AnswerStream(StreamingResponse):
    """Server-sent events whose answers end with the stream, however it ends."""

    def __init__(self, answers: Sequence[Answer], events: AsyncIterator[str], headers: Mapping[str, str]) -> None:
        never_buffer = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers={**headers, **never_buffer}, media_type="text/event-stream")
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self._answers:
                answer.abandon()


def sse(body: Any, event: str | None = None) -> str:
    """One server-sent event."""
    named = f"event: {event}\n" if event is not None else ""
    return f"{named}data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, AnswerEvent | None]]:
    """The events of several answers as they come, each with the number of its answer. None: nothing for a while.

    Raises:
        EngineFault: the engine failed on one of them.
    """
    queue: asyncio.Queue[tuple[int, AnswerEvent | None] | Exception | None] = asyncio.Queue()

    async def read(n: int, answer: Answer) -> None:
        try:
            async for event in answer.events(KEEP_ALIVE_S):
                queue.put_nowait((n, event))
            queue.put_nowait(None)
        except Exception as error:
            # The one who reads the queue raises it.
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(n, answer)) for n, answer in enumerate(answers)]
    try:
        reading = len(tasks)
        while reading:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                reading -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def finished(answers: Sequence[Answer], request: Request) -> bool:
    """Wait until all answers are written down. False: the client left first, and nobody reads what comes of it.

    Raises:
        EngineFault: the engine failed on one of them.
    """
    reading = asyncio.create_task(_read(answers))
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
        return reading.done()
    finally:
        for answer in answers:
            answer.abandon()
        reading.cancel()
        leaving.cancel()


async def _read(answers: Sequence[Answer]) -> None:
    async with aclosing(merged(answers)) as events:
        async for _ in events:
            pass


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def turn_headers(answers: Sequence[Answer]) -> dict[str, str]:
    """The headers by which a reply names its turn, session and version."""
    first = answers[0]
    return {
        "x-nextstate-turn-id": ",".join(str(answer.turn_id) for answer in answers),
        "x-nextstate-session-id": _for_header(first.session_key),
        "x-nextstate-policy-version": str(first.start_version),
    }


def _for_header(text: str) -> str:
    """A session key as an HTTP header may carry it: no control characters, no blanks around it, Latin-1 at most."""
    return re.sub(r"[^ -~\xa0-\xff]|\A | \Z", "?", text)
