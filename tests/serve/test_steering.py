from __future__ import annotations

from nextstate.store.keys import add_key
from nextstate.store.steering import paused_since, resume_learning


async def test_the_owner_pauses_and_resumes_learning_and_everybody_sees_it(server):
    before = (await server.http.get("/v1/learning")).json()
    assert before == {"enabled": True, "paused": False, "paused_since": None}
    paused = (await server.http.post("/v1/learning", json={"paused": True})).json()
    assert paused["paused"]
    assert paused["paused_since"] == await server.store.read(paused_since)
    assert "nextstate_learning_paused 1.0" in (await server.http.get("/metrics")).text
    await server.store.write(resume_learning)
    assert (await server.http.get("/v1/learning")).json() == before
    assert "nextstate_learning_paused 0.0" in (await server.http.get("/metrics")).text


async def test_a_users_key_sees_a_pause_and_cannot_change_it(store, start_server):
    ann = {"x-api-key": store.write_now(add_key, "a", "ann", learn=True)}
    async with start_server() as server:
        refused = await server.http.post("/v1/learning", json={"paused": True}, headers=ann)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_the_owner")
        assert (await server.http.get("/v1/learning", headers=ann)).json()["paused"] is False


async def test_a_word_that_is_neither_true_nor_false_is_refused(server):
    response = await server.http.post("/v1/learning", json={"paused": "yes"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "paused")
