"""Who asks: anybody on this machine as long as there is no key, and whoever has a key from then on.

Admit      key ─▶ Caller, which the request carries on
owner()    Caller and the request's own `user` ─▶ whose conversations it may continue
learns()   Caller and the request's wish        ─▶ whether it may be learned from
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from nextstate.config import ServeConfig
from nextstate.errors import ConfigError
from nextstate.serve.errors import ApiError
from nextstate.serve.refusals import refusal
from nextstate.store.keys import StoredKey, digest_of, list_keys, mark_used, match
from nextstate.store.store import Store

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v1/models", "/"})
"""Probes carry no key, some clients look for models before they send one, and a browser that opens the page cannot."""


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(("/v1/models/", "/page/"))


LEARN_HEADER = "x-nextstate-learn"

_FRESH_S = 0.5
"""For this long the keys may be taken from memory: a key that is added or revoked meanwhile counts that much later."""
_MARK_USED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request."""

    user: str
    """The key's user; '' without keys, and with `serve.api_key`."""
    learn: bool
    """False: nothing that this key asks is learned from."""
    key_name: str | None
    """Of a key in the store."""


OPERATOR = Caller(user="", learn=True, key_name=None)
"""Whoever asks on loopback while there are no keys, or has `serve.api_key`."""


def caller(request: Request) -> Caller:
    """Who sent a request to any path but `OPEN_PATHS`."""
    found: Caller = request.state.caller
    return found


def owner(caller: Caller, body_user: str | None) -> str:
    """Whose conversations a request may continue.

    The key says who it is; what the body calls its user only separates conversations of that one:

    | key's user | body's user | owner     |
    | ---------- | ----------- | --------- |
    |            |             |           |
    |            | ann         | /ann      |
    | team       |             | team      |
    | team       | ann/x       | team/ann/x |
    | team/ann   | x           | team%2Fann/x |

    No two pairs make the same owner: the first slash is always the one between the two.
    """
    return f"{_escaped(caller.user)}/{body_user}" if body_user else _escaped(caller.user)


def owns(caller: Caller, owner: str) -> bool:
    """Whether an owner, as above, is one of the caller's, whatever the body called its user."""
    return owner.partition("/")[0] == _escaped(caller.user)


def _escaped(user: str) -> str:
    return user.replace("%", "%25").replace("/", "%2F")


def learns(caller: Caller, headers: Mapping[str, str], body_learn: bool | None) -> bool:
    """Whether a request may be learned from: off wins over on, whoever of key, header and body says it.

    Raises:
        ApiError: the header says neither 'on' nor 'off'.
    """
    said = headers.get(LEARN_HEADER, "on").strip().lower()
    if said not in ("on", "off"):
        # Whoever misspells 'off' must not be learned from by mistake.
        raise ApiError(
            400, f"X-Nextstate-Learn is '{said}'; it must be 'on' or 'off'. Nothing was answered.", param=LEARN_HEADER
        )
    return caller.learn and body_learn is not False and said == "on"


def check_bind(serve: ServeConfig, stored_key: bool) -> None:
    """Refuse to serve other machines without a key.

    Args:
        stored_key: whether the data folder has a key that is not revoked.

    Raises:
        ConfigError: the address is not loopback, and there is no key; or the configured key is empty.
    """
    if serve.api_key is not None and not serve.api_key.get_secret_value():
        raise ConfigError(
            "serve.api_key is empty, which would let everybody in. Nothing was started. Set one, or remove the setting."
        )
    if serve.api_key is None and not stored_key and not is_loopback(serve.host):
        raise ConfigError(
            f"serve.host is '{serve.host}', which other machines can reach, and there is no key. Nothing was started. "
            "Make one with `nextstate keys add NAME`, set one in the environment: NEXTSTATE_SERVE__API_KEY=..., or "
            "serve loopback only: --host 127.0.0.1."
        )


def has_key(data: Path, database_url: str) -> bool:
    """Whether a data folder has a key that is not revoked; one that is not there yet is not made."""
    if not (data / "nextstate.db").exists():
        return False
    store = Store.open(database_url)
    try:
        return any(key.revoked_at is None for key in store.read_now(list_keys))
    finally:
        store.close()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False  # a name may mean any address


class Admit:
    """Lets a request in with its `Caller`, before its body is read.

    With keys, or on an address that other machines reach: 401 to requests without one. Without: 403 to requests that
    a web page may have made.
    """

    def __init__(self, app: ASGIApp, store: Store, serve: ServeConfig) -> None:
        self._app, self._keys = app, _Keys(store, serve.api_key)
        self._always = not is_loopback(serve.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._always or await self._keys.exist():
            found = await self._keys.find(headers)
            if found is None and not _is_open(scope["path"]):
                message = "No valid API key: send one as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
                status, challenge = HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"}
                await refusal(scope, status, message, "invalid_api_key", challenge)(scope, receive, send)
                return
        else:
            strange = _strange_name(headers)
            if strange is not None:
                message = (
                    f"Without a key this server answers requests to loopback names only, and this one names "
                    f"'{strange}'. Use 127.0.0.1 or localhost, or make a key: nextstate keys add NAME."
                )
                await refusal(scope, HTTPStatus.FORBIDDEN, message, "not_loopback")(scope, receive, send)
                return
            found = OPERATOR
        scope.setdefault("state", {})["caller"] = found
        await self._app(scope, receive, send)


class _Keys:
    """The configured key, and those in the store as they were at most `_FRESH_S` ago."""

    def __init__(self, store: Store, configured: SecretStr | None) -> None:
        self._store = store
        self._configured = None if configured is None else digest_of(configured.get_secret_value().encode())
        self._stored: dict[str, StoredKey] = {}
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._marked_at: dict[str, float] = {}

    async def exist(self) -> bool:
        """Whether there is a key. A revoked one counts: taking a key away must not let everybody in."""
        return self._configured is not None or bool(await self._fresh())

    async def find(self, headers: Headers) -> Caller | None:
        """Who sent these headers; None without a valid key. Either header will do: some clients fill both."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        for given in (bearer, headers.get("x-api-key", "").strip()):
            found = await self._caller(given.encode("latin-1")) if given else None
            if found is not None:
                return found
        return None

    async def _caller(self, given: bytes) -> Caller | None:
        if self._configured is not None and hmac.compare_digest(digest_of(given), self._configured):
            return OPERATOR
        key = match(given, await self._fresh())
        if key is None:
            return None
        now = time.monotonic()
        # To the minute: a write for each request would cost more than it tells.
        if now - self._marked_at.get(key.key_id, -_MARK_USED_S) >= _MARK_USED_S:
            self._marked_at[key.key_id] = now
            await self._store.write(mark_used, key.key_id)
        return Caller(user=key.user, learn=key.learn, key_name=key.name)

    async def _fresh(self) -> dict[str, StoredKey]:
        async with self._reading:
            if self._read_at is None or time.monotonic() - self._read_at > _FRESH_S:
                read_at = time.monotonic()
                self._stored = {key.key_id: key for key in await self._store.read(list_keys)}
                self._read_at = read_at
        return self._stored


def _strange_name(headers: Headers) -> str | None:
    """The Host or Origin that is not this machine.

    A page from elsewhere can make a browser talk to loopback under a name of its own (DNS rebinding); the names give
    it away.
    """
    named = [headers.get("host", ""), headers.get("origin", "").partition("://")[2]]
    return next((name for name in named if name and not is_loopback(_host_of(name))), None)


def _host_of(name: str) -> str:
    """'127.0.0.1:8700' and '[::1]:8700' without their ports."""
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
