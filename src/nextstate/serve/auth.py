"""Who may ask: anybody on this machine, or whoever has the key."""

from __future__ import annotations

import hmac
from ipaddress import ip_address

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from nextstate.config import ServeConfig
from nextstate.errors import ConfigError
from nextstate.serve.errors import error_body

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v1/models"})
"""Probes carry no key, and some clients look for models before they send one."""


def check_bind(serve: ServeConfig) -> None:
    """Refuse to serve other machines without a key.

    Raises:
        ConfigError: the address is not loopback, and there is no key; or the key is empty.
    """
    if serve.api_key is not None and not serve.api_key.get_secret_value():
        raise ConfigError(
            "serve.api_key is empty, which would let everybody in. Nothing was started. Set one, or remove the setting."
        )
    if serve.api_key is None and not is_loopback(serve.host):
        raise ConfigError(
            f"serve.host is '{serve.host}', which other machines can reach, and there is no key. Nothing was started. "
            "Set a key in the environment: NEXTSTATE_SERVE__API_KEY=..., or serve loopback only: --host 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False  # a name may mean any address


class RequireKey:
    """Answers 401 to requests without the key, before their body is read."""

    def __init__(self, app: ASGIApp, key: SecretStr) -> None:
        self._app, self._key = app, key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "No valid API key: send the server's key as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
        body = error_body(message, type="authentication_error", code="invalid_api_key")
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), self._key)


class LoopbackOnly:
    """Without a key: answers 403 to requests that a web page may have made, by their Host or Origin.

    A page from elsewhere can make a browser talk to loopback under a name of its own (DNS rebinding); the names give
    it away.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        named = [headers.get("host", ""), headers.get("origin", "").partition("://")[2]]
        strange = next((name for name in named if name and not is_loopback(_host_of(name))), None)
        if strange is None:
            await self._app(scope, receive, send)
            return
        message = (
            f"Without a key this server answers requests to loopback names only, and this one names '{strange}'. "
            "Use 127.0.0.1 or localhost, or set NEXTSTATE_SERVE__API_KEY."
        )
        await JSONResponse(error_body(message, code="not_loopback"), 403)(scope, receive, send)


def _host_of(name: str) -> str:
    """'127.0.0.1:8700' and '[::1]:8700' without their ports."""
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
