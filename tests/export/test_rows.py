from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from nextstate.export.rows import Kind, NotExported, Row, rows
from nextstate.store import forgetting, judging, status, turns
from nextstate.store.store import Store
from nextstate.store.turns import Placement
from nextstate.types import FinishReason, Source, Vote
from tests.rows import QUESTION, a_verdict, finished_turn, judged_turn, new_turn


def exported(store: Store, kind: Kind) -> tuple[list[Row], dict[str, int]]:
    left_out: Counter[NotExported] = Counter()
    return list(rows(store, kind, left_out)), dict(left_out)


def test_a_judged_turn_is_a_row_with_the_tokens_as_they_were_sampled(store: Store):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    turn_id = judged_turn(store, Vote.GOOD, new=new_turn(tools=(tool,)), reply_ids=(60, 61, 2))
    ((row,), left_out) = exported(store, Kind.TURNS)
    assert row == {
        "prompt": [{"role": "user", "content": "a fox?"}],
        "completion": [{"role": "assistant", "content": "the fox"}],
        "label": True,
        "tools": json.dumps([tool]),
        "turn_id": turn_id,
        "session": store.read_now(status.show_turn, turn_id).session,
        "prompt_token_ids": [5, 6, 7],
        "answer_token_ids": [60, 61, 2],
        "answer_logprobs": pytest.approx([-5.9] * 3),
        "answer_versions": [0, 0, 0],
        "temperature": 1.0,
    }
    assert left_out == {"unfinished": 1}  # the request that followed was never answered


def test_nothing_that_may_not_be_learned_from_is_exported_and_each_is_counted(store: Store):
    bad = judged_turn(store)
    raw = new_turn(dialect="completions")
    judged_turn(store, new=raw)
    store.write_now(forgetting.forget, [judged_turn(store)])
    finished_turn(store)
    finished_turn(store, counted_tokens=7)
    finished_turn(store, finish_reason=FinishReason.LENGTH)
    side = Placement(session_id=None, session_key=None, parent_turn_id=None, kind="side", because="a test")
    finished_turn(store, new=new_turn(placement=side))
    opted_out = judged_turn(store)
    store.write_now(lambda db: db.exec_driver_sql(f"UPDATE turns SET learn = 0 WHERE turn_id = {opted_out}"))
    found, left_out = exported(store, Kind.TURNS)
    assert [row["turn_id"] for row in found] == [bad]
    assert left_out == {
        **{"forgotten": 2, "opted_out": 1, "unfinished": 3 + 1, "side_request": 1},
        **{"quarantined": 1, "raw_prompt": 1, "no_verdict": 1},
    }
    assert store.read_now(status.status).turns == 1 + sum(left_out.values())


def test_pages_meet_without_a_gap(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nextstate.export.rows._PAGE", 2)
    ids = [judged_turn(store) for _ in range(3)]
    assert [row["turn_id"] for row in exported(store, Kind.TURNS)[0]] == ids


def after(turn_id: int, said: str, **changes: Any) -> Placement:
    values = {
        "session_id": 1,
        "session_key": None,
        "parent_turn_id": turn_id,
        "kind": "continuation",
        "because": "a test",
        "next_state": ({"role": "user", "content": said},),
        "source": Source.USER,
    }
    return Placement(**{**values, **changes})


def a_correction(store: Store, second: Vote, **changes: Any) -> tuple[int, int]:
    """A bad answer, what the user said about it, and the answer to that."""
    first = finished_turn(store)
    place = after(first, "shorter, please", **changes)
    messages = (*QUESTION, {"role": "assistant", "content": "the fox"}, *place.next_state)
    new = new_turn(placement=place, messages=messages, prompt_ids=(5, 6, 7, 60, 61, 9), request_spine="correction")
    other = finished_turn(store, new=new, answer={"role": "assistant", "content": "fox"}, reply_ids=(62,))
    store.write_now(judging.write_verdict, a_verdict(first))
    last = new_turn(placement=after(other, "thanks"), request_spine="thanks")
    store.write_now(turns.open_turn, last)
    store.write_now(judging.write_verdict, a_verdict(other, second))
    return first, other


def test_the_good_answer_to_a_correction_is_chosen_over_the_bad_one(store: Store):
    first, second = a_correction(store, Vote.GOOD)
    ((row,), left_out) = exported(store, Kind.PREFERENCES)
    assert (row["prompt"], row["pair"]) == (list(QUESTION), "correction")
    assert row["chosen"] == [{"role": "assistant", "content": "fox"}]
    assert row["rejected"] == [{"role": "assistant", "content": "the fox"}]
    assert (row["turn_id"], row["chosen_turn_id"]) == (first, second)
    # Each with the prompt that it was sampled after.
    assert (row["chosen_prompt_token_ids"], row["chosen_answer_token_ids"]) == ([5, 6, 7, 60, 61, 9], [62])
    assert (row["rejected_prompt_token_ids"], row["rejected_answer_token_ids"]) == ([5, 6, 7], [60, 61])
    assert left_out == {"good_answer": 1, "unfinished": 1}


@pytest.mark.parametrize(("second", "changes"), [(Vote.BAD, {}), (Vote.GOOD, {"source": Source.TOOL})])
def test_a_bad_answer_that_no_good_one_follows_is_no_pair(store: Store, second: Vote, changes: dict[str, Any]):
    a_correction(store, second, **changes)
    found, left_out = exported(store, Kind.PREFERENCES)
    assert found == []
    assert left_out["no_better_answer"] == (2 if second is Vote.BAD else 1)


def test_another_answer_to_the_same_request_makes_a_pair_and_one_to_other_system_text_does_not(store: Store):
    bad = judged_turn(store)
    place = Placement(session_id=1, session_key=None, parent_turn_id=None, kind="regeneration", because="a test")
    other = ({"role": "system", "content": "Be brief."}, *QUESTION)
    judged_turn(store, Vote.GOOD, new=new_turn(placement=place, messages=other))
    assert exported(store, Kind.PREFERENCES)[1]["no_better_answer"] == 1
    good = judged_turn(store, Vote.GOOD, new=new_turn(placement=place))
    ((row,), _) = exported(store, Kind.PREFERENCES)
    assert (row["turn_id"], row["chosen_turn_id"], row["pair"]) == (bad, good, "regeneration")


def test_a_hint_is_the_privileged_context_and_the_answer_is_not_called_a_completion(store: Store):
    judged_turn(store)
    judged_turn(store, Vote.GOOD)
    ((row,), left_out) = exported(store, Kind.DISTILLATION)
    assert (row["privileged_context"], row["hints"], row["label"]) == ("be brief, please", ["be brief, please"], False)
    assert row["answer"] == [{"role": "assistant", "content": "the fox"}]
    assert "completion" not in row
    assert row["answer_token_ids"] == [60, 61]
    assert left_out == {"no_hint": 1, "unfinished": 2}


def test_a_turn_whose_evidence_was_forgotten_is_not_exported(store: Store):
    first, second = a_correction(store, Vote.GOOD)
    store.write_now(forgetting.forget, [second])
    for kind in Kind:
        assert exported(store, kind)[0] == []
    assert exported(store, Kind.TURNS)[1] == {"no_verdict": 1, "forgotten": 2}
    assert first == 1
