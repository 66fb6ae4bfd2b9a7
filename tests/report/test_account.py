from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from sqlalchemy import update
from tests.report.accounts import an_account
from tests.rows import finished_turn, judged_turn, new_turn

from nextstate.learn.watch import comparisons
from nextstate.report import account
from nextstate.report.stats import Rate
from nextstate.store import learning, turns
from nextstate.store.schema import policy_versions, updates
from nextstate.store.store import Store
from nextstate.types import SkipReason, Vote

METRICS = {
    "turns": 3,
    "mean_reward": -1 / 3,
    "turns_with_teacher": 2,
    "policy_gradient": 0.25,
    "divergence": 0.125,
    "seconds": 1.5,
}


@pytest.fixture
def learned(store: Store) -> Store:
    """Version 1 from three turns of the base, one of them good; a turn of version 1 that is good; and two left out."""
    for value in (Vote.BAD, Vote.GOOD, Vote.BAD):
        judged_turn(store, value)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics=METRICS)
    store.write_now(learning.promote, 1, {"probe_difference": 2e-6, "why": "passed"})
    judged_turn(store, Vote.GOOD, reply_versions=(1, 1))
    for user in ("local", "other"):
        turn_id = finished_turn(store, new=new_turn(user=user, messages=({"role": "user", "content": f"{user}?"},)))
        store.write_now(turns.leave_out, [turn_id], SkipReason.NEUTRAL, "It says nothing.")
    return store


def test_an_account_counts_what_people_said_and_what_each_version_came_of(learned: Store):
    made = learned.read_now(account.account)
    assert made.said == Rate(hits=2, total=4)
    assert [(one.start, one.end, one.rate.hits) for one in made.satisfaction] == [(0, 4, 2)]
    assert [(mark.version, mark.after) for mark in made.marks] == [(1, 3)]
    first, base = made.versions
    assert (first.version, first.state, first.turns, first.good, first.bad, first.hints) == (1, "serving", 3, 1, 2, 2)
    assert first.terms == {"policy_gradient": 0.25}
    assert first.gate == {"probe_difference": 2e-6}
    assert (first.divergence, first.why, first.said) == (0.125, "passed", Rate(hits=1, total=1))
    assert first.watch is not None
    assert first.watch["reference_bad"] == 2
    assert (base.turns, base.good, base.terms, base.divergence) == (None, None, {}, None)
    assert base.said == Rate(hits=1, total=3)


def test_what_an_update_did_not_measure_is_not_zero(learned: Store):
    learned.write_now(lambda db: db.execute(update(updates).values(metrics={})))
    line = learned.read_now(account.account).versions[0]
    assert (line.turns, line.good, line.hints, line.divergence, line.seconds) == (None,) * 5


def test_reasons_come_with_their_explanation_and_with_examples_of_those_who_may_be_shown(learned: Store):
    made = learned.read_now(account.account, whose=lambda owner: owner == "local")
    assert [(line.reason, line.final, line.count) for line in made.reasons] == [
        ("being_answered", False, 4),
        ("waits_for_update", False, 1),
        ("neutral", True, 2),
    ]
    assert "No evidence is no reward." in made.reasons[-1].explanation
    assert [(one.asked, one.answer, one.detail) for one in made.reasons[-1].examples] == [
        ("local?", "the fox", "It says nothing.")
    ]


def test_an_account_since_a_moment_counts_what_began_then(learned: Store):
    learned.write_now(lambda db: db.execute(update(policy_versions).values(created_at=50.0)))
    learned.write_now(lambda db: db.exec_driver_sql("UPDATE turns SET created_at = turn_id"))
    learned.write_now(lambda db: db.exec_driver_sql("UPDATE verdicts SET created_at = turn_id"))
    made = learned.read_now(account.account, since=4.0)  # of eight judged and asking turns and two others
    assert made.counts.turns == 7
    assert made.counts.accounted_for
    assert made.said == Rate(hits=1, total=2)
    assert learned.read_now(account.account, since=51.0).versions == ()


def test_an_account_of_one_version_is_about_it_and_what_came_since(learned: Store):
    made = learned.read_now(account.account, version=1)
    assert [line.version for line in made.versions] == [1]
    assert made.said == Rate(hits=1, total=1)
    with pytest.raises(LookupError, match="no version 7"):
        learned.read_now(account.account, version=7)


def test_whoever_looks_again_and_again_gets_the_same_of_what_is_new(learned: Store, monkeypatch: pytest.MonkeyPatch):
    whole = learned.read_now(account.account)
    newest = learned.read_now(account.account, newest=True)
    assert replace(newest, made_at=0.0) == replace(whole, made_at=0.0)
    monkeypatch.setattr(account, "NEWEST_VERSIONS", 1)
    assert [line.version for line in learned.read_now(account.account, newest=True).versions] == [1]


def test_a_version_that_was_taken_back_shows_the_evidence_of_then(learned: Store):
    evidence = {"live_good": 1, "live_bad": 19, "reference_good": 30, "reference_bad": 3, "e_value": 512.0}
    learned.write_now(learning.take_back, 1, "1 of 20 verdicts are good", evidence)
    line = learned.read_now(account.account).versions[0]
    assert (line.watch, line.why) == (evidence, "1 of 20 verdicts are good")
    assert learned.read_now(comparisons)


def test_programs_get_shares_and_intervals():
    read = json.loads(json.dumps(account.as_json(an_account())))
    assert read["said"] == {
        "hits": 13,
        "total": 20,
        "share": 0.65,
        "interval_95": list(Rate(hits=13, total=20).interval),
    }
    assert [one["rate"]["share"] for one in read["satisfaction"]] == [0.3, 1.0]
    assert read["versions"][0]["said"]["share"] == 1.0
    assert read["accounted_for"] is True


def test_the_file_needs_no_other_and_shows_texts_as_texts():
    html = account.as_html(an_account())
    assert "http" not in html
    assert "<script" not in html
    assert "&lt;i&gt;why?" in html
    for part in ("13 of 20, 65%", "<svg", ">v1<", "distillation 0.0800", "No evidence is no reward.", "3, 5", "passed"):
        assert part in html


def test_the_terminal_shows_versions_and_reasons():
    console = Console(record=True, width=200, file=None, force_terminal=False)
    account.show(an_account(), console)
    text = console.export_text()
    for part in (
        "version 1 serves",
        "13 of 20, 65%",
        "3/5",
        "distillation 0.0800",
        "neutral",
        "No evidence is no reward.",
    ):
        assert part in text
