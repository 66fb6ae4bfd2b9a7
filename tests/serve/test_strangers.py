"""What a page in a browser, or a careless client, may not do."""

from __future__ import annotations

import json

import pytest
from tests.conftest import RunningServer

CHAT = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "a fox?"}], "max_tokens": 2})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
async def test_a_body_that_is_not_called_json_is_refused_with_what_to_send(
    server: RunningServer, path: str, kind: str | None
):
    answer = await server.http.post(path, content=CHAT, headers={"content-type": kind} if kind else {})
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["error"]["message"]
    assert await server.turns() == []


@pytest.mark.parametrize("header", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
async def test_without_a_key_a_page_from_elsewhere_is_refused(server: RunningServer, header: dict[str, str]):
    answer = await server.http.post(
        "/v1/chat/completions", content=CHAT, headers={"content-type": "application/json", **header}
    )
    assert answer.status_code == 403
    assert "evil.example" in answer.json()["error"]["message"]
    assert await server.turns() == []


@pytest.mark.parametrize("header", [{"host": "localhost:1"}, {"origin": "http://127.0.0.1:3000"}, {"host": "[::1]:80"}])
async def test_loopback_by_any_of_its_names_is_served(server: RunningServer, header: dict[str, str]):
    answer = await server.http.post(
        "/v1/chat/completions", content=CHAT, headers={"content-type": "application/json; charset=utf-8", **header}
    )
    assert answer.status_code == 200


async def test_a_message_of_nothing_is_refused(server: RunningServer):
    body = {"messages": [{"role": "user", "content": None}]}
    answer = await server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "content" in answer.json()["error"]["message"]
