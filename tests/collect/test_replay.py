"""The command that replays recorded traffic, and what it says of files that are no recordings."""

from __future__ import annotations

import json
from hashlib import sha1
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.collect.replay import NOT_A_TURN, BadRecording, replay
from tests.collect.talk import says, user

RECORDED = Path(__file__).parent / "traffic"


def request(seq: int, messages: list | None = None, **fields) -> dict:
    line = {"type": "request", "seq": seq, "t": float(seq), "method": "POST", "path": "/v1/chat/completions"}
    return {**line, "headers": {}, "body": {"messages": messages or [user("Hi")]}, **fields}


def answered(seq: int, dt: float = 0.0, **response) -> list[dict]:
    return [
        {"type": "scripted_response", "seq": seq, "response": response},
        {"type": "event", "seq": seq, "event": "done", "dt": dt},
    ]


@pytest.fixture
def recording(tmp_path: Path):
    def write(*lines) -> Path:
        path = tmp_path / "recorded.jsonl"
        path.write_text("".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines))
        return path

    return write


def run(*arguments) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["traffic", "replay", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def test_json_is_an_object_a_request():
    code, out, _ = run(RECORDED / "openclaw_turns.jsonl", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, len(rows)) == (0, 8)
    assert list(rows[0]) == ["seq", "session", "kind", "parent", "next_state", "reason"]
    assert rows[1] == {
        "seq": 5,
        "session": "s1",
        "kind": "continuation",
        "parent": 4,
        "next_state": [{"role": "user", "text": "Write notes.txt with two lines and count them."}],
        "reason": "It repeats the conversation up to the answer of request 4 and adds to it.",
    }


def test_people_get_a_table():
    code, out, _ = run(RECORDED / "mini_swe_agent.jsonl", "--without-ids")
    assert code == 0
    assert "continuation" in out
    assert "next state" in out


def test_without_ids_names_are_taken_away(recording):
    path = recording(
        request(1, headers={"X-Session-Id": "a"}),
        *answered(1, text="Hello"),
        request(2, body={"session_id": "a", "messages": [user("Other")]}),
    )
    assert [row.session for row in replay(path)] == ["s1", "s1"]
    assert [row.session for row in replay(path, without_ids=True)] == ["s1", "s2"]


def test_requests_for_no_answer_are_no_turns(recording):
    path = recording(
        request(1, method="GET", path="/v1/models", body=None),
        request(2, method="HEAD", path="/", body=None),
        request(3, path="/v1/messages/count_tokens?beta=true"),
        request(4, path="/v1/messages?beta=true"),
        request(5, body="not json"),
    )
    assert [row.kind for row in replay(path)] == [NOT_A_TURN, NOT_A_TURN, NOT_A_TURN, "new", NOT_A_TURN]


def test_an_answer_is_there_only_when_it_has_ended(recording):
    more = [user("Hi"), says("Hello"), user("More")]
    path = recording(
        request(1), *answered(1, text="Hello"), request(2, more), *answered(2, dt=10, text="A"), request(3, more),
        *answered(3, text="A"), request(14, more),
    )  # fmt: skip
    assert [row.kind for row in replay(path)] == ["new", "continuation", "retry", "regeneration"]


@pytest.mark.parametrize(
    ("response", "event", "kind"),
    [
        ({"status": 503}, {}, "retry"),
        ({"drop": True}, {}, "retry"),
        ({"text": "Hel", "cut_after": 1}, {"event": "cut"}, "retry"),
        ({"text": "Hello"}, {"event": "client_disconnect"}, "retry"),
        ({"text": "Hello", "no_done": True}, {}, "new"),
        ({"status": 400}, {}, "new"),
    ],
)
def test_what_became_of_a_request_decides_about_the_next(recording, response, event, kind):
    happened = {"type": "event", "seq": 1, "event": "done", "dt": 0.1, **event}
    told = {"type": "scripted_response", "seq": 1, "response": response}
    rows = replay(recording(request(1), told, happened, request(2)))
    assert [row.kind for row in rows] == ["new", kind]


def test_the_same_text_cut_in_two_places_is_the_same(recording):
    whole = "x" * 900
    cut = f"{'x' * 50}…[trimmed 800 chars; full sha1 {sha1(whole.encode()).hexdigest()[:12]}]…{'x' * 50}"
    path = recording(request(1), *answered(1, text=whole), request(2, [user("Hi"), says(cut), user("More")]))
    assert replay(path)[1].parent == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{\n", "line 2: this is no JSON"),
        ("[1]\n", "line 2: a line must be a JSON object; got list"),
        ({"type": "request", "path": "/"}, "line 2: a line of type 'request' needs a whole number 'seq'; got None"),
        (request(1), "line 2: there is a request 1 already, in line 1"),
        ({"type": "event", "seq": 7}, "line 2: there is no request 7 before"),
        ({"type": "scripted_response", "seq": 1}, "line 2: a scripted_response needs an object 'response'"),
        (request(2, path=None), "line 2: a request needs a 'path'; got None"),
        (request(2, headers=[1]), "line 2: 'headers' must be an object or a list of pairs"),
        (request(2, body=[1]), "line 2: 'body' must be an object; got list"),
    ],
)
def test_a_line_that_is_no_recording_is_named(recording, line, what):
    path = recording(request(1), line)
    with pytest.raises(BadRecording) as refused:
        replay(path)
    assert what in str(refused.value)
    code, _, err = run(path)
    assert code == 1
    assert "Traceback" not in err


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    code, _, err = run(tmp_path / "none.jsonl")
    assert code == 1
    assert "none.jsonl cannot be read" in " ".join(err.split())


def test_half_a_character_is_no_obstacle(recording):
    rows = replay(recording(request(1, [user("a\ud800b \U0001f642")]), *answered(1, text="\udc00"), request(2)))
    assert [row.kind for row in rows] == ["new", "new"]


def test_other_lines_and_empty_ones_are_passed_over(recording):
    rows = replay(recording({"type": "meta", "client": "x"}, "\n", {"no": "type"}, request(1)))
    assert [row.seq for row in rows] == [1]


@pytest.mark.parametrize("lines", [(), ("\n",), ({"type": "meta"},)])
def test_a_file_without_requests_is_named(recording, lines):
    path = recording(*lines)
    code, out, err = run(path, "--json")
    assert (code, out) == (1, "")
    assert "holds no request, so there is nothing to place" in " ".join(err.split())


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/chat/completions", {"messages": "Hi"}, "'messages' must be a list; got str."),
        ("/v1/chat/completions", {}, "'messages' must be a list; got nothing."),
        ("/v1/messages", {"messages": ["Hi"]}, "each of 'messages' must be an object; got str."),
        ("/v1/chat/completions", {"messages": []}, "'messages' is empty."),
        ("/v1/messages", {"messages": [user("Hi"), says("He")]}, "'messages' ends with one of the assistant."),
        ("/v1/responses", {"input": 5}, "'input' must be a list or a text; got int."),
        (
            "/v1/chat/completions",
            {"messages": [user([{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "?"}])]},
            "'messages' holds part 'image_url'; it takes text only.",
        ),
    ],
)
def test_what_the_server_would_refuse_is_no_turn_and_says_why(recording, path: str, body: dict, why: str):
    (row,) = replay(recording(request(1, path=path, body=body), *answered(1, text="Hello")))
    assert (row.kind, row.session, row.reason) == (NOT_A_TURN, None, f"The server would refuse it: {why}")


def test_only_the_next_state_that_would_be_kept_is_shown(recording):
    after = [user("Hi"), says("Hello")]
    path = recording(
        request(1), *answered(1, text="Hello"),
        request(2, [*after, user("More")]), *answered(2, text="A"),
        request(3, [*after, user("Less")]), *answered(3, text="B"),
        request(4, [*after, user("None")], headers={}), *answered(4, status=400),
    )  # fmt: skip
    rows = replay(path)
    assert [(row.kind, row.parent) for row in rows] == [
        ("new", None),
        ("continuation", 1),
        ("branch", 1),
        ("branch", 1),
    ]
    assert [[message["text"] for message in row.next_state] for row in rows] == [[], ["More"], [], []]
