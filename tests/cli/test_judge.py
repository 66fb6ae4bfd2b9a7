from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nextstate.cli.main import app


class _SaysBad(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        answer = {"choices": [{"message": {"content": "It is a complaint.\nHINT: none\nVERDICT: bad"}}]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _SaysBad)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def a_line(said: str, label: int, role: str = "user") -> str:
    row = {"request": "Sort it.", "response": "Done.", "next_state": [{"role": role, "content": said}], "label": label}
    return json.dumps({**row, "kind": "correction"})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [a_line("by age, please", -1), a_line("And who is next?", 0), a_line("exit code: 1", -1, "tool")]
    path.write_text("\n".join(lines))
    return path


def test_the_configured_endpoint_is_measured_behind_hard_evidence(endpoint: str, rows: Path):
    done = CliRunner().invoke(
        app, ["judge", "eval", str(rows), "--base-url", endpoint, "--judge-model", "big", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["judge"].startswith("sampled:big:")
    assert (found["rows"], found["by_evidence"], found["wrong_sign"], found["abstained"]) == (3, 1, 0.0, 0.0)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["confusion"]["neutral"] == {"good": 0, "neutral": 0, "bad": 1, "abstained": 0}
    assert found["calibration"] == {"error": pytest.approx(0.5), "rows": 2}  # sure of bad twice, right once
    assert found["seconds_per_vote"] > 0


def test_people_get_the_same_figures_as_tables(endpoint: str, rows: Path):
    done = CliRunner().invoke(app, ["judge", "eval", str(rows), "--base-url", endpoint], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    for text in ("macro-F1", "0.667", "wrong sign on 0.0%", "calibration error 0.500, in 10 bins", "correction 1 of 3"):
        assert text in done.output


def test_a_bad_row_ends_the_command_before_anybody_is_asked(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(a_line("no", -1) + "\n" + a_line("no", 7))
    done = CliRunner().invoke(app, ["judge", "eval", str(path), "--base-url", "http://127.0.0.1:9/v1"])
    assert done.exit_code == 1
    assert "line 2: 'label' is 7" in done.output


def test_an_endpoint_that_is_not_there_ends_the_command_with_a_sentence(rows: Path):
    done = CliRunner().invoke(app, ["judge", "eval", str(rows), "--base-url", "http://127.0.0.1:9/v1"])
    assert done.exit_code == 1
    assert "cannot be reached" in done.output
