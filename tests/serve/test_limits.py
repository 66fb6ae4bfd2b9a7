"""Bodies that are too large, too deep or too slow, and clients that stop reading."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from gated_engine import GatedEngine, eventually
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import RunningServer, ServerFactory

from nextstate.serve.limits import json_depth, patient
from nextstate.serve.run import bind
from nextstate.types import FinishReason, PolicyRef, Sampling, TokenChunk, TokenIds

JSON = {"content-type": "application/json"}


# -- depth -------------------------------------------------------------------------------------------------------------


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


_texts = st.text(alphabet='ab\\"[]{}/\n\u2200é🦊')
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | _texts,
    lambda inner: st.lists(inner) | st.dictionaries(_texts, inner),
)


@given(_values, st.booleans())
def test_the_depth_of_any_json_is_that_of_its_value(value: object, ascii_only: bool):
    assert json_depth(json.dumps(value, ensure_ascii=ascii_only).encode()) == depth_of(value)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"", 0),
        (b"[[]", 2),
        (b"]]][", 0),
        (rb'"\\[" "[\"["', 0),
        (rb'["\\", ["\""]]', 2),
        (b"[" * 100_000, 100_000),
        (b'{"a":' * 300 + b"1", 300),
    ],
)
def test_the_depth_of_what_is_no_json_is_counted_as_far_as_it_goes(text: bytes, depth: int):
    assert json_depth(text) == depth


async def test_a_body_may_nest_as_deep_as_the_limit_and_no_deeper(start_server: ServerFactory):
    async with start_server(serve={"max_depth": 10}) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for inner, status in ((9, 200), (10, 400)):
            deep = json.dumps({**body, "x": json.loads("[" * inner + "]" * inner)})
            answer = await server.http.post("/v1/chat/completions", content=deep, headers=JSON)
            assert answer.status_code == status
        error = answer.json()["error"]
        assert error["code"] == "too_deep"
        assert "11 levels" in error["message"]
        assert len(await server.turns()) == 1


async def test_json_in_another_encoding_cannot_hide_how_deep_it_is(server: RunningServer):
    body = ('{"∀": ' + "[" * 3000).encode("utf-16")
    answer = await server.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_utf8")


# -- senders -----------------------------------------------------------------------------------------------------------


async def connect(server: RunningServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))


def head(path: str, length: int) -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"
    return "\r\n".join((*lines, "", "")).encode()


async def drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b" ")
        await asyncio.sleep(0.02)


async def test_a_body_that_drips_is_cut_off_with_408(start_server: ServerFactory):
    async with start_server(serve={"body_timeout_s": 0.3}) as server:
        reader, writer = await connect(server)
        writer.write(head("/v1/chat/completions", 1000))
        dripping = asyncio.create_task(drip(writer))
        answer = await asyncio.wait_for(reader.read(1), 60)
        dripping.cancel()  # what arrives on a closed connection resets it, and the rest of the answer is lost
        answer += await asyncio.wait_for(reader.read(), 60)  # to the end: the connection is closed
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"0.3 s" in answer
        assert b"serve.body_timeout_s" in answer
        assert await server.turns() == []


@pytest.mark.parametrize("first", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_headers_that_drip_are_cut_off_on_a_new_and_on_a_used_connection(
    start_server: ServerFactory, first: bytes
):
    async with start_server(serve={"body_timeout_s": 0.3}) as server:
        reader, writer = await connect(server)
        writer.write(first + b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        dripping = asyncio.create_task(drip(writer))
        # Cut off without a word to the request, or this waits in vain.
        with suppress(ConnectionResetError):
            answers = await asyncio.wait_for(reader.read(), 60)
            assert answers.count(b"HTTP/1.1") == (1 if first else 0)
        dripping.cancel()
        writer.close()


async def test_a_client_that_leaves_within_its_body_leaves_nothing(start_server: ServerFactory, caplog):
    async with start_server() as server:
        _, writer = await connect(server)
        writer.write(head("/v1/chat/completions", 1000) + b"{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await server.http.get("/healthz")).status_code == 200
        assert await server.turns() == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


# -- readers -----------------------------------------------------------------------------------------------------------


def small_client(port: int) -> socket.socket:
    """A client whose kernel takes little before it is asked to read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    return client


class Endless:
    """An application that sends pieces without end, and counts them."""

    def __init__(self) -> None:
        self.sent = 0
        self.left = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        await receive()
        sending = asyncio.create_task(self._send(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()
        sending.cancel()

    async def _send(self, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            self.sent += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(app: Endless, send_timeout_s: float) -> AsyncIterator[int]:
    """The port of an application with connections that take little."""
    config = uvicorn.Config(app, http=patient(30.0, send_timeout_s), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    server.config.load()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    loop = asyncio.get_running_loop()
    accepting = await loop.create_server(
        lambda: config.http_protocol_class(config=config, server_state=server.server_state, app_state={}),
        sock=listener,
    )
    try:
        yield listener.getsockname()[1]
    finally:
        accepting.close()


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_a_client_that_reads_nothing_holds_little_and_is_cut_off():
    app = Endless()
    async with serving(app, send_timeout_s=0.3) as port:
        client = small_client(port)
        client.send(REQUEST)
        await asyncio.wait_for(app.left.wait(), 10)
        # What the kernel took; without flow control this is as many as the time allows.
        assert app.sent < 100
        client.close()


async def test_a_client_that_leaves_without_reading_is_noticed_at_once():
    app = Endless()
    async with serving(app, send_timeout_s=600.0) as port:
        client = small_client(port)
        client.send(REQUEST)
        await eventually(lambda: app.sent > 0)
        client.close()
        await asyncio.wait_for(app.left.wait(), 10)


class Sluggish(asyncio.Transport):
    """A connection whose buffer holds this much, each time that somebody looks."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes, self.aborted = sizes, asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()


async def test_a_client_that_takes_something_is_not_cut_off_until_it_takes_nothing():
    config = uvicorn.Config(Endless(), lifespan="off", log_config=None)
    connection = patient(30.0, 0.01)(config=config, server_state=uvicorn.Server(config).server_state, app_state={})
    transport = Sluggish([900, 600, 600, 200, 200, 200])  # at the start and the end of each time of waiting
    connection.connection_made(transport)
    connection.pause_writing()
    await asyncio.wait_for(transport.aborted.wait(), 10)
    assert transport.sizes == []
    connection.connection_lost(ConnectionResetError())


async def test_a_client_that_takes_all_is_not_looked_at_again():
    config = uvicorn.Config(Endless(), lifespan="off", log_config=None)
    connection = patient(30.0, 0.01)(config=config, server_state=uvicorn.Server(config).server_state, app_state={})
    transport = Sluggish([900])
    connection.connection_made(transport)
    connection.pause_writing()
    connection.resume_writing()
    await asyncio.sleep(0.05)
    assert not transport.aborted.is_set()
    connection.connection_lost(ConnectionResetError())


class Talkative(GatedEngine):
    """Answers with many tokens at once, and then waits at the gate."""

    async def generate(self, prompt: TokenIds, sampling: Sampling, policy: PolicyRef) -> AsyncIterator[TokenChunk]:
        try:
            for _ in range(2000):
                yield TokenChunk(ids=(70,), logprobs=(-1.0,), versions=(0,))
                self.passed += 1
            await self.go_on.wait()
            yield TokenChunk(ids=(), logprobs=(), versions=(), finish=FinishReason.LENGTH)
        finally:
            self.closed += 1


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_stream_that_nobody_reads_is_aborted(start_server: ServerFactory, engine, monkeypatch, leaves: bool):
    talkative = Talkative(engine)

    def small_bind(host: str, port: int) -> socket.socket:
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr("tests.conftest.bind", small_bind)
    limit = 600.0 if leaves else 0.3
    async with start_server(serve={"send_timeout_s": limit}, with_engine=talkative) as server:
        client = small_client(int(server.url.rpartition(":")[2]))
        body = json.dumps(
            {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 3000}
        ).encode()
        client.send(head("/v1/chat/completions", len(body)) + body)
        await eventually(lambda: talkative.passed == 2000)
        if leaves:
            client.close()
        await eventually(lambda: talkative.closed == 1, within_s=10)

        async def aborted() -> bool:
            [turn] = await server.turns()
            return (turn.state, turn.reason) == ("left_out", "aborted")

        await eventually(aborted)
        client.close()
