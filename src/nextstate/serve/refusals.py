"""Answers that a request gets before it reaches an endpoint, in the shape that its client reads errors in."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from nextstate.serve.errors import error_body

_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
}


def refusal(
    scope: Scope, status: HTTPStatus, message: str, code: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The answer to a request of `scope`: Anthropic's shape below /v1/messages, else OpenAI's.

    Args:
        code: what went wrong, for programs; Anthropic's shape has no place for it.
    """
    path: str = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        kind = "authentication_error" if status == HTTPStatus.UNAUTHORIZED else "invalid_request_error"
        body = error_body(message, type=kind, code=code)
    return JSONResponse(body, status, headers)
