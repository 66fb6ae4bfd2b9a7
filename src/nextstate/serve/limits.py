"""What a request may be: JSON, not too large, not too deep, and not for ever on its way; nor may its reader be.

RequireJson   415
TakeBody      413, 408, 400; the endpoint gets the body whole
patient()     ends connections that bring no request, or take no answer
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import numpy as np
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nextstate.serve.refusals import refusal


class RequireJson:
    """Answers 415 to a body that does not call itself JSON, or that is compressed.

    More than a formality: a page in a browser may send a form to loopback unasked, and a form must not be able to
    teach the model anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        kind, packed = headers.get("content-type", ""), headers.get("content-encoding", "").strip()
        as_it_is = packed.lower() in ("", "identity")
        if kind.partition(";")[0].strip() == "application/json" and as_it_is:
            await self._app(scope, receive, send)
            return
        message = (
            f"The body is of type '{kind or 'unknown'}'. Send JSON, with the header 'Content-Type: application/json'."
        )
        if not as_it_is:
            message = f"The body is compressed ('{packed}'). Send it as it is, without 'Content-Encoding'."
        answer = refusal(scope, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "unsupported_media_type")
        await answer(scope, receive, send)


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, message: str, code: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        # A connection that stays open would let the client go on to send the rest.
        self.headers = {"Connection": "close"} if close else {}


class TakeBody:
    """Takes the body of a POST from the client, whole, and hands it on: nothing behind here waits for a sender.

    Answers 413 to one above the limit, whether the client says its length or just sends it; 408 to one that is not
    there in time; 400 to one that nests too deeply.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, max_depth: int) -> None:
        self._app = app
        self._max_bytes, self._timeout_s, self._max_depth = max_bytes, timeout_s, max_depth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._take(Headers(scope=scope), receive)
            if body is None:
                return  # the client has left: nobody hears an answer
            await self._check(body)
        except _Refused as no:
            await refusal(scope, no.status, no.message, no.code, no.headers)(scope, receive, send)
            return
        whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def handed_on() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()  # which tells when the client leaves
            message, whole = whole, None
            return message

        await self._app(scope, handed_on, send)

    async def _take(self, headers: Headers, receive: Receive) -> bytes | None:
        said = headers.get("content-length", "")
        if said.isdigit() and int(said) > self._max_bytes:
            raise self._too_large(int(said))
        parts: list[bytes] = []
        received = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    received += len(parts[-1])
                    if received > self._max_bytes:
                        raise self._too_large(received)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise _Refused(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The body was not complete after {self._timeout_s:g} s; {received} bytes had come. "
                "Send it faster, or raise serve.body_timeout_s.",
                "body_timeout",
                close=True,
            ) from None

    async def _check(self, body: bytes) -> None:
        if b"\0" in body:
            # Valid JSON has none in UTF-8, and always has some in UTF-16 and UTF-32.
            raise _Refused(HTTPStatus.BAD_REQUEST, "The body is not JSON in UTF-8: it holds a NUL byte.", "not_utf8")
        # In a thread where it takes long enough for the streams of others to notice.
        depth = json_depth(body) if len(body) < 100_000 else await asyncio.to_thread(json_depth, body)
        if depth > self._max_depth:
            raise _Refused(
                HTTPStatus.BAD_REQUEST,
                f"The body nests {depth} levels deep; this server takes {self._max_depth}. "
                "Send a flatter one, or raise serve.max_depth.",
                "too_deep",
            )

    def _too_large(self, size: int) -> _Refused:
        return _Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The request has {size} bytes or more; this server takes {self._max_bytes}. "
            "Send less, or raise serve.max_body_bytes.",
            "request_too_large",
        )


_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))


def json_depth(body: bytes) -> int:
    """How many objects and lists are open at once at the deepest place of a JSON text in UTF-8.

    A parser that recurses never gets deeper than this, whatever is wrong with the text: up to the first error, where
    it stops, the count is exact.
    """
    # All of it in C, where a loop over bytes would take seconds: escapes out, then strings, then all but brackets.
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    brackets = np.frombuffer(outside.translate(None, _NOT_BRACKETS), dtype=np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.where(opens, np.int8(1), np.int8(-1)).cumsum(dtype=np.int32).max(initial=0))


def patient(receive_timeout_s: float, send_timeout_s: float) -> type[H11Protocol]:
    """uvicorn's protocol with an end to its patience. The application hears of it as of any client that leaves.

    Here and not around the application's `send`: what a response that has failed leaves in the connection's buffer
    would wait for that client for ever.

    Args:
        receive_timeout_s: a connection that is new, or on which a request has begun, is cut when its headers are not
            there for so long, though they drip in. One that rests between two requests is uvicorn's to close.
        send_timeout_s: a client that takes nothing of its answer for so long is cut off.
    """

    class Patient(H11Protocol):
        _unasked: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # As soon as the kernel takes no more, the response waits: behind the kernel, at most one piece of it does.
            transport.set_write_buffer_limits(high=0)
            self._await_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._waits_for_request():
                self._stop_waiting()
            elif self._unasked is None:
                self._await_request()

        def send_400_response(self, msg: str) -> None:
            # The body turned out to be no HTTP when the request was already under way: one answer is enough.
            if self.cycle is not None:
                self.cycle.disconnected = True
            super().send_400_response(msg)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unwatch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            self._stop_waiting()
            super().connection_lost(exc)

        def _waits_for_request(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _await_request(self) -> None:
            self._unasked = self.loop.call_later(receive_timeout_s, self._look_for_request)

        def _stop_waiting(self) -> None:
            if self._unasked is not None:
                self._unasked.cancel()
                self._unasked = None

        def _look_for_request(self) -> None:
            self._unasked = None
            if self._waits_for_request():
                self.transport.abort()

        def _watch(self) -> None:
            left = self.transport.get_write_buffer_size()
            self._stalled = self.loop.call_later(send_timeout_s, self._look_again, left)

        def _unwatch(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def _look_again(self, before: int) -> None:
            if self.transport.get_write_buffer_size() < before:
                self._watch()
            else:
                self.transport.abort()

    return Patient
