"""Whatever is forgotten is in no file of the store, and everything else stands as before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON, LargeBinary, Text, select

from nextstate.learn import process
from nextstate.store import forgetting, judging, learning, schema, status, turns, watching
from nextstate.store.store import Store, note
from nextstate.store.turns import Marks, Placement
from nextstate.types import Feedback, FinishReason, Hint, Message, Sampling, SkipReason, Source, TurnState, Vote
from tests.rows import a_verdict, finished_turn, judged_turn, new_turn

SECRET = "the word is xylophone-42"
TOKENS = (7001, 7002, 7003, 7004, 7005)
"""Tokens of the secret; as int32 they are twenty bytes that stand nowhere else."""


def user_says(text: str) -> Message:
    return {"role": "user", "content": text}


def talk(
    store: Store, *said: str, user: str = "ann", key: str = "k", answer: str = "fine", **changes: Any
) -> list[int]:
    """A session: each line answered, each but the last followed by the next and judged bad for it. The turns' ids."""
    ids: list[int] = []
    messages: tuple[Message, ...] = ()
    prompt: tuple[int, ...] = ()
    session: int | None = None
    for n, text in enumerate(said):
        messages = (*messages, user_says(text))
        prompt = (*prompt, *(TOKENS if SECRET in text else (100 + n,)))
        place = Placement(
            session_id=session,
            session_key=key,
            parent_turn_id=ids[-1] if ids else None,
            kind="continuation" if ids else "new",
            because="a test",
            next_state=(user_says(text),) if ids else (),
            source=Source.USER if ids else None,
            marks=Marks(opening=said[0], wording=text, setting=text, heard_spine=text, block_spine=text, trace=text),
        )
        new = new_turn(
            user=user,
            placement=place,
            messages=messages,
            prompt_ids=prompt,
            request_spine=f"{user} {key} {n}",
            **changes,
        )
        reply = {"role": "assistant", "content": answer}
        ids.append(finished_turn(store, new=new, answer=reply, reply_ids=(60, 61)))
        if len(ids) > 1:
            store.write_now(judging.write_verdict, replace(a_verdict(ids[-2], hint=text), reason=f"They said: {text}"))
        messages, prompt = (*messages, reply), (*prompt, 60, 61)
        session = store.read_now(status.show_turn, ids[-1]).session_id
    return ids


def state_of(store: Store, turn_id: int) -> tuple[str, str | None]:
    row = store.read_now(status.show_turn, turn_id)
    return row.state, row.reason


def files(folder: Path) -> bytes:
    """All that is in the files of the database."""
    return b"".join(file.read_bytes() for file in sorted(folder.glob("nextstate.db*")))


def make_version(store: Store, *, limit: int = 100) -> int:
    """A version trained on what waits; it serves."""
    update_id = store.write_now(learning.start_update, limit=limit)
    version = store.read_now(learning.load_update, update_id).version
    store.write_now(learning.finish_update, update_id, artifact=f"versions/{version:06d}", metrics={"turns": 1})
    store.write_now(learning.promote, version, {"divergence": 0.1})
    return version


HOLDS_NO_TEXT = {
    *("sessions.end_reason", "turns.kind", "turns.dialect", "turns.state", "turns.reason", "turns.reply_versions"),
    *("turns.finish_reason", "next_states.source", "verdicts.judge", "hints.source", "events.kind"),
    "verdicts.probabilities",
}
OF_NO_TURN = {"meta", "api_keys", "updates", "policy_versions", "alembic_version"}


def plant(store: Store, turn_id: int) -> None:
    """Put the secret into every column that can hold text of this turn, whatever writes it."""

    def write(db: Any) -> None:
        db.execute(schema.tool_sets.insert().values(tool_set=f"set {SECRET}", tools=f'["{SECRET}"]'))
        store_row = {"turn_id": turn_id, "value": -1, "words": SECRET, "created_at": 1.0}
        db.execute(schema.feedback.insert().values(store_row))
        mine = {
            "turns": schema.turns.c.turn_id == turn_id,
            "tool_sets": schema.tool_sets.c.tool_set == f"set {SECRET}",
            "sessions": schema.sessions.c.session_id
            == select(schema.turns.c.session_id).where(schema.turns.c.turn_id == turn_id).scalar_subquery(),
        }
        for table in schema.metadata.sorted_tables:
            if table.name in OF_NO_TURN:
                continue
            where = mine.get(table.name)
            if where is None and "turn_id" in table.c:
                where = table.c.turn_id == turn_id
            for column in table.columns:
                if f"{table}.{column.name}" in HOLDS_NO_TEXT or column.primary_key or column.foreign_keys:
                    continue
                kinds = {Text: SECRET, JSON: {"temperature": 1.0, "text": SECRET}, LargeBinary: SECRET.encode()}
                value = next((value for kind, value in kinds.items() if isinstance(column.type, kind)), None)
                if column.name == "messages":
                    value = [user_says(SECRET)]
                if column.name == "tool_calls":
                    value = [{"id": "c", "function": {"name": "f", "arguments": SECRET}}]
                if value is not None:
                    change = table.update().values({column: value})
                    db.execute(change if where is None else change.where(where))
        db.execute(schema.turns.update().where(mine["turns"]).values(tool_set=f"set {SECRET}"))

    store.write_now(note, "judge_failed", turn_id, why="x")
    store.write_now(write)


def test_the_text_is_in_no_file_of_the_store_whichever_column_held_it(store: Store, tmp_path: Path):
    (turn_id, _) = talk(store, SECRET, "and what else?", answer=SECRET)
    other = judged_turn(store)
    plant(store, turn_id)
    # Hints have no turn of their own; `plant` fills all of them, and the other turn's are not to be compared below.
    store.write_now(
        lambda db: db.execute(schema.hints.update().where(schema.hints.c.verdict_id == 2).values(text="be"))
    )
    assert SECRET.encode() in files(tmp_path)
    before = store.read_now(turns.load_turn, other), store.read_now(turns.load_messages, other)
    chosen = store.read_now(forgetting.choose_turn, turn_id)
    store.write_now(forgetting.forget, chosen)
    assert store.scrub()
    left = files(tmp_path)
    for secret in (SECRET, "xylophone"):
        assert secret.encode() not in left
    assert before == (store.read_now(turns.load_turn, other), store.read_now(turns.load_messages, other))
    assert state_of(store, other) == (TurnState.JUDGED, None)


def test_tokens_go_as_well(store: Store, tmp_path: Path):
    from nextstate.store.arrays import pack_ids

    talk(store, SECRET, "and what else?")
    assert pack_ids(TOKENS) in files(tmp_path)
    store.write_now(forgetting.forget, store.read_now(forgetting.choose_session, "k"))
    store.scrub()
    assert pack_ids(TOKENS) not in files(tmp_path)


def test_a_tombstone_is_left_of_every_turn_and_each_is_counted(store: Store):
    ids = talk(store, "one", "two", "three")
    kept = talk(store, "one", "two", key="other")
    found = store.write_now(forgetting.forget, store.read_now(forgetting.choose_session, "k"))
    assert (found.turns, found.trained, found.versions) == (3, 0, ())
    assert [state_of(store, turn_id) for turn_id in ids] == [(TurnState.LEFT_OUT, SkipReason.FORGOTTEN)] * 3
    now = store.read_now(status.status)
    assert (now.turns, now.left_out, now.accounted_for) == (5, {"forgotten": 3}, True)
    assert now.sessions == 1
    assert store.read_now(turns.load_messages, kept[1])[0] == user_says("one")


def test_forgetting_one_turn_takes_what_followed_it_and_leaves_what_came_before_without_its_evidence(store: Store):
    first, second, third = talk(store, "Name a fox.", "No, " + SECRET, "Now a bear.")
    assert store.read_now(forgetting.choose_turn, second) == [second, third]
    found = store.write_now(forgetting.forget, [second, third])
    assert (found.turns, found.without_evidence) == (2, 1)
    assert state_of(store, first) == (TurnState.LEFT_OUT, SkipReason.NO_NEXT_STATE)
    (verdict,) = store.read_now(judging.list_verdicts, first)
    assert (verdict.value, verdict.reason, verdict.hints) == (Vote.BAD, "Forgotten.", ())
    assert store.read_now(turns.load_messages, first)[0] == user_says("Name a fox.")
    # The conversation may go on from there, and the turn is judged after all.
    place = Placement(
        session_id=1,
        session_key=None,
        parent_turn_id=first,
        kind="branch",
        because="a test",
        next_state=(user_says("thanks"),),
        source=Source.USER,
    )
    store.write_now(turns.open_turn, new_turn(user="ann", placement=place))
    assert state_of(store, first) == (TurnState.CONTINUED, None)


def test_a_turn_that_somebody_gave_feedback_on_keeps_its_verdict_and_the_hint_of_the_feedback(store: Store):
    first, second = talk(store, "Name a fox.", SECRET)
    store.write_now(judging.add_feedback, first, Feedback(value=Vote.BAD, words="in one word"))
    hints = (Hint(text=SECRET, source=Source.USER), Hint(text="in one word", source=Source.FEEDBACK))
    store.write_now(judging.write_verdict, replace(a_verdict(first), hints=hints))
    store.write_now(forgetting.forget, [second])
    assert state_of(store, first) == (TurnState.JUDGED, None)
    update = store.read_now(learning.load_update, store.write_now(learning.start_update, limit=8))
    assert [(s.reward, s.hints) for s in update.samples] == [(-1, ("in one word",))]
    assert store.read_now(lambda db: db.execute(select(schema.samples.c.hint)).scalar()) == "in one word"


def test_other_answers_to_the_same_request_work_on_the_side_and_quotes_go_with_a_turn(store: Store):
    first, second = talk(store, "Name a fox.", "Now tell me this: " + SECRET)
    place = Placement(session_id=1, session_key=None, parent_turn_id=first, kind="regeneration", because="a test")
    again = finished_turn(store, new=new_turn(user="ann", placement=place, request_spine="ann k 1"))
    side = finished_turn(
        store, new=new_turn(placement=replace(place, parent_turn_id=None, kind="side"), request_spine="t")
    )
    orders = (user_says("Find out more. They said: Now tell me this: " + SECRET),)
    quoting = replace(place, parent_turn_id=None, kind="subagent")
    agent = finished_turn(store, new=new_turn(placement=quoting, request_spine="a", messages=orders))
    apart = finished_turn(store, new=new_turn(placement=quoting, request_spine="b", messages=(user_says("Hello"),)))
    assert store.read_now(forgetting.choose_turn, second) == [second, again, side, agent]
    assert apart not in store.read_now(forgetting.choose_turn, second)


def test_a_user_is_forgotten_with_all_parts_and_nobody_else(store: Store):
    mine = (
        talk(store, "one", user="ann")
        + talk(store, "one", user="ann/app")
        + talk(store, "one", user="ann/app", key="2")
    )
    for other in ("anna", "bob", "bob/ann", ""):
        talk(store, "one", user=other)
    assert store.read_now(forgetting.choose_user, "ann") == mine
    assert store.read_now(forgetting.choose_user, "ann/app") == mine[1:]
    assert store.read_now(forgetting.choose_user, "") == [mine[-1] + 4]
    slash = talk(store, "one", user="a%2Fb")
    assert store.read_now(forgetting.choose_user, "a/b") == slash


def test_a_turn_that_was_asked_for_since_the_choice_goes_too(store: Store):
    ids = talk(store, "one", "two", "three", "four")
    assert store.write_now(forgetting.forget, ids[1:2]).turns == 3
    assert [state_of(store, turn_id)[1] for turn_id in ids] == [SkipReason.NO_NEXT_STATE, *["forgotten"] * 3]


def test_what_is_not_there_or_not_clear_is_an_error(store: Store):
    (turn_id,) = talk(store, "one")
    talk(store, "one", user="bob")
    with pytest.raises(LookupError, match="2 users have a session 'k': 'ann', 'bob'"):
        store.read_now(forgetting.choose_session, "k")
    assert store.read_now(forgetting.choose_session, "k", "ann") == [turn_id]
    store.write_now(forgetting.forget, [turn_id])
    for choose, what in (
        (forgetting.choose_turn, 1),
        (forgetting.choose_user, "ann"),
        (forgetting.choose_session, "x"),
    ):
        with pytest.raises(LookupError, match="there is no"):
            store.read_now(choose, what)
    with pytest.raises(LookupError):
        store.read_now(forgetting.choose_user, forgetting.NOBODY)


def test_an_answer_that_ends_after_its_turn_was_forgotten_is_not_written_down(store: Store):
    turn_id, _, _ = store.write_now(turns.open_turn, new_turn(user="ann"))
    store.write_now(forgetting.forget, [turn_id])
    ended = {
        "answer": {"role": "assistant", "content": SECRET},
        "malformed_calls": 0,
        "answer_spine": "a",
        "reply_ids": (1,),
        "reply_logprobs": (-1.0,),
        "reply_versions": (0,),
        "finish_reason": FinishReason.STOP,
        "counted_tokens": 1,
    }
    store.write_now(turns.finish_turn, turn_id, **ended)
    store.write_now(turns.leave_out, [turn_id], SkipReason.ABORTED, "It left.")
    assert store.read_now(status.show_turn, turn_id).answer is None
    assert state_of(store, turn_id) == (TurnState.LEFT_OUT, SkipReason.FORGOTTEN)


def test_a_verdict_that_comes_after_its_turn_was_forgotten_changes_nothing(store: Store):
    from tests.rows import continued_turn

    turn_id = continued_turn(store)
    (claimed, *_) = store.write_now(judging.claim_unjudged, limit=1, lease_s=60)
    store.write_now(forgetting.forget, [turn_id])
    assert not store.write_now(judging.write_verdict, a_verdict(turn_id), claimed.lease_until)
    assert store.read_now(judging.list_verdicts, turn_id) == []


def test_the_watch_counts_verdicts_on_forgotten_turns_as_before(store: Store):
    ids = talk(store, "one", "two", "three")
    before = store.read_now(watching.signed_turns)
    assert [turn.turn_id for turn in before] == ids[:2]
    store.write_now(forgetting.forget, ids)
    assert store.read_now(watching.signed_turns) == before


def test_every_version_that_goes_back_to_forgotten_words_is_marked(store: Store):
    talk(store, "one", "two", key="clean")
    assert make_version(store) == 1
    ids = talk(store, "one", SECRET, "three")
    assert make_version(store) == 2
    talk(store, "one", "two", key="later")
    assert make_version(store) == 3
    # The second turn was trained, and so was the first, with the second one's words for a hint.
    found = store.write_now(forgetting.forget, ids[1:])
    assert (found.turns, found.trained, found.without_evidence, found.versions) == (2, 1, 1, (2, 3))
    assert store.read_now(forgetting.marked_versions) == (2, 3)
    assert store.read_now(status.status).marked == (2, 3)
    assert store.read_now(status.show_version, 2).row.metrics == {"turns": 1, "forgotten_turns": 2}


def test_an_update_that_trains_on_a_turn_is_stopped_and_its_other_turns_wait(store: Store):
    ids = talk(store, "one", "two")
    other = judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    found = store.write_now(forgetting.forget, ids)
    assert found.stopped_updates == (update_id,)
    assert state_of(store, other) == (TurnState.JUDGED, None)
    with pytest.raises(learning.UpdateStopped):
        store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={})
    assert state_of(store, other) == (TurnState.JUDGED, None)
    assert store.read_now(learning.candidate) is None
    assert store.read_now(status.status).updates == {"stopped": 1}
    assert store.read_now(learning.stopped_versions) == [1]


def test_what_a_stopped_update_had_written_is_removed(store: Store, tmp_path: Path):
    from nextstate.config import Config

    ids = talk(store, "one", "two")
    store.write_now(learning.start_update, limit=8)
    store.write_now(forgetting.forget, ids)
    folder = tmp_path / "versions" / "000001"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_text("weights")
    process.recover(store, Config(data=tmp_path))
    assert not folder.exists()


def test_starting_over_goes_back_to_the_clean_version_and_lets_the_other_turns_wait_again(store: Store):
    clean = talk(store, "one", "two", key="clean")
    make_version(store)
    first, second, third = talk(store, "one", SECRET, "three")
    (other, _) = talk(store, "one", "two", key="beside")
    make_version(store)
    (later, _) = talk(store, "one", "two", key="later")
    make_version(store)
    store.write_now(forgetting.forget, [second, third])
    found = store.write_now(forgetting.start_over)
    assert found is not None
    assert (found.version, found.retired, found.turns) == (1, (2, 3), 2)
    assert store.read_now(learning.candidate).version == 1
    assert state_of(store, clean[0]) == (TurnState.TRAINED, None)
    assert state_of(store, first) == (TurnState.LEFT_OUT, SkipReason.NO_NEXT_STATE)
    assert state_of(store, second) == (TurnState.LEFT_OUT, SkipReason.FORGOTTEN)
    assert [state_of(store, turn_id) for turn_id in (other, later)] == [(TurnState.JUDGED, None)] * 2
    assert store.write_now(forgetting.start_over) is None  # it is under way
    store.write_now(learning.promote, 1, {})
    states = {row.version: row.state for row in store.read_now(learning.list_versions)}
    assert states == {0: "retired", 1: "serving", 2: "rolled_back", 3: "rolled_back"}
    with pytest.raises(LookupError, match="version 2 was taken back: turns that it was trained on"):
        store.write_now(learning.roll_back, 2)
    assert [row.version for row in store.read_now(forgetting.dead_artifacts)] == [2, 3]
    update = store.read_now(learning.load_update, store.write_now(learning.start_update, limit=8))
    assert (update.parent_version, [s.turn.turn_id for s in update.samples]) == (1, [other, later])
    assert store.write_now(forgetting.start_over) is None
    now = store.read_now(status.status)
    assert (now.accounted_for, now.rolled_back, now.version in now.marked) == (True, (), False)


def test_starting_over_waits_for_the_gate(store: Store):
    ids = talk(store, "one", "two")
    make_version(store)
    talk(store, "one", "two", key="later")
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000002", metrics={})
    store.write_now(forgetting.forget, ids)
    with pytest.raises(LookupError, match="version 2 waits for the gate"):
        store.write_now(forgetting.start_over)
    assert state_of(store, ids[0]) == (TurnState.LEFT_OUT, SkipReason.FORGOTTEN)


def test_looking_first_changes_nothing(store: Store):
    ids = talk(store, "one", "two")
    make_version(store)
    found = store.read_now(forgetting.preview, ids)
    assert (found.turns, found.trained, found.versions) == (2, 1, (1,))
    assert store.read_now(forgetting.marked_versions) == ()
    assert store.write_now(forgetting.forget, ids) == found


def test_the_sampling_of_a_tombstone_holds_no_text(store: Store):
    (turn_id,) = talk(store, "one", sampling=Sampling(max_tokens=8, stop=(SECRET,)))
    store.write_now(forgetting.forget, [turn_id])
    assert store.read_now(status.show_turn, turn_id).sampling == {"max_tokens": 0, "temperature": 1.0}


def age(store: Store, key: str, last_at: float) -> None:
    store.write_now(
        lambda db: db.execute(schema.sessions.update().where(schema.sessions.c.key == key).values(last_at=last_at))
    )


def test_an_old_session_expires_with_its_texts_and_nothing_is_taken_back(store: Store, tmp_path: Path):
    first, second = talk(store, "one", SECRET, key="old")
    make_version(store)
    waiting, last = talk(store, "one", "two", key="older")
    new = talk(store, "one", "two", key="new")
    age(store, "old", 50.0)
    age(store, "older", 40.0)
    assert store.write_now(forgetting.expire_old, quiet_since=100.0, limit=1) == 2
    assert [state_of(store, turn_id) for turn_id in (waiting, last)] == [(TurnState.LEFT_OUT, SkipReason.EXPIRED)] * 2
    assert state_of(store, first) == (TurnState.TRAINED, None)
    assert store.write_now(forgetting.expire_old, quiet_since=100.0, limit=10) == 2
    assert store.write_now(forgetting.expire_old, quiet_since=100.0, limit=10) == 0
    assert state_of(store, first) == (TurnState.TRAINED, None)
    assert state_of(store, second) == (TurnState.LEFT_OUT, SkipReason.EXPIRED)
    assert state_of(store, new[0]) == (TurnState.JUDGED, None)
    now = store.read_now(status.status)
    assert (now.trained, now.left_out, now.marked, now.accounted_for) == (1, {"expired": 3}, (), True)
    assert store.read_now(turns.load_messages, first) == ()
    store._engine.dispose()  # the last connection to close empties the log
    assert SECRET.encode() not in files(tmp_path)


def test_a_session_that_is_trained_on_or_answered_does_not_expire(store: Store):
    talk(store, "one", "two", key="trained on")
    store.write_now(learning.start_update, limit=8)
    store.write_now(turns.open_turn, new_turn(user="bob"))
    assert store.write_now(forgetting.expire_old, quiet_since=1e12, limit=10) == 0


def test_an_expired_turn_is_not_trained_again(store: Store):
    first, _ = talk(store, "one", "two")
    forgotten, _ = talk(store, "one", "two", key="other")
    make_version(store)
    age(store, "k", 1.0)
    store.write_now(forgetting.expire_old, quiet_since=100.0, limit=10)
    store.write_now(forgetting.forget, [forgotten])
    found = store.write_now(forgetting.start_over)
    assert found is not None
    assert found.turns == 0
    assert state_of(store, first) == (TurnState.LEFT_OUT, SkipReason.EXPIRED)


def test_the_size_is_that_of_what_is_stored(store: Store):
    before = store.read_now(forgetting.stored_bytes)
    ids = talk(store, "x" * 100_000)
    grown = store.read_now(forgetting.stored_bytes)
    # The text and its marks, but for what a page leaves free.
    assert grown - before > 100_000
    store.write_now(forgetting.forget, ids)
    assert store.read_now(forgetting.stored_bytes) < grown - 100_000
