"""Serving the application over a socket that was taken before anything expensive began."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from nextstate.errors import ConfigError
from nextstate.serve.limits import patient
from nextstate.serve.services import Services

KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that rests (4 to 15 s). Whoever closes it while the other sends loses a
request, and only a client knows whether it is about to send."""
GRACE_S = 5
"""Answers in flight may go on for this long when the server stops."""


def bind(host: str, port: int) -> socket.socket:
    """Take a port. Clients that come before `serve_http` runs wait in line. `getsockname()[1]` is the actual port.

    Raises:
        ConfigError: the port is in use or not allowed, or there is no such address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"serve.host '{host}' is no address of this machine ({error.strerror}). Nothing was started. "
            "Use --host 127.0.0.1."
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may be bound to one port until the first one listens.
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            what, remedy = f"port {port} on {host} is already in use", "Stop what uses it, or choose another: --port N"
        elif error.errno == errno.EACCES:
            what, remedy = f"port {port} on {host} is not allowed to this user", "Choose one from 1024 on: --port N"
        else:
            what, remedy = f"port {port} on {host} cannot be used ({error.strerror})", "Check --host and --port"
        raise ConfigError(f"{what}. Nothing was started. {remedy}.") from error
    listener.setblocking(False)
    return listener


async def serve_http(app: FastAPI, listener: socket.socket) -> None:
    """Serve an app of `create_app` until SIGINT or SIGTERM comes, or until cancelled, and close the socket.

    Answers in flight then get `GRACE_S` seconds, or end at once on a second SIGINT.
    """
    services: Services = app.state.services
    limits = services.config.serve
    settings = uvicorn.Config(
        app,
        http=patient(limits.body_timeout_s, limits.send_timeout_s),
        access_log=False,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
    )
    server = _Server(settings, services)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
    finally:
        listener.close()


class _Server(uvicorn.Server):
    def __init__(self, settings: uvicorn.Config, services: Services) -> None:
        super().__init__(settings)
        self._services = services

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own version raises the signal again when it is done, and SIGTERM would then end the process before
        # the other loops have ended.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.stopping.set()
        await super().shutdown(sockets)
