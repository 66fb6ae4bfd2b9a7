"""Recorded traffic of real clients against labels written by hand.

`traffic/` holds what clients sent to a scripted server, with system prompts and tools shortened; `labels/` says of each
request where it belongs, from reading it: the same session label for the requests of one conversation, the kind, the
request whose answer it continues, and what it says about that answer ("…" stands for the rest).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nextstate.collect.replay import Recorded, Replayed, read_recording, replay_requests, without_names

HERE = Path(__file__).parent
RECORDINGS = sorted(path.stem for path in (HERE / "traffic").glob("*.jsonl"))


def labels(name: str) -> list[dict]:
    return [json.loads(line) for line in (HERE / "labels" / f"{name}.jsonl").read_text().splitlines()]


def as_recorded(recording: list[Recorded]) -> list[Recorded]:
    return recording


def without_ids(recording: list[Recorded]) -> list[Recorded]:
    return [without_names(request) for request in recording]


def bare(recording: list[Recorded]) -> list[Recorded]:
    """Without ids, and without the line in which OpenClaw names its session inside its messages."""

    def strip(value):
        if isinstance(value, str):
            return re.sub(r"\s*Runtime: agent=[^\n]*\Z", "", value)
        if isinstance(value, dict):
            return {key: strip(inner) for key, inner in value.items()}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    return [replace(request, body=strip(request.body)) for request in without_ids(recording)]


def mistakes(rows: list[Replayed], name: str) -> dict[str, list[str]]:
    """Requests that were placed otherwise than labelled, by what is wrong."""
    wrong: dict[str, list[str]] = {"session": [], "kind": [], "parent": [], "next_state": []}
    told = labels(name)
    assert [row.seq for row in rows] == [label["seq"] for label in told]
    ours: dict[str | None, str | None] = {}
    theirs: dict[str | None, str | None] = {}
    for row, label in zip(rows, told, strict=True):
        where = f"{name} {row.seq}: {row}, not {label}"
        session = label["session"]
        if ours.setdefault(session, row.session) != row.session or theirs.setdefault(row.session, session) != session:
            wrong["session"].append(where)
        if row.kind != label["kind"]:
            wrong["kind"].append(where)
        if row.parent != label["parent"]:
            wrong["parent"].append(where)
        texts = [message["text"] for message in row.next_state]
        if len(texts) != len(label["next_state"]) or not all(map(_matches, texts, label["next_state"])):
            wrong["next_state"].append(where)
    return wrong


def _matches(text: str, label: str) -> bool:
    return text.startswith(label[:-1]) if label.endswith("…") else text == label


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_recorded_request_is_where_it_belongs(name: str):
    rows = replay_requests(read_recording(HERE / "traffic" / f"{name}.jsonl"))
    assert mistakes(rows, name) == {"session": [], "kind": [], "parent": [], "next_state": []}


@pytest.mark.parametrize("names", [without_ids, bare])
def test_without_ids_at_least_99_of_100_are_where_they_belong(names):
    wrong: dict[str, list[str]] = {"session": [], "kind": [], "parent": [], "next_state": []}
    requests = 0
    for name in RECORDINGS:
        rows = replay_requests(names(read_recording(HERE / "traffic" / f"{name}.jsonl")))
        requests += len(rows)
        for what, where in mistakes(rows, name).items():
            wrong[what] += where
    assert requests >= 140
    for what, where in wrong.items():
        share = 1 - len(where) / requests
        print(f"{names.__name__}: {what} right in {share:.1%} of {requests} requests")
        assert share >= 0.99, "\n".join([what, *where])
