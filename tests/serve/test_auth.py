"""Who may ask, whose conversations are whose, and who is never learned from."""

from __future__ import annotations

import itertools
import logging

import httpx
import pytest
from tests.conftest import RunningServer, ServerFactory

from nextstate.config import Config, ServeConfig
from nextstate.errors import ConfigError
from nextstate.serve import auth
from nextstate.serve.auth import OPERATOR, Caller, check_bind, has_key, learns, owner, owns
from nextstate.serve.errors import ApiError
from nextstate.store.keys import add_key, list_keys, revoke_key
from nextstate.store.store import Store

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "a fox?"}], "max_tokens": 2}
NOT_LEARNED = Caller(user="ann", learn=False, key_name="laptop")


def key_for(store: Store, name: str, user: str | None = None, learn: bool = True) -> dict[str, str]:
    """The headers of somebody with a new key."""
    return {"x-api-key": store.write_now(add_key, name, user or name, learn=learn)}


async def status(server: RunningServer, headers: dict[str, str], path: str = "/metrics") -> int:
    return (await server.http.get(path, headers=headers)).status_code


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are read anew for each request."""
    monkeypatch.setattr(auth, "_FRESH_S", -1.0)


# -- in or not ---------------------------------------------------------------------------------------------------------


async def test_a_stored_key_opens_the_server_in_both_ways_of_sending_it(store: Store, start_server: ServerFactory):
    key = key_for(store, "laptop")["x-api-key"]
    async with start_server() as server:
        for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}):
            assert await status(server, headers) == 200
        assert await status(server, {"authorization": "Bearer none", "x-api-key": key}) == 200
        for headers in ({}, {"x-api-key": key[:-1]}, {"authorization": f"Basic {key}"}, {"authorization": key}):
            assert await status(server, headers) == 401
        for path in (*auth.OPEN_PATHS, "/v1/models/policy"):
            assert await status(server, {}, path) == 200


async def test_the_configured_key_and_stored_keys_both_open(store: Store, start_server: ServerFactory):
    stored = key_for(store, "laptop")
    async with start_server(serve={"api_key": "s3cret-ключ"}) as server:
        assert await status(server, stored) == 200
        configured = await server.http.get("/metrics", headers={"x-api-key": "s3cret-ключ".encode()})
        assert configured.status_code == 200
        assert await status(server, {"x-api-key": "s3cret"}) == 401


@pytest.mark.usefixtures("at_once")
async def test_keys_count_while_the_server_runs_and_revoking_the_last_one_lets_nobody_in(
    store: Store, start_server: ServerFactory
):
    other = Store.open(str(store._engine.url))  # as another process has it
    async with start_server() as server:
        assert await status(server, {}) == 200
        one = key_for(other, "one")
        assert (await status(server, {}), await status(server, one)) == (401, 200)
        other.write_now(revoke_key, "one")
        assert (await status(server, {}), await status(server, one)) == (401, 401)
        assert await status(server, key_for(other, "two")) == 200
    other.close()


async def test_a_revoked_key_opens_nothing_a_second_later(store: Store, start_server: ServerFactory):
    assert auth._FRESH_S <= 1.0
    one, _ = key_for(store, "one"), key_for(store, "two")
    now = 100.0
    keys = auth._Keys(store, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextstate.serve.auth.time.monotonic", lambda: now)
        headers = httpx.Headers(one)
        assert await keys.find(headers) is not None
        store.write_now(revoke_key, "one")
        now += 1.0
        assert await keys.find(headers) is None


async def test_an_address_that_others_reach_needs_a_key_though_the_folder_has_lost_its_keys(
    start_server: ServerFactory,
):
    # check_bind refuses to start such a server; this is the second lock on that door.
    async with start_server(serve={"host": "0.0.0.0"}) as server:
        assert await status(server, {}) == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropic_clients_get_a_refusal_in_their_shape(start_server: ServerFactory, path: str):
    async with start_server(serve={"api_key": "s3cret", "max_body_bytes": 1000}) as server:
        refused = await server.http.post(path, json={})
        assert refused.status_code == 401
        error = refused.json()["error"]
        assert refused.json() == {"type": "error", "error": error}
        assert (set(error), error["type"]) == ({"type", "message"}, "authentication_error")
        large = await server.http.post(path, json={"x": "x" * 1000}, headers={"x-api-key": "s3cret"})
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


async def test_other_clients_get_a_refusal_in_openais_shape(start_server: ServerFactory):
    async with start_server(serve={"api_key": "s3cret"}) as server:
        refused = await server.http.post("/v1/messagesx", json={})
        assert refused.headers["www-authenticate"] == "Bearer"
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)


async def test_the_last_use_of_a_key_is_known(store: Store, start_server: ServerFactory):
    headers = key_for(store, "laptop")
    key_for(store, "phone")
    async with start_server() as server:
        await status(server, headers)
        first = [key.used_at for key in store.read_now(list_keys)]
        assert first[0] is not None
        assert first[1] is None
        await status(server, headers)
        assert [key.used_at for key in store.read_now(list_keys)] == first  # to the minute, not to the request


def test_a_stored_key_is_as_good_as_a_configured_one_for_other_addresses(store: Store, tmp_path):
    settings = Config(data=tmp_path)
    assert not has_key(settings.data, settings.database_url)
    store.write_now(add_key, "laptop", "ann", learn=True)
    assert has_key(settings.data, settings.database_url)
    check_bind(ServeConfig(host="0.0.0.0"), stored_key=True)
    store.write_now(revoke_key, "laptop")
    assert not has_key(settings.data, settings.database_url)
    with pytest.raises(ConfigError, match="nextstate keys add"):
        check_bind(ServeConfig(host="0.0.0.0"), stored_key=False)


def test_looking_for_keys_makes_no_folder(tmp_path):
    settings = Config(data=tmp_path / "none")
    assert not has_key(settings.data, settings.database_url)
    assert not settings.data.exists()


# -- whose conversations -----------------------------------------------------------------------------------------------


def test_no_two_pairs_of_users_have_the_same_conversations():
    users = ["", "a", "b", "a/b", "/", "a/", "/b", "%", "%2F", "a%2Fb", "a%", "2Fb"]
    made = {(key, body): owner(Caller(user=key, learn=True, key_name="k"), body) for key in users for body in users}
    assert len(set(made.values())) == len(made)
    for (key, _), made_owner in made.items():
        for other in users:
            assert owns(Caller(user=other, learn=True, key_name="k"), made_owner) == (other == key)


def test_an_owner_can_be_read():
    ann = Caller(user="ann", learn=True, key_name="laptop")
    assert owner(OPERATOR, None) == owner(OPERATOR, "") == ""
    assert owner(OPERATOR, "bob") == "/bob"
    assert (owner(ann, None), owner(ann, "b/c")) == ("ann", "ann/b/c")


# -- never learned from ------------------------------------------------------------------------------------------------


def test_off_wins_over_on_whoever_says_it():
    by_header = {None: {}, True: {"x-nextstate-learn": "On"}, False: {"x-nextstate-learn": " OFF"}}
    for by_key, header, body in itertools.product((True, False), by_header, (None, True, False)):
        who = OPERATOR if by_key else NOT_LEARNED
        expected = by_key and header is not False and body is not False
        assert learns(who, by_header[header], body) == expected


@pytest.mark.parametrize("said", ["", "of", "false", "0", "on, off"])
def test_a_learn_header_that_says_neither_is_refused(said: str):
    with pytest.raises(ApiError, match="'on' or 'off'") as refused:
        learns(OPERATOR, {"x-nextstate-learn": said}, None)
    assert refused.value.status == 400


# -- secrets -----------------------------------------------------------------------------------------------------------


async def test_no_key_reaches_the_log_the_store_the_metrics_or_an_answer(
    store: Store, start_server: ServerFactory, tmp_path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    stored, configured, wrong = key_for(store, "laptop")["x-api-key"], "c0nfigured-secret", "ns-wr0ng-" + "x" * 37
    seen = []
    async with start_server(serve={"api_key": configured}) as server:
        for key in (stored, configured, wrong):
            for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}, {"authorization": key}):
                for body in (CHAT, {"messages": 5}, {**CHAT, "model": "none"}):
                    answer = await server.http.post("/v1/chat/completions", json=body, headers=headers)
                    seen.append(f"{answer.headers}{answer.text}")
                answer = await server.http.get("/nowhere", headers=headers)
                seen.append(f"{answer.headers}{answer.text}")
        assert (await server.turns()) != []
        seen.append((await server.http.get("/metrics", headers={"x-api-key": stored})).text)
    # The test's own client logs what it sends.
    log = "\n".join(f"{r.getMessage()} {r.exc_text}" for r in caplog.records if not r.name.startswith("http"))
    assert "wr0ng" not in log
    files = [path.read_bytes() for path in tmp_path.glob("nextstate.db*")]
    assert len(b"".join(files)) > 10_000
    for secret in (stored, stored[11:], configured, wrong):
        assert secret not in log
        assert not any(secret in text for text in seen)
        assert not any(secret.encode() in content for content in files)
