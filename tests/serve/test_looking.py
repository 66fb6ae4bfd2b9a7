from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunningServer, ServerFactory
from tests.rows import a_verdict, continued_turn, finished_turn, judged_turn, new_turn

from nextstate.store import judging, learning, turns
from nextstate.store.keys import add_key
from nextstate.store.store import Store
from nextstate.store.turns import Placement
from nextstate.types import Feedback, SkipReason, Vote

MINE = ""
"""The owner of whoever talks to a server without keys."""


def mine(**changes: Any) -> Any:
    return new_turn(user=MINE, **changes)


async def ask(server: RunningServer, path: str, **more: Any) -> Any:
    answer = await server.http.get(f"/api/{path}", **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_who_asks_and_whom_they_talk_to(server: RunningServer, store: Store):
    finished_turn(store, new=new_turn(user="/ann"))
    me = await ask(server, "me")
    assert (me["user"], me["key"], me["learned_from"], me["version"], me["users"]) == ("", None, True, 0, ["ann"])


async def test_sessions_are_titled_by_what_they_began_with_and_paged(server: RunningServer, store: Store):
    long = "Why? " * 40
    for text in ("first", "second", long):
        finished_turn(store, new=mine(messages=({"role": "system", "content": "x"}, {"role": "user", "content": text})))
    page = await ask(server, "sessions", params={"limit": 2})
    assert [one["title"] for one in page["sessions"]] == [f"{long[:79]}…", "second"]
    rest = await ask(server, "sessions", params={"limit": 2, "before": page["before"]})
    assert ([one["title"] for one in rest["sessions"]], rest["before"]) == (["first"], None)


async def test_sessions_of_one_user_of_a_key_are_asked_for_by_name(server: RunningServer, store: Store):
    finished_turn(store, new=new_turn(user="/ann"))
    assert (await ask(server, "sessions"))["sessions"] == []
    assert len((await ask(server, "sessions", params={"user": "ann"}))["sessions"]) == 1


async def test_a_session_is_shown_with_what_became_of_each_turn(server: RunningServer, store: Store):
    turn_id = judged_turn(store, Vote.BAD, new=mine())
    shown = await ask(server, "sessions/1")
    first, second = shown["turns"]
    assert (first["turn_id"], first["answer"], first["messages"][0]["content"]) == (turn_id, "the fox", "a fox?")
    assert first["outcome"]["tone"] == "waiting"
    assert first["outcome"]["headline"] == "waiting for an update"
    assert "learn.batch_turns" in first["outcome"]["explanation"]
    assert first["next_state"]["messages"] == [{"role": "user", "content": "too long"}]
    assert [(one["value"], one["votes"]) for one in first["verdicts"]] == [("bad", "1 bad")]
    assert [hint["text"] for hint in first["verdicts"][0]["hints"]] == ["be brief, please"]
    assert (second["parent_turn_id"], second["outcome"]["reason"]) == (turn_id, "being_answered")
    assert second["messages"] == [{"role": "user", "content": "too long"}]


async def test_a_session_is_paged_from_its_end(server: RunningServer, store: Store):
    place = Placement(session_id=None, session_key="s", parent_turn_id=None, kind="new", because="a test")
    ids = [finished_turn(store, new=mine(placement=place))]
    same = Placement(session_id=1, session_key="s", parent_turn_id=None, kind="branch", because="a test")
    ids += [finished_turn(store, new=mine(placement=same)) for _ in range(4)]
    page = await ask(server, "sessions/1", params={"limit": 3})
    assert [turn["turn_id"] for turn in page["turns"]] == ids[2:]
    rest = await ask(server, "sessions/1", params={"limit": 3, "before": page["before"]})
    assert ([turn["turn_id"] for turn in rest["turns"]], rest["before"]) == (ids[:2], None)


async def test_changes_are_told_once(server: RunningServer, store: Store):
    turn_id = continued_turn(store, new=mine())
    before = await ask(server, "sessions/1/changes")
    assert [(turn["turn_id"], turn["state"]) for turn in before["turns"]] == [
        (turn_id + 1, "generating"),
        (turn_id, "continued"),
    ]
    same = await ask(server, "sessions/1/changes", params={"seen": before["cursor"]})
    assert same == {"cursor": before["cursor"], "version": 0, "turns": None}
    store.write_now(judging.write_verdict, a_verdict(turn_id, Vote.NEUTRAL, hint=None))
    after = await ask(server, "sessions/1/changes", params={"seen": before["cursor"]})
    assert {"turn_id": turn_id, "state": "left_out", "reason": "neutral"} in after["turns"]
    assert (await ask(server, "sessions/1"))["cursor"] == after["cursor"]


@pytest.mark.parametrize(
    ("end", "tone", "headline"),
    [
        ("trained", "trained", "trained in version 1, which is being examined"),
        ("serving", "trained", "trained in version 1, which serves"),
        ("rejected", "left_out", "not trained: version rejected"),
        ("truncated", "left_out", "not trained: truncated"),
    ],
)
async def test_the_end_of_a_turn_is_said_in_a_few_words(
    server: RunningServer, store: Store, end: str, tone: str, headline: str
):
    turn_id = judged_turn(store, new=mine())
    if end == "truncated":
        store.write_now(turns.leave_out, [turn_id], SkipReason.TRUNCATED, "It was too long.")
    else:
        update_id = store.write_now(learning.start_update, limit=1)
        store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={"turns": 1})
    if end == "serving":
        store.write_now(learning.promote, 1, {})
    if end == "rejected":
        store.write_now(learning.reject, 1, "it drifted", {})
    shown = await ask(server, f"turns/{turn_id}")
    assert (shown["outcome"]["tone"], shown["outcome"]["headline"]) == (tone, headline)
    assert shown["version"] == (1 if tone == "trained" else None)


async def test_a_thumb_is_shown_with_its_turn(server: RunningServer, store: Store):
    turn_id = finished_turn(store, new=mine())
    await server.http.post("/v1/feedback", json={"turn_id": turn_id, "value": "bad", "words": "Be brief."})
    shown = await ask(server, f"turns/{turn_id}")
    assert shown["feedback"] == [{"value": "bad", "words": "Be brief."}]
    assert shown["conversation"] == [
        {"role": "user", "content": "a fox?"},
        {"role": "assistant", "content": "the fox"},
    ]


async def test_tokens_are_those_that_were_sampled_with_their_logprobs_and_versions(server: RunningServer):
    hi = [{"role": "user", "content": "Hi"}]
    answer = await server.client.chat.completions.create(model="policy", messages=hi, max_tokens=8, logprobs=True)
    told = answer.choices[0].model_dump()["logprobs"]["content"]
    shown = await ask(server, f"turns/{answer.id.removeprefix('chatcmpl-')}/tokens")
    assert [token["text"] for token in shown["tokens"]] == [token["token"] for token in told]
    for token, other in zip(shown["tokens"], told, strict=True):
        assert math.isclose(token["logprob"], other["logprob"], abs_tol=1e-6)
        assert token["version"] == 0


async def test_a_search_shows_the_words_in_their_surroundings(server: RunningServer, store: Store):
    text = f"{'before ' * 30}the Fox{' after' * 30}"
    turn_id = finished_turn(store, new=mine(), answer={"role": "assistant", "content": text})
    found = await ask(server, "search", params={"words": "the fox"})
    assert [(one["turn_id"], one["session_id"]) for one in found["turns"]] == [(turn_id, 1)]
    shown = found["turns"][0]["text"]
    assert shown.startswith("…")
    assert "before the Fox after" in shown
    assert shown.endswith("…")
    assert len(shown) < 140


async def test_the_learning_view_is_sent_again_only_when_something_has_changed(server: RunningServer, store: Store):
    turn_id = judged_turn(store, Vote.GOOD, new=mine())
    made = await ask(server, "learning")
    assert made["counts"]["waiting"] == {"waits_for_update": 1, "being_answered": 1}
    assert made["said"]["hits"] == made["said"]["total"] == 1
    assert made["chart"]["name"] == "svg"
    assert await ask(server, "learning", params={"seen": made["cursor"]}) == {"cursor": made["cursor"]}
    store.write_now(judging.add_feedback, turn_id, Feedback(value=Vote.BAD, words="no"))
    assert (await ask(server, "learning", params={"seen": made["cursor"]}))["said"]["hits"] == 0


async def test_a_version_is_shown_with_its_turns_and_history(server: RunningServer, store: Store):
    turn_id = judged_turn(store, Vote.BAD, new=mine())
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={"turns": 1})
    store.write_now(learning.promote, 1, {})
    shown = await ask(server, "versions/1")
    assert shown["turns"] == 1
    assert [(t["turn_id"], t["verdict"], t["asked"], t["answer"]) for t in shown["own_turns"]] == [
        (turn_id, "bad", "a fox?", "the fox")
    ]
    assert [one["kind"] for one in shown["history"]] == ["promoted"]


@pytest.mark.parametrize("number", ["99", str(2**70), "-1"])
@pytest.mark.parametrize("path", ["sessions/{}", "sessions/{}/changes", "turns/{}", "turns/{}/tokens", "versions/{}"])
async def test_what_is_not_there_is_a_404_by_its_name(server: RunningServer, path: str, number: str):
    answer = await server.http.get(f"/api/{path.format(number)}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"There is no {path.partition('s/')[0]} {number}."


@pytest.mark.parametrize(
    ("path", "param"),
    [
        *(("sessions?limit=0", "limit"), ("sessions?limit=101", "limit"), ("sessions?before=x", "before")),
        *(
            ("search", "words"),
            ("search?words=", "words"),
            ("search?words=a&before=-1", "before"),
            ("turns/x", "turn_id"),
        ),
    ],
)
async def test_a_wrong_request_is_refused_by_the_name_of_its_part(server: RunningServer, path: str, param: str):
    answer = await server.http.get(f"/api/{path}")
    assert answer.status_code == 400
    assert param in (answer.json()["error"]["param"] or "")


async def test_nobody_sees_what_is_anothers(store: Store, start_server: ServerFactory):
    ann, bob = (
        {"x-api-key": store.write_now(add_key, name, user, learn=True)} for name, user in (("a", "ann"), ("b", "bob"))
    )
    secret = {"role": "user", "content": "my secret"}
    turn_id = judged_turn(store, new=new_turn(user="ann", messages=(secret,)))
    part = finished_turn(store, new=new_turn(user="ann/phone", messages=(secret,)))
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={"turns": 1})
    store.write_now(turns.leave_out, [part], SkipReason.NEUTRAL, "It says nothing.")
    paths = [f"turns/{turn_id}", f"turns/{turn_id}/tokens", f"turns/{part}", "sessions/1", "sessions/1/changes"]
    looks = ["sessions", "sessions?user=phone", "sessions?user=../ann", "search?words=secret", "learning", "versions/1"]
    async with start_server() as server:
        for path in paths:
            refused = await server.http.get(f"/api/{path}", headers=bob)
            none = await server.http.get(f"/api/{path.replace(path.split('/')[1], '99')}", headers=bob)
            assert refused.status_code == none.status_code == 404
            assert refused.text == none.text.replace("99", path.split("/")[1])
            assert (await server.http.get(f"/api/{path}", headers=ann)).status_code == 200
        for path in looks:
            answer = await server.http.get(f"/api/{path}", headers=bob)
            assert answer.status_code == 200
            assert "secret" not in answer.text
            assert "the fox" not in answer.text
        assert (await server.http.get("/api/me", headers=bob)).json()["users"] == []
        assert (await server.http.get("/api/me", headers=ann)).json()["users"] == ["phone"]
        for path in ("search?words=secret", "learning", "versions/1"):
            assert "secret" in (await server.http.get(f"/api/{path}", headers=ann)).text
        # Numbers are the server's: bob may know how much was learned, not from what.
        assert (await server.http.get("/api/versions/1", headers=bob)).json()["turns"] == 1


@pytest.mark.parametrize(
    "path", ["me", "sessions", "sessions/1", "turns/1", "search?words=a", "learning", "versions/0"]
)
async def test_a_server_with_keys_asks_everybody_for_one(start_server: ServerFactory, path: str):
    async with start_server(serve={"api_key": "s3cret"}) as server:
        assert (await server.http.get(f"/api/{path}")).status_code == 401


def test_every_endpoint_is_documented():
    page = Path("docs/page.md").read_text()
    for path in ("me", "sessions", "sessions/{id}", "sessions/{id}/changes", "turns/{id}", "turns/{id}/tokens",
                 "search", "learning", "versions/{n}"):  # fmt: skip
        assert f"`GET /api/{path}`" in page
