"""What the tests of the client libraries share: a program that keeps a conversation and runs one tool by itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Protocol

import pytest

from nextstate.types import SkipReason, Vote
from tests.clients.pages import block
from tests.clients.scripted import call
from tests.clients.served import Served, is_sample, names_session, outline
from tests.clients.story import (
    CHANGE,
    CORRECTION,
    DONE,
    GREETING,
    REDONE,
    TALE,
    TASK,
    THANKS,
    THREE_LINES,
    TWO_LINES,
    script,
    too_long,
)

WRITE = {
    "name": "write_file",
    "description": "Write a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
}

SCRIPT = script(
    call("write_file", path="notes.txt", text=TWO_LINES), call("write_file", path="notes.txt", text=THREE_LINES)
)

WROTE = ("tool", '{"exit_code": 0}')


def write_file(folder: Path, arguments: str) -> str:
    given = json.loads(arguments)
    (folder / given["path"]).write_text(given["text"])
    return json.dumps({"exit_code": 0})


def client_of(served: Served, page: str) -> Any:
    names: dict[str, Any] = {}
    exec(served.configured(block(page, "python")), names)
    return names["client"]


class Talk(Protocol):
    """A conversation."""

    def say(self, text: str) -> str:
        """The user says something; what the policy answers when all its tools have run."""
        ...

    def leave(self, text: str) -> None:
        """Ask, and close the stream after a few words of the answer, which nothing is kept of."""
        ...


async def tell(talk: Talk, served: Served, folder: Path, refused: type[Exception]) -> Any:
    """The story from beginning to end, and what the store makes of it; the error about the message that is too long."""
    served.policy.script = SCRIPT
    await asyncio.to_thread(talk.say, GREETING)
    assert await asyncio.to_thread(talk.say, TASK) == DONE
    assert (folder / "notes.txt").read_text() == TWO_LINES
    assert await asyncio.to_thread(talk.say, CORRECTION) == REDONE
    assert (folder / "notes.txt").read_text() == THREE_LINES
    await asyncio.to_thread(talk.say, THANKS)
    await asyncio.to_thread(talk.leave, TALE)
    await asyncio.to_thread(talk.say, CHANGE)
    with pytest.raises(refused, match=r"context|too long") as caught:
        await asyncio.to_thread(talk.say, too_long(150_000))

    assert not any(names_session(name) for request in served.requests for name in request.headers)
    assert {request.status for request in served.requests} == {200, 400}
    turns = await served.turns()
    assert len({turn.session for turn in turns}) == 1
    assert outline(turns) == [
        "new",
        "continuation of 1",
        "continuation of 2",
        "continuation of 3",
        "continuation of 4",
        "continuation of 5",
        "continuation of 6",
        "branch of 6",
    ]
    assert [turn.followed for turn in turns] == [
        [("user", TASK)],
        [WROTE],
        [("user", CORRECTION)],
        [WROTE],
        [("user", THANKS)],
        [("user", TALE)],
        [],
        [],
    ]
    assert is_sample(turns[2], Vote.BAD)
    assert turns[2].verdict is not None
    assert turns[2].verdict.hints == ("I wanted three lines, the last one gamma.",)
    assert is_sample(turns[4], Vote.GOOD)
    assert [turn.reason for turn in turns if turn.state == "left_out"] == [
        SkipReason.NEUTRAL, SkipReason.NEUTRAL, SkipReason.ABORTED
    ]  # fmt: skip
    return caught.value
