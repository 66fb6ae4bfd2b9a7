"""Forgetting while a server runs on the same store."""

from __future__ import annotations

from pathlib import Path

from nextstate.store import forgetting, status
from nextstate.store.store import Store

SECRET = "xylophone-42"


async def test_a_session_is_forgotten_under_a_running_server_and_goes_on_as_a_new_one(server, tmp_path: Path):
    messages = [{"role": "user", "content": f"the word is {SECRET}"}]
    first = await server.client.chat.completions.create(model="policy", messages=messages, max_tokens=8, user="ann")
    row = (await server.turns())[0]
    other = Store.open(f"sqlite:///{tmp_path / 'nextstate.db'}")
    other.write_now(forgetting.forget, other.read_now(forgetting.choose_session, row.session))
    assert other.scrub()
    other.close()
    assert not any(SECRET.encode() in file.read_bytes() for file in tmp_path.glob("nextstate.db*"))
    assert (await server.http.get("/v1/responses/resp_1")).status_code == 404
    reply = {"role": "assistant", "content": first.choices[0].message.content or ""}
    again = [*messages, reply, {"role": "user", "content": "and what else?"}]
    await server.client.chat.completions.create(model="policy", messages=again, max_tokens=8, user="ann")
    gone, new = await server.turns()
    assert (gone.reason, gone.user) == ("forgotten", forgetting.NOBODY)
    assert (new.kind, new.parent_turn_id) == ("new", None)
    assert (await server.store.read(status.status)).accounted_for
    late = await server.http.post("/v1/feedback", json={"turn_id": gone.turn_id, "value": "good", "words": SECRET})
    assert late.status_code == 404
