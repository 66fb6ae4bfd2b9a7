"""opencode, one process for every message of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.agent import check, tell
from tests.clients.children import Place, make_place
from tests.clients.installed import OPENCODE
from tests.clients.pages import block
from tests.clients.scripted import call
from tests.clients.served import Served
from tests.clients.story import GREETING, script


@pytest.fixture
def place(served: Served, tmp_path: Path) -> Place:
    place = make_place(tmp_path, OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_MODELS_FETCH="1")
    config = place.home / ".config" / "opencode" / "opencode.json"
    config.parent.mkdir(parents=True)
    config.write_text(served.configured(block("opencode", "json")))
    return place


def command(text: str, resumes: bool) -> Sequence[str | Path]:
    return [OPENCODE.path, "run", *(("--continue",) if resumes else ()), *text.split(" ")]


async def test_a_session(served: Served, place: Place):
    served.policy.script = script(
        call("bash", command="printf 'alpha\\nbeta\\n' > notes.txt", description="Write notes"),
        call("bash", command="printf 'alpha\\nbeta\\ngamma\\n' > notes.txt", description="Write notes"),
    )
    refused = await tell(served, place, command)
    assert refused.status != 0
    assert "This model's maximum context length is 131072 tokens." in refused.output

    turns = await served.turns()
    check(turns, wrote="(no output)")
    # A title at the beginning, a summary when the prompt was too long; that of the longest message is too long itself.
    titled, summarised = (turn for turn in turns if turn.kind == "side")
    assert titled.asked == GREETING
    assert summarised.asked.startswith("Here is the conversation so far:")
    assert [request.status for request in served.requests].count(400) == 3
    assert {request.status for request in served.requests} == {200, 400}
    assert titled.session == turns[-1].session
