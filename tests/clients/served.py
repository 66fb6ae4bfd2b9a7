"""The server that clients talk to, what they sent it, and what it has in its store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextstate.config import Config
from nextstate.judge.judge import EvidenceFirst
from nextstate.judge.loop import judge_loop
from nextstate.judge.sampled import SampledJudge
from nextstate.serve.app import create_app
from nextstate.serve.run import bind, serve_http
from nextstate.store.judging import StoredVerdict, list_verdicts
from nextstate.store.status import list_turns, show_turn
from nextstate.store.store import Store
from nextstate.types import TurnState, Vote
from tests.clients.pages import DEFAULT
from tests.clients.scripted import ScriptedPolicy, judge_endpoint
from tests.clients.story import CORRECTION, THANKS

_NAMING_HEADERS = (
    *("x-session-id", "x-session-affinity", "session_id", "session-id", "thread-id", "conversation_id"),
    *("x-client-request-id", "x-claude-code-session-id", "x-parent-session-id", "traceparent"),
)
_NAMING_FIELDS = ("session_id", "prompt_cache_key", "metadata", "client_metadata", "user")


def names_session(name: str) -> bool:
    """Whether a header of this name tells sessions or runs apart."""
    return name in _NAMING_HEADERS or name.startswith("x-codex-")


@dataclass
class Request:
    """A request as the client sent it, and the status that it got."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int | None = None
    """None until the answer begins."""


class Recorder:
    """Notes all requests; takes out of them what names a session, if it is told to."""

    def __init__(self, app: ASGIApp, seen: list[Request], anonymous: bool) -> None:
        self._app, self._seen, self._anonymous = app, seen, anonymous

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            content += message.get("body", b"")
            more = message.get("more_body", False)
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        request = Request(scope["path"], dict(headers), json.loads(content) if content else {})
        self._seen.append(request)
        if self._anonymous:
            kept = {name: value for name, value in request.body.items() if name not in _NAMING_FIELDS}
            content = json.dumps(kept).encode() if request.body else b""
            headers = [(name, value) for name, value in headers if not names_session(name) and name != "content-length"]
            headers.append(("content-length", str(len(content))))
            scope = {**scope, "headers": [(name.encode(), value.encode()) for name, value in headers]}
        first = True

        async def receive_again() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": content, "more_body": False}
            return await receive()

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
            await send(message)

        await self._app(scope, receive_again, note_status)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """What the store says of a turn."""

    turn_id: int
    session: str
    kind: str
    parent: int | None
    state: str
    reason: str | None
    because: str
    asked: str
    """The last message of its request that the store holds."""
    answer: str
    calls: list[str]
    """Names of the tools."""
    followed: list[tuple[str, str]]
    """Role and text of its next state."""
    verdict: StoredVerdict | None


@dataclass
class Served:
    """A running server."""

    address: str
    """host:port"""
    policy: ScriptedPolicy
    store: Store
    requests: list[Request] = field(default_factory=list)

    def configured(self, text: str) -> str:
        """A configuration from a page of docs/clients, for this server instead of one on the default port."""
        assert DEFAULT in text
        return text.replace(DEFAULT, self.address)

    async def turns(self) -> list[StoredTurn]:
        """All turns, oldest first, when no verdict is outstanding."""
        async with asyncio.timeout(30):
            while True:
                turns = list(await self.store.read(lambda db: list(self._turns(db))))
                if not any(turn.state in (TurnState.GENERATING, TurnState.CONTINUED) for turn in turns):
                    return turns
                await asyncio.sleep(0.05)

    def _turns(self, db: Any) -> Iterator[StoredTurn]:
        for row in reversed(list_turns(db, limit=1000)):
            shown = show_turn(db, row.turn_id)
            verdicts = list_verdicts(db, row.turn_id)
            yield StoredTurn(
                turn_id=row.turn_id,
                session=row.session,
                kind=row.kind,
                parent=row.parent_turn_id,
                state=row.state,
                reason=row.reason,
                because=row.placed_because,
                asked=str(row.messages[-1]["content"]) if row.messages else "",
                answer=row.answer or "",
                calls=[call["function"]["name"] for call in row.tool_calls or ()],
                followed=[(m["role"], m["content"]) for m in (shown.next_state if shown else None) or ()],
                verdict=verdicts[-1] if verdicts else None,
            )


@asynccontextmanager
async def serve(engine: ScriptedPolicy, store: Store, data: Path, *, anonymous: bool) -> AsyncIterator[Served]:
    """Serve and judge, as `nextstate serve` does, without a trainer.

    Args:
        anonymous: take out of every request what names its session or its run, before the server sees it.
    """
    config = Config(data=data)
    wake = asyncio.Event()
    app = create_app(
        store=store, engine=engine, config=config, learning=True, ready=lambda: (True, ""), wake_judge=wake.set
    )
    listener = bind("127.0.0.1", 0)
    served = Served(f"127.0.0.1:{listener.getsockname()[1]}", engine, store)
    app.add_middleware(Recorder, seen=served.requests, anonymous=anonymous)
    endpoint = judge_endpoint(bad=CORRECTION, good=THANKS)
    judge = SampledJudge(base_url="http://judge.invalid/v1", model="scripted", votes=1, transport=endpoint)
    loops = [
        asyncio.create_task(serve_http(app, listener)),
        asyncio.create_task(judge_loop(store, EvidenceFirst(judge), config.judge, wake)),
    ]
    try:
        yield served
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        await judge.aclose()


def main_line(turns: list[StoredTurn]) -> list[StoredTurn]:
    """Without the work on the side."""
    return [turn for turn in turns if turn.kind != "side"]


def outline(turns: list[StoredTurn]) -> list[str]:
    """Each turn's kind and the place of its parent in the list, as in 'continuation of 2'; the first one is 1."""
    places = {turn.turn_id: n for n, turn in enumerate(turns, 1)}
    return [turn.kind + (f" of {places[turn.parent]}" if turn.parent is not None else "") for turn in turns]


def is_sample(turn: StoredTurn, value: Vote) -> bool:
    """Whether a turn got this verdict and now waits for an update."""
    return turn.state == TurnState.JUDGED and turn.verdict is not None and turn.verdict.value is value
