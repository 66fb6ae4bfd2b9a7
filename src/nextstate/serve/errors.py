"""Errors as clients read them: OpenAI's {"error": {"message", "type", "param", "code"}}, and below /v1/messages
Anthropic's {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

log = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is answered with an error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = error_body(message, type=type, param=param, code=code)


def error_body(
    message: str, *, type: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def server_error(message: str, code: str) -> dict[str, Any]:
    """The body for a fault of ours."""
    return error_body(message, type="server_error", code=code)


_ANTHROPIC_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def shaped(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error body as the clients of a path read it: Anthropic's shape below /v1/messages, else as it is."""
    if path != "/v1/messages" and not path.startswith("/v1/messages/"):
        return body
    message, param = body["error"]["message"], body["error"]["param"]
    # This shape has no field for the parameter, so the message must name it.
    return anthropic_error(status, message if param is None or param in message else f"{param}: {message}")


def handle_errors(app: FastAPI) -> None:
    """Give every error of an app one of the shapes above."""

    def reply(
        request: Request, body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None
    ) -> JSONResponse:
        return JSONResponse(shaped(request.url.path, status, body), status, headers)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return reply(request, error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = [(field_name(e["loc"]), e["msg"], e["type"]) for e in error.errors()]
        message = "; ".join(f"{field}: {what}" if field else what for field, what, _ in problems)
        field, _, kind = problems[0]
        # Our own checks name a code after this prefix; pydantic's types have none.
        code = kind.removeprefix(_OWN) if kind.startswith(_OWN) else None
        return reply(request, error_body(message, param=field or None, code=code), 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if message == HTTPStatus(error.status_code).phrase:
            message = f"{message}: {request.method} {request.url.path}."
        return reply(request, error_body(message), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        # Starlette raises it again behind this answer, so that the server logs the traceback.
        message = f"The server failed on this request ({type(error).__name__}); its log says more."
        return reply(request, server_error(message, "internal_error"), 500)


_OWN = "nextstate."


def own_type(code: str) -> str:
    """Type of a validation error of ours, from which the body's `code` is made."""
    return f"{_OWN}{code}"


def field_name(location: Sequence[str | int]) -> str:
    """('body', 'messages', 0, 'role') as messages[0].role."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]" if name else ""
        elif part not in ("body", "header") and _FIELD.fullmatch(part) and part not in _TYPES:
            name += f".{part}" if name else part
    return name


# Where a field may be of several types, pydantic names in the location the one that it tried.
_FIELD = re.compile(r"[a-z_][a-z0-9_]*")
_TYPES = frozenset({"str", "int", "float", "bool", "list", "dict", "none"})
