"""mini-swe-agent at a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from nextstate.types import SkipReason, TurnState, Vote
from tests.clients.children import TIME_LIMIT_S, Place, make_place, run, started
from tests.clients.installed import MINI
from tests.clients.pages import block, exports
from tests.clients.scripted import ENDLESS, call
from tests.clients.served import Served, is_sample, names_session, outline
from tests.clients.story import CHANGE, CORRECTION, TALE, TASK, THREE_LINES, TWO_LINES, too_long

pytestmark = pytest.mark.parametrize("anonymous", [False])

SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")

WROTE = ("tool", '{\n  "returncode": 0,\n  "output": ""\n}')
NOT_RUN = ("tool", '{\n  "returncode": -1,\n  "output": "", "exception_info": "action was not executed"\n}')

SCRIPT = {
    TASK: [call("bash", command=f"printf {shlex.quote(TWO_LINES)} > notes.txt"), "I think that it is done."],
    "Tool call error": [SUBMIT],
    CORRECTION: [call("bash", command=f"printf {shlex.quote(THREE_LINES)} > notes.txt"), SUBMIT],
    TALE: [ENDLESS],
    CHANGE: [SUBMIT],
}


@pytest.fixture
def place(served: Served, tmp_path: Path) -> Place:
    return make_place(tmp_path, **exports("mini-swe-agent", served.address))


def command(*options: str) -> Sequence[str | Path]:
    """What the page says, with more options."""
    program, *documented = block("mini-swe-agent", "sh").splitlines()[-1].split()
    assert program == "mini"
    return [MINI.path, *documented, *options]


async def test_a_task_a_correction_an_abort_and_an_overflow(served: Served, place: Place):
    served.policy.script = SCRIPT
    async with started(command("--yolo", "--task", TASK), place, terminal=True) as mini:
        await mini.until("Agent wants to finish.")
        assert (place.work / "notes.txt").read_text() == TWO_LINES
        mini.type(f"{CORRECTION}\r")
        await mini.until("Agent wants to finish.")
        assert (place.work / "notes.txt").read_text() == THREE_LINES
        mini.type(f"{TALE}\r")
        await served.policy.tells_without_end(TIME_LIMIT_S)
        mini.interrupt()
        await mini.until("Interrupted.")
        mini.type(f"{CHANGE}\r")
        await mini.until("Agent wants to finish.")
        mini.type("\r")
        assert (await mini.ended()).status == 0
    refused = await run(command("--yolo", "--exit-immediately", "--task", too_long(130_000)), place)
    assert "ContextWindowExceededError" in refused.output
    assert refused.status != 0
    assert [request.status for request in served.requests].count(400) == 1

    assert {request.status for request in served.requests} == {200, 400, 499}  # 499: aborted
    assert not any(names_session(name) for request in served.requests for name in request.headers)

    turns = await served.turns()
    assert len({turn.session for turn in turns}) == 1
    assert outline(turns) == [
        "new",
        "continuation of 1",
        "continuation of 2",  # whose answer mini left out of its history, since it had no call
        "continuation of 3",
        "continuation of 4",
        "continuation of 5",
        "continuation of 5",  # 6 was aborted
    ]
    assert [turn.followed for n, turn in enumerate(turns) if n != 1] == [
        [WROTE],
        [NOT_RUN, ("user", CORRECTION)],
        [WROTE],
        [NOT_RUN, ("user", TALE)],
        [],
        [],
    ]
    ((role, text),) = turns[1].followed
    assert role == "system"  # a program speaks, though in the user's place
    assert text.startswith("Tool call error:")
    assert is_sample(turns[0], Vote.GOOD)  # status 0
    assert is_sample(turns[2], Vote.BAD)
    assert turns[2].verdict is not None
    assert turns[2].verdict.hints == ("I wanted three lines, the last one gamma.",)
    assert is_sample(turns[3], Vote.GOOD)
    reasons = [turn.reason for turn in turns if turn.state == TurnState.LEFT_OUT]
    assert reasons == [SkipReason.ABSTAINED, SkipReason.NEUTRAL, SkipReason.ABORTED]
