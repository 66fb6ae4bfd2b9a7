from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "operations"
NAME = re.compile(r"\bnextstate_\w+")
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
FILES = {file.name: file.read_text() for file in (FOLDER / "grafana.json", FOLDER / "alerts.yml", PAGE)}


@pytest.mark.parametrize("file", FILES)
async def test_every_metric_that_is_drawn_or_watched_exists(server, file: str):
    await server.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    page = (await server.http.get("/metrics")).text
    known = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    # Of these two there is nothing to say before the first verdict and the first update.
    known |= {"nextstate_last_verdict_timestamp_seconds", "nextstate_last_update_timestamp_seconds"}
    asked = {name.removesuffix("_bucket") for name in NAME.findall(FILES[file])}
    assert asked - known == set()
    if file == PAGE.name:
        assert {name for name in known if not name.endswith("_created")} == asked


def test_every_metric_of_the_loops_is_drawn():
    panels = json.loads(FILES["grafana.json"])["panels"]
    drawn = set(NAME.findall(" ".join(target["expr"] for panel in panels for target in panel["targets"])))
    loops = {"oldest_waiting_seconds", "last_update", "last_gate", "watch_e_value", "events_total"}
    assert {f"nextstate_{name}" for name in loops} <= drawn


def test_reasons_and_kinds_in_the_alerts_are_ones_that_exist():
    from nextstate.types import WaitReason

    reasons = set(re.findall(r'reason="(\w+)"', FILES["alerts.yml"]))
    assert reasons
    assert reasons <= set(WaitReason)
    written = " ".join(path.read_text() for path in Path("src/nextstate").rglob("*.py"))
    for kinds in re.findall(r'kind=~"([\w|]+)"', FILES["alerts.yml"]):
        for kind in kinds.split("|"):
            assert kind in written or kind.removeprefix("update_") in written
