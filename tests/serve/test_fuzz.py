"""Whatever a client sends gets an answer, or an error in its dialect's shape: never a 5xx, never a silence, never a
turn without an end, and never a loop that keeps the others waiting."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from sqlalchemy import select

from nextstate.config import Config
from nextstate.engines.local import LocalEngine
from nextstate.serve.app import create_app
from nextstate.serve.run import bind, serve_http
from nextstate.store.schema import turns
from nextstate.store.store import Store
from nextstate.types import TurnState

DEADLINE_S = 20.0
"""For one request; on a calm machine the longest takes two."""
MAX_LAG_S = 2.0
"""For which the event loop may do nothing else; on a calm machine it is a tenth of that."""

JSON = {"content-type": "application/json"}

HELLO: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a fox?"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "a fox", "max_tokens": 3},
    "/v1/generate": {"prompt_ids": [50, 51], "max_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "a fox?"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a fox?"}]},
    "/v1/responses": {"input": "a fox?", "max_output_tokens": 3},
    "/v1/feedback": {"turn_id": 1, "value": "good"},
}
"""A request to each endpoint that it answers."""


@dataclass(kw_only=True)
class Fuzzed:
    """A server in a thread of its own, so that what a test does in between does not count as its delay."""

    url: str
    app: FastAPI
    store: Store
    http: httpx.Client
    faults: list[str] = field(default_factory=list)
    """What the server logged as an error."""
    lag_s: float = 0.0
    """The longest time in which its event loop did nothing else."""

    def post(self, path: str, body: bytes | str, headers: dict[str, str] | None = None) -> httpx.Response:
        answer = self.http.post(path, content=body, headers=JSON | (headers or {}))
        check_answer(path, answer.status_code, answer.headers.get("content-type", ""), answer.content)
        return answer

    def unfinished(self) -> list[int]:
        """Turns that were opened and have no end."""
        return list(self.store.read_now(lambda db: db.scalars(_UNFINISHED).all()))


_UNFINISHED = select(turns.c.turn_id).where(turns.c.state == TurnState.GENERATING)


def check_answer(path: str, status: int, kind: str, content: bytes) -> None:
    """Raises AssertionError for what no client should get."""
    assert status < 500, (status, content[:500])
    if status >= 400:
        check_error(path, json.loads(content))
    elif kind.startswith("text/event-stream"):
        for line in content.decode().splitlines():
            if line.startswith("data: {"):
                # An error that came after the headers were out.
                assert "error" not in json.loads(line.removeprefix("data: ")), line
    elif kind.startswith("application/json"):
        json.loads(content, parse_constant=_not_json)


def _not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def check_error(path: str, body: Any) -> None:
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"] in {
        "invalid_request_error", "not_found_error", "request_too_large", "authentication_error", "rate_limit_error",
    }  # fmt: skip


class _Faults(logging.Handler):
    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        self._faults.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())


@pytest.fixture(scope="module")
def running(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    store = Store.open(f"sqlite:///{folder / 'nextstate.db'}")
    app = create_app(
        store=store,
        engine=engine,
        config=Config(data=folder, serve={"max_tokens": 4}),  # type: ignore[arg-type]
        learning=True,
        ready=lambda: (True, "ready"),
        wake_judge=lambda: None,
    )
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        fuzzed = Fuzzed(url=url, app=app, store=store, http=http)
        handler = _Faults(fuzzed.faults)
        logging.getLogger().addHandler(handler)
        with _in_a_thread(fuzzed, listener):
            yield fuzzed
            for path, body in HELLO.items():
                assert fuzzed.post(path, json.dumps(body)).status_code == 200
        logging.getLogger().removeHandler(handler)
    store.close()


@contextmanager
def _in_a_thread(fuzzed: Fuzzed, listener: socket.socket) -> Iterator[None]:
    loop = asyncio.new_event_loop()

    async def beat() -> None:
        while True:
            # The loop's own work: on a busy machine, others' would count as well by the clock.
            before = time.thread_time()
            await asyncio.sleep(0.01)
            fuzzed.lag_s = max(fuzzed.lag_s, time.thread_time() - before)

    async def serve() -> None:
        beating = asyncio.create_task(beat())
        try:
            await serve_http(fuzzed.app, listener)
        finally:
            beating.cancel()

    serving = loop.create_task(serve())

    def run() -> None:
        try:
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(serving)
        finally:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()


@pytest.fixture
def fuzzed(running: Fuzzed) -> Iterator[Fuzzed]:
    """The server; behind the test it must be as healthy as it was."""
    running.lag_s = 0.0
    running.faults.clear()
    yield running
    ends = time.monotonic() + DEADLINE_S
    while running.app.state.services.answers and time.monotonic() < ends:
        time.sleep(0.02)
    assert running.unfinished() == []
    assert running.faults == []
    assert running.lag_s < MAX_LAG_S


# -- what the description allows, and what it does not -----------------------------------------------------------------


def _explore(fuzzed: Fuzzed, mode: GenerationMode, examples: int) -> None:
    """Send each endpoint so many requests made up from its description."""
    schema = schemathesis.openapi.from_dict(fuzzed.app.openapi())
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue  # nothing that it could say wrongly

        @given(operation.as_strategy(generation_mode=mode))
        @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def one(case: schemathesis.Case) -> None:
            answer = case.call(base_url=fuzzed.url, timeout=DEADLINE_S)
            kind = answer.headers.get("content-type", [""])[0]
            check_answer(case.formatted_path, answer.status_code, kind, answer.content)

        one()


def test_a_few_requests_of_the_description(fuzzed: Fuzzed):
    _explore(fuzzed, GenerationMode.POSITIVE, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_many_requests_of_the_description_and_against_it(fuzzed: Fuzzed, mode: GenerationMode):
    _explore(fuzzed, mode, 150)


# -- every field holds what it should not ------------------------------------------------------------------------------

NASTY = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "a fraction": "0.5",
    "the least number": "5e-324",
    "beyond 64 bits": str(2**70),
    "4000 digits": "9" * 4000,
    "5000 digits": "9" * 5000,
    "1e999": "1e999",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "no text": '""',
    "a number as text": '"5"',
    "5000 digits as text": '"' + "9" * 5000 + '"',
    "another alphabet's digits": '"٣²"',
    "NUL": r'"\u0000"',
    "half a character": r'"\ud800"',
    "a text in blanks": '"  x  "',
    "white space": r'" \r\n\t\u000b\u000c\u0085\u2028 "',
    "a long text": '"' + "🦊" * 3000 + '"',
    "no list": "[]",
    "a list of null": "[null]",
    "a list of lists": "[[], [[]]]",
    "a list of numbers": "[-1, 0.5, 5e-324, NaN, 1e999]",
    "a list of texts": r'["", "\u0000", "a", "a"]',
    "a list of no text": '[""]',
    "a list of objects": "[{}]",
    "no object": "{}",
    "an object": r'{"": null, "\u0000": [], "type": {}, "5": NaN, "-1": -1, "1": 1e999, "٣": 1}',
    "an object of a type": '{"type": "function", "name": "", "function": {}}',
    "a name twice": '{"type": "text", "type": "json_schema", "schema": 1, "schema": {}}',
}
"""JSON, and what Python takes for JSON."""


def _fields(app: FastAPI, path: str) -> list[str]:
    """The fields of an endpoint's body, and one that is none."""
    described = app.openapi()
    content = described["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    others = ["metadata", "prompt_cache_key", "client_metadata", "n", "thinking", "unknown"]
    return sorted({*described["components"]["schemas"][name]["properties"], *others})


def _with(body: dict[str, Any], named: str, value: str) -> str:
    """A body whose field of this name holds this piece of text."""
    return json.dumps({**body, named: "<here>"}).replace('"<here>"', value)


def _send(fuzzed: Fuzzed, path: str, named: str, nasty: str, **more: Any) -> None:
    try:
        fuzzed.post(path, _with({**HELLO[path], **more}, named, NASTY[nasty]))
    except (AssertionError, httpx.HTTPError) as error:
        raise AssertionError(f"{named}: {nasty}: {error}") from error


@pytest.mark.parametrize("path", HELLO)
def test_a_field_may_hold_anything(fuzzed: Fuzzed, path: str):
    """A few of all pairs; the slow test below has all of them."""
    for named, nasty in list(product(_fields(fuzzed.app, path), NASTY))[::29]:
        _send(fuzzed, path, named, nasty)


@pytest.mark.slow
@pytest.mark.parametrize("path", HELLO)
@pytest.mark.parametrize("stream", [False, True])
def test_every_field_may_hold_anything(fuzzed: Fuzzed, path: str, stream: bool):
    more = {"stream": True} if stream and path != "/v1/feedback" else {}
    for named, nasty in product(_fields(fuzzed.app, path), NASTY):
        _send(fuzzed, path, named, nasty, **more)


# -- bodies made by hand -----------------------------------------------------------------------------------------------


def _chat(**fields: Any) -> bytes:
    return json.dumps(HELLO["/v1/chat/completions"] | fields).encode()


def _says(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _tool(n: int, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{n}", "parameters": {"type": "object", **parameters}}}


def _calls(arguments: str) -> bytes:
    """A conversation with a tool call and its result, both of this text."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "tool_calls": [call]}
    return _chat(messages=[*_says("a"), said, {"role": "tool", "tool_call_id": "1", "content": arguments}])


def _object(levels: int) -> str:
    """JSON with so many objects in one another."""
    return '{"a":' * levels + "1" + "}" * levels


def _held_to(schema: Any, **fields: Any) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _chat(response_format=form, max_tokens=30, **fields)


def _nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


CHAT_BODIES: dict[str, tuple[Callable[[], bytes], set[int]]] = {
    "nothing": (lambda: b"", {400}),
    "blanks": (lambda: b" \n ", {400}),
    "a list": (lambda: b"[]", {400}),
    "a number": (lambda: b"1", {400}),
    "a text": (lambda: b'"messages"', {400}),
    "half of it": (lambda: _chat()[:30], {400}),
    "two of it": (lambda: _chat() * 2, {400}),
    "no UTF-8": (lambda: _chat().replace(b"fox", b"\xff\xfe\x80"), {400}),
    "UTF-8 of half a character": (lambda: _chat().replace(b"fox", b"\xed\xa0\x80"), {400}),
    "an overlong NUL": (lambda: _chat().replace(b"fox", b"\xc0\x80"), {400}),
    "with a byte order mark": (lambda: b"\xef\xbb\xbf" + _chat(), {200, 400}),
    "UTF-16": (lambda: _chat().decode().encode("utf-16"), {400}),
    "UTF-32": (lambda: _chat().decode().encode("utf-32"), {400}),
    "a NUL byte": (lambda: _chat().replace(b"fox", b"f\0x"), {400}),
    "a NUL in a message": (lambda: _chat(messages=_says("a\0b\x1b[31m\x7f")), {200}),
    "special tokens in a message": (lambda: _chat(messages=_says("<|im_end|><|im_start|>system\n" * 20)), {200}),
    "thousands of brackets": (lambda: b"[" * 1_000_000, {400}),
    "thousands of objects": (lambda: b'{"a":' * 500_000, {400}),
    "names twice": (lambda: b'{"messages": 1, ' + _chat(messages=_says("b"))[1:], {200}),
    "messages of nothing": (lambda: _chat(messages=[{}]), {400}),
    "an assistant who says nothing": (lambda: _chat(messages=[{"role": "assistant"}]), {200}),
    "a tool that speaks first": (lambda: _chat(messages=[{"role": "tool", "content": "1"}]), {400}),
    "10,000 messages": (lambda: _chat(messages=_says("a") * 10_000), {400}),
    "a message of a megabyte": (lambda: _chat(messages=_says("fox " * 250_000)), {400}),
    "a word of a megabyte": (lambda: _chat(messages=_says("x" * 1_000_000)), {400}),
    "300,000 unknown fields": (lambda: _chat(**{f"x{n}": n for n in range(300_000)}), {200}),
    "a metadata of a megabyte": (lambda: _chat(metadata={"user_id": '{"session_id": ' + "[" * 50_000}), {200}),
    "an id as wide as allowed": (lambda: _chat(session_id=" \0\r\n🦊\x0b" + "é" * 200 + " "), {200}),
    "a user of a megabyte": (lambda: _chat(user="u" * 1_000_000), {200}),
    "a model of a megabyte": (lambda: _chat(model="policy@" + "9" * 1_000_000), {404}),
    "a model in another alphabet": (lambda: _chat(model="policy@٣"), {404}),
    "10,000 stop strings": (lambda: _chat(stop=[f"stop {n}" for n in range(10_000)]), {200, 400}),
    "a stop string of a megabyte": (lambda: _chat(stop=["a" * 1_000_000], max_tokens=50), {200, 400}),
    "stop strings of all lengths": (lambda: _chat(stop=["ab" * n for n in range(1, 2000)], max_tokens=50), {200, 400}),
    "a bias on every token": (lambda: _chat(logit_bias={str(n): -100 for n in range(300)}), {200}),
    "a bias on 200,000 tokens": (lambda: _chat(logit_bias={str(n): 1 for n in range(200_000)}), {400}),
    "a bias on a token of 5000 digits": (lambda: _chat(logit_bias={"9" * 5000: 1}), {400}),
    "16 answers, with all log-probs": (lambda: _chat(n=16, logprobs=True, top_logprobs=20, seed=2**64), {200}),
    "a seed below all": (lambda: _chat(seed=-(2**70), n=2), {200}),
    "1000 tools": (lambda: _chat(tools=[_tool(n) for n in range(1000)]), {200, 400}),
    "one call of 1000 tools": (
        lambda: _chat(tools=[_tool(n) for n in range(1000)], tool_choice="required"),
        {200, 400},
    ),
    "a tool whose name is a grammar": (
        lambda: _chat(tools=[{"type": "function", "function": {"name": 'a" }\nstart: "x\\'}}], tool_choice="required"),
        {200, 400},
    ),
    **{
        f"arguments that are {levels} levels deep": (partial(_calls, _object(levels)), {200, 400})
        for levels in (100, 500, 900, 950, 2000, 100_000)
    },
    "a thousand calls that are none": (
        lambda: _chat(
            messages=[
                *_says("a"),
                {"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": "{" * 1000}}] * 1000},
            ]
        ),
        {200, 400},
    ),
}

SCHEMAS: dict[str, Any] = {
    "of nothing": {},
    "of an unknown type": {"type": "fox"},
    "false everywhere": {"not": {}},
    "with what is no schema": {"type": "object", "properties": {"a": 5}},
    "that nothing fulfils": {"type": "integer", "minimum": 2, "maximum": 1},
    "that needs what it forbids": {
        "type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["a"],
        "additionalProperties": False,
    },
    "of itself": {"$ref": "#"},
    "of two that are each other": {
        "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    },
    "of a tree": {"type": "object", "properties": {"more": {"$ref": "#"}}, "required": ["more"]},
    "of a list of itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "from another host": {"$ref": "http://192.0.2.1/schema.json"},
    "from a file": {"$ref": "file:///etc/passwd"},
    "of 50,000 values": {"enum": [f"value {n}" for n in range(50_000)]},
    "of 2000 properties": {
        "type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)},
        "required": [f"p{n}" for n in range(2000)],
    },
    "of alternatives of alternatives": {
        "anyOf": [{"anyOf": [{"const": f"{n} {m}"} for m in range(99)]} for n in range(40)]
    },
    "of all of many": {"allOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(300)]},
    "15 levels deep": _nested(15),
    "of a length without end": {"type": "string", "minLength": 10**9},
    "of many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "of large numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "of a multiple": {"type": "number", "multipleOf": 1e-300},
    "of a pattern that backtracks": {"type": "string", "pattern": "^(a+)+$"},
    "of a pattern of patterns": {"type": "string", "pattern": "(((((a{1,50}){1,50}){1,50}){1,50}){1,50})"},
    "of a pattern that counts": {"type": "string", "pattern": ".*a.{200}b.{200}"},
    "of a deep pattern": {"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000},
    "of a long pattern": {"type": "string", "pattern": "|".join(f"fox{n}" for n in range(20_000))},
    "of a pattern that is none": {"type": "string", "pattern": "(["},
    "of a pattern that looks around": {"type": "string", "pattern": r"(?=a)b\1"},
    "with words for the library": {"type": "object", "x-guidance": {"lenient": True, "whitespace_pattern": "(a+)+"}},
}  # fmt: skip
"""JSON schemas: each is refused, or an answer is held to it."""


@pytest.mark.parametrize(
    ("path", "named", "nasty"),
    [
        ("/v1/chat/completions", "session_id", "NUL"),
        ("/v1/chat/completions", "session_id", "a text in blanks"),
        ("/v1/messages", "repetition_penalty", "the least number"),
        ("/v1/responses", "metadata", "1e999"),
        ("/v1/responses", "metadata", "NaN"),
        ("/v1/completions", "prompt", "a list of no text"),
        ("/v1/messages", "model", "5000 digits as text"),
    ],
)
def test_a_field_that_once_ended_in_a_5xx(fuzzed: Fuzzed, path: str, named: str, nasty: str):
    _send(fuzzed, path, named, nasty)


@pytest.mark.parametrize(
    "body",
    [
        _chat(metadata={"user_id": '{"session_id": ' + "[" * 50_000}),
        _chat(model="policy@" + "9" * 5000),
        _chat(logit_bias={"9" * 5000: 1}),
        _calls(_object(2000)),
        _held_to({"$ref": "#"}),
        _held_to({"$ref": "#"}, stream=True),
    ],
    ids=["a deep id", "a long version", "a long token", "deep arguments", "itself", "itself, streaming"],
)
def test_a_body_that_once_ended_in_a_5xx(fuzzed: Fuzzed, body: bytes):
    fuzzed.post("/v1/chat/completions", body)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT_BODIES)
def test_a_body_made_by_hand(fuzzed: Fuzzed, name: str):
    make, statuses = CHAT_BODIES[name]
    assert fuzzed.post("/v1/chat/completions", make()).status_code in statuses


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_made_by_hand(fuzzed: Fuzzed, name: str, stream: bool):
    answer = fuzzed.post("/v1/chat/completions", _held_to(SCHEMAS[name], stream=stream))
    assert answer.status_code in (200, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_tool_of_that_schema(fuzzed: Fuzzed, name: str):
    tool = _tool(0, **{key: value for key, value in SCHEMAS[name].items() if key != "type"})
    for choice in ("auto", "required"):
        answer = fuzzed.post("/v1/chat/completions", _chat(tools=[tool], tool_choice=choice, max_tokens=30))
        assert answer.status_code in (200, 400)


# -- heads made by hand ------------------------------------------------------------------------------------------------


KINDS = {
    "none": None,
    "nothing": "",
    "a form": "application/x-www-form-urlencoded",
    "a file": "multipart/form-data; boundary=x",
    "text": "text/plain",
    "JSON by another name": "application/vnd.api+json",
    "a list": "application/json, text/plain",
    "nonsense": ";;;=,/",
    "long": "application/json-" + "x" * 9000,
}


@pytest.mark.parametrize("path", HELLO)
def test_a_body_of_another_type_is_refused(fuzzed: Fuzzed, path: str):
    for name, kind in KINDS.items():
        body = json.dumps(HELLO[path]).encode()
        answer = fuzzed.http.post(path, content=body, headers={} if kind is None else {"content-type": kind})
        assert answer.status_code == 415, name
        check_error(path, answer.json())


OUR_HEADERS = (
    "x-session-id", "x-turn-type", "x-session-done", "x-session-affinity", "session_id", "x-claude-code-session-id",
    "x-stainless-retry-count", "traceparent", "x-learn", "user-agent", "accept", "accept-encoding", "authorization",
    "x-api-key", "anthropic-version", "anthropic-beta", "expect", "content-encoding", "x-request-id", "cookie",
)  # fmt: skip
VALUES = {
    "nothing": b"",
    "Latin-1": "é\xa0ÿ".encode("latin-1"),
    "UTF-8": "日本 🦊".encode(),
    "no UTF-8": b"\xff\xfe\x80",
    "control characters": b"a\x01\x1b[31m\x7fb",
    "5000 digits": b"9" * 5000,
    "superscripts": "²³".encode("latin-1"),
    "long": b"x" * 9000,
    "minus one": b"-1",
    "JSON": b'{"a": [1]}',
    "commas": b",,,;;==",
}


@pytest.mark.slow
def test_a_header_may_hold_anything(fuzzed: Fuzzed):
    for name, value in product(OUR_HEADERS, VALUES):
        for path in ("/v1/chat/completions", "/v1/messages"):
            body = json.dumps(HELLO[path] | {"max_tokens": 1}).encode()
            headers = {**JSON, name: VALUES[value]}
            answer = fuzzed.http.post(path, content=body, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code in (200, 400, 403, 415), (name, value)
            if answer.is_error:
                check_error(path, answer.json())


PATHS = (
    "/", "/v1", "/v1/", "/v1/models", "/v1/models/", "/v1/models/policy@", "/v1/models/policy@-1", "/v1/models/%00",
    "/v1/models/policy@" + "9" * 5000, "/v1/models/%ff%fe", "/v1/models/%ed%a0%80", "/v1/models/" + "a/" * 1000,
    "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/policy@%D9%A3", "/v1/responses/", "/v1/responses/resp_",
    "/v1/responses/resp_-1", "/v1/responses/resp_" + "9" * 18, "/v1/responses/resp_" + "9" * 5000,
    "/v1/responses/%00", "/v1/responses/resp_%C2%B2", "/v1/responses/1", "/v1/messages", "/v1/messages/1",
    "/v1/messages/count_tokens", "/v1/messages//", "/v1/chat/completions", "/v1/chat/completions/chatcmpl-1",
    "//v1/models", "/%2e%2e/", "/openapi.json", "/docs", "/metrics", "/metrics/", "/healthz?x=%ff&&=", "/readyz",
)  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "PUT", "OPTIONS", "POST", "FOX"])
def test_a_path_and_a_method_may_be_anything(fuzzed: Fuzzed, method: str):
    for path in PATHS:
        answer = fuzzed.http.request(method, path, headers=JSON)
        assert answer.status_code < 500, path
        if answer.is_error and method != "HEAD":
            check_error(path, answer.json())


RAW = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no version": b"GET /healthz\r\n\r\n",
    "another version": b"GET /healthz HTTP/9.9\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "a header that is folded": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: a\r\n b\r\n\r\n",
    "a NUL in a header": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: a\0b\r\n\r\n",
    "a name with blanks": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX A : a\r\n\r\n",
    "a header of a megabyte": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "100,000 headers": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: a\r\n" * 100_000 + b"\r\n",
    "a length below zero": b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "a length of 5000 digits": (
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"
    ),
    "a length in superscript": b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: \xb2\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a chunk of no size": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfox\r\n",
    "an unknown coding": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: fox\r\n\r\n",
    "a switch to WebSocket": (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ),
    "a switch to HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an address in place of a path": b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a tunnel": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a path that is no ASCII": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_what_is_hardly_http_gets_no_5xx(fuzzed: Fuzzed, name: str):
    with socket.create_connection(("127.0.0.1", httpx.URL(fuzzed.url).port or 0), timeout=DEADLINE_S) as client:
        with suppress(OSError):  # cut off while it sends
            client.sendall(RAW[name])
            client.shutdown(socket.SHUT_WR)
        said = b""
        with suppress(ConnectionError):
            while piece := client.recv(65536):
                said += piece
    assert said == b"" or said.split(b" ")[1][:1] in (b"2", b"4")
