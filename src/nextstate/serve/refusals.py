"""Answers that a request gets before it reaches an endpoint, in the shape that its client reads errors in."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import Scope

from nextstate.serve.errors import error_body, shaped


def refusal(
    scope: Scope, status: HTTPStatus, message: str, code: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The answer to a request of `scope`: Anthropic's shape below /v1/messages, else OpenAI's.

    Args:
        code: what went wrong, for programs; Anthropic's shape has no place for it.
    """
    kind = "authentication_error" if status == HTTPStatus.UNAUTHORIZED else "invalid_request_error"
    body = error_body(message, type=kind, code=code)
    return JSONResponse(shaped(scope["path"], status, body), status, headers)
