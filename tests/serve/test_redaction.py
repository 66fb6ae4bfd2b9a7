"""What must not be stored is in no file, and the conversation goes on as ever."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import NEVER_ENDS

from nextstate.store import status, turns

SECRET = "ann@example.org"


async def test_an_address_is_answered_and_not_stored_and_its_turn_is_not_trained(start_server, tmp_path: Path):
    async with start_server(store_config={"redact": ["emails"]}) as server:
        prompt_tokens = []
        messages = [{"role": "user", "content": f"write to {SECRET}"}]
        for said in ("and again", "once more"):
            answer = await server.client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            prompt_tokens.append(answer.usage.prompt_tokens)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content or ""},
                {"role": "user", "content": said},
            ]
        assert prompt_tokens[0] > len("<|im_start|>")  # the model reads all of it
        first, second = await server.turns()
        assert (second.parent_turn_id, second.session_id) == (first.turn_id, first.session_id)
        for row in (first, second):
            assert (row.reason, row.reply_ids, row.prompt_suffix) == ("redacted", b"", b"")
            assert row.detail == "It held what is not stored: 1 of emails."
        told = await server.store.read(turns.load_messages, second.turn_id)
        assert told[0] == {"role": "user", "content": "write to [redacted: emails]"}
        thumb = {"turn_id": first.turn_id, "value": "bad", "words": f"not {SECRET}"}
        assert (await server.http.post("/v1/feedback", json=thumb)).json()["outcome"] == "kept"
        assert 'nextstate_redactions_total{kind="emails"} 3.0' in (await server.http.get("/metrics")).text
        assert (await server.store.read(status.status)).accounted_for
        assert not any(SECRET.encode() in file.read_bytes() for file in tmp_path.glob("nextstate.db*"))


async def test_a_turn_without_anything_of_that_is_stored_as_ever(start_server):
    async with start_server(store_config={"redact": ["emails"]}) as server:
        hi = [{"role": "user", "content": "Hi"}]
        await server.client.chat.completions.create(model="policy", messages=hi, max_tokens=8)
        (row,) = await server.turns()
        assert row.reason != "redacted"
        assert row.prompt_tokens > 0
        assert row.reply_ids


async def test_an_answer_is_looked_through_as_well(start_server):
    # The request has nothing but blanks to offer, and the random model says something else.
    async with start_server(store_config={"redact_patterns": {"letters": r"\S+"}}) as server:
        blank = [{"role": "user", "content": " "}]
        answer = await server.client.chat.completions.create(model="policy", messages=blank, max_tokens=8, **NEVER_ENDS)
        (row,) = await server.turns()
    assert (answer.choices[0].message.content or "").strip()
    assert set(row.answer.split()) == {"[redacted:", "letters]"}
    assert row.prompt_tokens > 0  # it held nothing of that
    assert row.reply_ids == b""
    assert row.reason == "redacted"
