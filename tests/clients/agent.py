"""The story as it is told to agents that run once for every message of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nextstate.types import SkipReason, TurnState, Vote
from tests.clients.children import TIME_LIMIT_S, Place, Ran, run, started
from tests.clients.served import Served, StoredTurn, is_sample, main_line, outline
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
    too_long,
)

Command = Callable[[str, bool], Sequence[str | Path]]
"""Of a message, and whether it goes on with the session before."""


async def tell(served: Served, place: Place, command: Command) -> Ran:
    """The story from beginning to end; how the message that is too long ended."""

    async def say(text: str, *answers: str) -> None:
        ran = await run(command(text, text != GREETING), place)
        assert ran.status == 0, ran.output
        assert all(answer in ran.output for answer in answers), ran.output

    notes = place.work / "notes.txt"
    await say(GREETING, "I am the policy, at your service.")
    await say(TASK, DONE)
    assert notes.read_text() == TWO_LINES
    await say(CORRECTION, REDONE)
    assert notes.read_text() == THREE_LINES
    await say(THANKS, "I am glad to hear that.")
    async with started(command(TALE, True), place) as child:
        await served.policy.tells_without_end(TIME_LIMIT_S)
        child.interrupt()
        await child.ended(20)
    await say(CHANGE, "Goodbye, and good luck.")
    return await run(command(too_long(130_000), True), place)


def check(turns: list[StoredTurn], *, wrote: str, after_abort: str = "continuation of 6") -> None:
    """The session in the store, the work on the side apart.

    Args:
        wrote: what the client's tool says when it has written a file.
        after_abort: the place of the request after the one that was aborted; it follows the same answer as that one.
    """
    assert {turn.reason for turn in turns if turn.kind == "side"} <= {SkipReason.SIDE_REQUEST}
    turns = main_line(turns)
    assert len({turn.session for turn in turns}) == 1
    assert outline(turns) == ["new", *(f"continuation of {n}" for n in range(1, 7)), after_abort]
    assert [turn.followed for n, turn in enumerate(turns) if n not in (1, 3)] == [
        [("user", TASK)],
        [("user", CORRECTION)],
        [("user", THANKS)],
        [("user", TALE)],
        [],
        [],
    ]
    for turn in (turns[1], turns[3]):
        assert [role for role, _ in turn.followed] == ["tool"]
        assert wrote in turn.followed[0][1]
    corrected, liked, aborted = turns[2], turns[4], turns[6]
    assert is_sample(corrected, Vote.BAD)
    assert corrected.verdict is not None
    assert corrected.verdict.hints == ("I wanted three lines, the last one gamma.",)
    assert is_sample(liked, Vote.GOOD)
    assert (aborted.state, aborted.reason) == (TurnState.LEFT_OUT, SkipReason.ABORTED)
