"""OpenClaw, one process for every message of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nextstate.types import SkipReason
from tests.clients.agent import check, tell
from tests.clients.children import Place, make_place
from tests.clients.installed import NODE, OPENCLAW
from tests.clients.pages import block, exports
from tests.clients.scripted import call
from tests.clients.served import Served, names_session
from tests.clients.story import THREE_LINES, TWO_LINES, script

SUMMARIES = 4
"""Of two parts of the conversation, and again since what the policy says passes no check of theirs."""

pytestmark = pytest.mark.parametrize("anonymous", [False])


@pytest.fixture
def place(served: Served, tmp_path: Path) -> Place:
    place = make_place(tmp_path, **exports("openclaw", served.address))
    config = place.home / ".openclaw" / "openclaw.json"
    config.parent.mkdir(parents=True)
    config.write_text(served.configured(block("openclaw", "json")))
    return place


def command(text: str, resumes: bool) -> Sequence[str | Path]:
    return [NODE.path, OPENCLAW.path, "agent", "--local", "--session-id", "s1", "--message", text]


async def test_a_session(served: Served, place: Place):
    served.policy.script = script(
        call("write", path=str(place.work / "notes.txt"), content=TWO_LINES),
        call("write", path=str(place.work / "notes.txt"), content=THREE_LINES),
    )
    refused = await tell(served, place, command)
    assert refused.status != 0
    assert "Context overflow: prompt too large for the model." in refused.output

    turns = await served.turns()
    # OpenClaw keeps what was said before an abort, and sends it again as the beginning of the next message.
    check(turns, wrote="Successfully wrote", after_abort="branch of 6")
    # It tries to recover from the overflow by a summary.
    assert [turn.reason for turn in turns if turn.kind == "side"] == [SkipReason.SIDE_REQUEST] * SUMMARIES
    assert {request.body["model"] for request in served.requests} == {"policy", "policy-aux"}
    assert {request.status for request in served.requests} == {200, 400}
    named = {name for request in served.requests for name in request.headers if names_session(name)}
    assert named == {"traceparent"}  # new with every message of the user's
