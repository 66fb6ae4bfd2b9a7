from __future__ import annotations

import openai
import pytest

from nextstate.config import ServeConfig
from nextstate.errors import ConfigError
from nextstate.serve.auth import check_bind

HI = [{"role": "user", "content": "Hi"}]


async def test_readiness_comes_with_a_sentence(start_server):
    state = (False, "loading version 3")
    async with start_server(ready=lambda: state) as server:
        waiting = await server.http.get("/readyz")
        assert (waiting.status_code, waiting.text) == (503, "loading version 3\n")
        assert (await server.http.get("/healthz")).json() == {"status": "ok"}
        state = (True, "ready")
        assert (await server.http.get("/readyz")).status_code == 200


async def test_metrics_count_requests_turns_and_tokens(server):
    answer = await server.client.chat.completions.create(model="policy", messages=HI, max_tokens=30, temperature=0)
    await server.http.get("/no/such/page")
    page = (await server.http.get("/metrics")).text
    tokens = answer.usage.completion_tokens
    for line in (
        'nextstate_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'nextstate_requests_total{route="other",status="404"} 1.0',
        'nextstate_turns{reason="sampling_not_reproducible",state="left_out"} 1.0',
        'nextstate_placements_total{kind="new"} 1.0',
        "nextstate_policy_version 0.0",
        f"nextstate_reply_tokens_total {tokens}.0",
        "nextstate_first_token_seconds_count 1.0",
        f"nextstate_between_tokens_seconds_count {tokens - 1}.0",
        "nextstate_engine_running 0.0",
        "nextstate_engine_waiting 0.0",
        'nextstate_oldest_waiting_seconds{reason="waits_for_judge"} 0.0',
        "nextstate_turns_since_verdict 1.0",
        "nextstate_watch_e_value 1.0",
    ):
        assert f"\n{line}\n" in page


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/feedback", 405)])
async def test_errors_have_the_shape_that_clients_expect(server, method, path, status):
    response = await server.http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert path in response.json()["error"]["message"]


@pytest.mark.parametrize("says_its_length", [True, False])
async def test_a_body_above_the_limit_is_refused(start_server, says_its_length):
    async def in_pieces():
        for _ in range(4):
            yield b" " * 500

    async with start_server(serve={"max_body_bytes": 1000}) as server:
        content = b" " * 2000 if says_its_length else in_pieces()
        headers = {"content-type": "application/json"}
        response = await server.http.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert "1000" in response.json()["error"]["message"]


@pytest.mark.parametrize("headers", [{"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}])
async def test_the_key_opens_the_server_in_both_ways_of_sending_it(start_server, headers):
    async with start_server(serve={"api_key": "s3cret"}) as server:
        assert (await server.http.get("/metrics", headers=headers)).status_code == 200


@pytest.mark.parametrize("key", ["wrong", "s3cret2", "ключ"])
async def test_without_the_key_nothing_is_answered_but_probes_and_the_list_of_models(start_server, key):
    async with start_server(serve={"api_key": "s3cret"}, key="wrong") as server:
        with pytest.raises(openai.AuthenticationError) as refused:
            await server.client.chat.completions.create(model="policy", messages=HI)
        assert refused.value.code == "invalid_api_key"
        headers = {"authorization": f"Bearer {key}".encode()}
        for path, status in (
            ("/metrics", 401),
            ("/v1/nowhere", 401),
            ("/healthz", 200),
            ("/readyz", 200),
            ("/v1/models", 200),
        ):
            assert (await server.http.get(path, headers=headers)).status_code == status
        assert await server.turns() == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_other_machines_are_not_served_without_a_key(host):
    with pytest.raises(ConfigError, match="NEXTSTATE_SERVE__API_KEY"):
        check_bind(ServeConfig(host=host), stored_key=False)
    check_bind(ServeConfig(host=host, api_key="s3cret"), stored_key=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_is_served_without_a_key(host):
    check_bind(ServeConfig(host=host), stored_key=False)


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        check_bind(ServeConfig(api_key=""), stored_key=True)
