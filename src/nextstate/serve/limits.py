"""What a request may be: JSON, and not too large."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextstate.serve.errors import error_body


class LimitBody:
    """Answers 413 to a body above the limit, whether the client says its length or just sends it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = Headers(scope=scope).get("content-length", "")
        if said.isdigit() and int(said) > self._max_bytes:
            await JSONResponse(error_body(self._message(int(said)), code="request_too_large"), 413)(
                scope, receive, send
            )
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._message(received))
            return message

        await self._app(scope, counted, send)

    def _message(self, size: int) -> str:
        return (
            f"The request has {size} bytes or more; this server takes {self._max_bytes}. "
            "Send less, or raise serve.max_body_bytes."
        )


class RequireJson:
    """Answers 415 to a body that does not call itself JSON.

    More than a formality: a page in a browser may send a form to loopback unasked, and a form must not be able to
    teach the model anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = Headers(scope=scope).get("content-type", "") if scope["type"] == "http" else ""
        if scope["type"] != "http" or scope["method"] != "POST" or kind.partition(";")[0].strip() == "application/json":
            await self._app(scope, receive, send)
            return
        message = (
            f"The body is of type '{kind or 'unknown'}'. Send JSON, with the header 'Content-Type: application/json'."
        )
        await JSONResponse(error_body(message, code="unsupported_media_type"), 415)(scope, receive, send)
