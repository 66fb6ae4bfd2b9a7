"""codex, one process for every message of the user's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from nextstate.types import Vote
from tests.clients.agent import check, tell
from tests.clients.children import Place, make_place
from tests.clients.installed import CODEX
from tests.clients.pages import block, exports
from tests.clients.scripted import call
from tests.clients.served import Served, is_sample
from tests.clients.story import THREE_LINES, TWO_LINES, script


@pytest.fixture
def place(served: Served, tmp_path: Path) -> Place:
    place = make_place(tmp_path, **exports("codex", served.address))
    config = place.home / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(served.configured(block("codex", "toml")))
    return place


def command(text: str, resumes: bool) -> Sequence[str | Path]:
    # The sandbox needs what containers do not have.
    anywhere = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [CODEX.path, "exec", *anywhere, *(("resume", "--last") if resumes else ()), text]


async def test_a_session(served: Served, place: Place):
    served.policy.script = script(
        call("exec_command", cmd=f"printf {shlex.quote(TWO_LINES)} > notes.txt"),
        call("exec_command", cmd=f"printf {shlex.quote(THREE_LINES)} > notes.txt"),
    )
    refused = await tell(served, place, command)
    assert refused.status != 0
    assert "ran out of room in the model's context window" in refused.output
    turns = await served.turns()
    check(turns, wrote="Process exited with code 0")
    assert is_sample(turns[1], Vote.GOOD)
    assert is_sample(turns[3], Vote.GOOD)
    assert {(request.path, request.status) for request in served.requests} == {
        ("/v1/responses", 200),
        ("/v1/responses", 400),
    }
