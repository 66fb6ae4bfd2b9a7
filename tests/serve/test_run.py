from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from nextstate.config import Config
from nextstate.errors import ConfigError
from nextstate.serve.app import create_app
from nextstate.serve.run import bind, serve_http


def test_a_port_in_use_is_an_error_that_names_it(taken_port: int):
    with pytest.raises(ConfigError, match=f"port {taken_port} .* already in use"):
        bind("127.0.0.1", taken_port)


def test_a_port_is_taken_before_anything_is_served():
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="already in use"):
        bind("127.0.0.1", listener.getsockname()[1])


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(ConfigError, match="Nothing was started"):
        bind("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="no address of this machine"):
        bind("no such host", 0)


async def test_a_signal_ends_the_serving_and_not_the_process(store, engine, tmp_path):
    app = create_app(
        store=store,
        engine=engine,
        config=Config(data=tmp_path),
        learning=True,
        ready=lambda: (True, "ready"),
        wake_judge=lambda: None,
    )
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    serving = asyncio.create_task(serve_http(app, listener))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 5)
    with bind("127.0.0.1", port):
        pass
