from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from benchmarks.many_turns import fill
from sqlalchemy import Connection, event

from nextstate.store import judging, looking, status
from nextstate.store.store import Store
from nextstate.store.turns import Placement
from nextstate.types import Feedback, Source, Vote
from tests.rows import a_verdict, continued_turn, finished_turn, judged_turn, new_turn

START = 1_800_000_000.0


def in_session(key: str, **more: Any) -> Any:
    place = Placement(session_id=None, session_key=key, parent_turn_id=None, kind="new", because="a test")
    return new_turn(**{"placement": place, **more})


@contextmanager
def queries(db: Connection) -> Iterator[list[tuple[str, Any]]]:
    """What is asked of a connection, with its parameters."""
    asked: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        asked.append((statement, parameters))

    event.listen(db, "before_cursor_execute", note)
    yield asked
    event.remove(db, "before_cursor_execute", note)


def plan(db: Connection, statement: str, parameters: Any) -> list[str]:
    return [row[3] for row in db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]


LOOKS: dict[str, Callable[[Connection], Any]] = {
    "sessions": lambda db: looking.list_sessions(db, "", limit=30),
    "older sessions": lambda db: looking.list_sessions(db, "", limit=30, before=(START + 600.0, 3)),
    "part owners": lambda db: looking.part_owners(db, ""),
    "one session": lambda db: looking.session_turns(db, 7, limit=50, before=10**6),
    "changes": lambda db: looking.states(db, 7),
    "turns in a state": lambda db: looking.turns_in(db, "left_out", "neutral", limit=20),
    "evidence": lambda db: looking.evidence(db, range(31, 36)),
    "search": lambda db: looking.search(db, "", "lime", before=None, limit=30),
    "counts": status.status,
}


LARGE = "turns|sessions|verdicts|votes|hints|next_states|feedback"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path_factory.mktemp('store') / 'nextstate.db'}")
    opened.write_now(fill, 300, start=START)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", LOOKS)
def test_every_look_goes_through_an_index(full: Store, name: str):
    def check(db: Connection) -> None:
        with queries(db) as asked:
            LOOKS[name](db)
        assert asked
        for statement, parameters in asked:
            for step in plan(db, statement, parameters):
                # Reading the whole of an index is for counting; `updates` and `policy_versions` are small.
                whole = re.match(rf"SCAN ({LARGE})\b(?!.*COVERING)", step)
                assert not whole or (name == "counts" and whole[1] == "verdicts"), f"{step}\n{statement}"

    full.read_now(check)


def test_how_many_queries_a_look_takes_does_not_depend_on_what_it_finds(full: Store):
    def count(look: Callable[[Connection], Any]) -> int:
        def work(db: Connection) -> int:
            with queries(db) as asked:
                look(db)
            return len(asked)

        return full.read_now(work)

    assert count(LOOKS["sessions"]) == 1
    assert count(LOOKS["changes"]) == 1
    assert count(LOOKS["one session"]) == 1
    assert count(lambda db: looking.evidence(db, [1])) == count(lambda db: looking.evidence(db, range(1, 200)))


def test_sessions_come_liveliest_first_and_in_pages_without_a_gap(full: Store):
    def pages(db: Connection) -> list[int]:
        found, before = [], None
        while rows := looking.list_sessions(db, "", limit=7, before=before):
            found += [row.session_id for row in rows]
            before = rows[-1].last_at, rows[-1].session_id
        return found

    assert full.read_now(pages) == list(range(60, 0, -1))


def test_a_session_is_listed_with_its_turns_and_what_it_began_with(store: Store):
    place = Placement(session_id=None, session_key="a", parent_turn_id=None, kind="side", because="a test")
    finished_turn(store, new=new_turn(placement=place, messages=({"role": "user", "content": "a title, please"},)))
    session = store.read_now(lambda db: looking.list_sessions(db, "local", limit=9))[0].session_id
    here = Placement(session_id=session, session_key="a", parent_turn_id=None, kind="new", because="a test")
    finished_turn(store, new=new_turn(placement=here))
    (row,) = store.read_now(lambda db: looking.list_sessions(db, "local", limit=9))
    assert (row.key, row.turns, row.first_messages) == ("a", 2, [{"role": "user", "content": "a fox?"}])
    assert store.read_now(lambda db: looking.list_sessions(db, "loca", limit=9)) == []


def test_part_owners_are_those_behind_the_slash_and_nobody_elses(store: Store):
    for user in ("team", "team/bob", "team/ann", "team/ann", "team%2Fx", "team2", "team0", "tea/m", "/x"):
        finished_turn(store, new=new_turn(user=user))
    assert store.read_now(looking.part_owners, "team") == ["team/ann", "team/bob"]
    assert store.read_now(looking.part_owners, "") == ["/x"]


def test_states_name_the_newest_turns_of_one_session_only(store: Store):
    waiting, judged = finished_turn(store, new=in_session("a")), judged_turn(store, new=in_session("b"))
    of = {row.key: row.session_id for row in store.read_now(lambda db: looking.list_sessions(db, "local", limit=9))}
    assert store.read_now(looking.states, of["a"]) == [(waiting, "finished", None)]
    assert store.read_now(looking.states, of["b"]) == [(judged + 1, "generating", None), (judged, "judged", None)]


def test_evidence_holds_what_followed_what_was_said_and_how_it_was_judged(store: Store):
    turn_id, other = continued_turn(store, said="too long"), finished_turn(store)
    store.write_now(judging.write_verdict, a_verdict(turn_id, Vote.BAD))
    store.write_now(judging.add_feedback, turn_id, Feedback(value=Vote.BAD, words="really"))
    found = store.read_now(looking.evidence, [turn_id, other])
    known = found[turn_id]
    assert known.next_state is not None
    assert known.next_state.messages == [{"role": "user", "content": "too long"}]
    assert [(one.value, one.words) for one in known.feedback] == [(-1, "really")]
    assert [(one.value, one.votes, one.hints) for one in known.verdicts] == [
        (Vote.BAD, (Vote.BAD,), (("be brief, please", Source.USER),))
    ]
    assert found[other] == looking.Evidence(next_state=None, feedback=(), verdicts=())


def find(store: Store, words: str, **more: Any) -> looking.Found:
    return store.read_now(looking.search, "local", words, **{"before": None, "limit": 9, **more})


@pytest.mark.parametrize("words", ["the Fox", "Grüße, 100%", "under_score", 'a "quote"'])
def test_a_search_finds_words_in_answers_and_in_what_was_asked(store: Store, words: str):
    answered = finished_turn(store, answer={"role": "assistant", "content": f"... {words}!"})
    message = {"role": "user", "content": f"Say: {words}."}
    asked = finished_turn(store, new=new_turn(messages=(message,)), answer={"role": "assistant", "content": "no"})
    finished_turn(store, new=new_turn(user="other", messages=(message,)))
    finished_turn(store, answer={"role": "assistant", "content": "100 under-score"})
    found = find(store, words)
    assert [(one.turn_id, one.text) for one in found.turns] == [(asked, f"Say: {words}."), (answered, f"... {words}!")]
    assert found.searched_to is None


def test_how_messages_are_stored_is_not_found(store: Store):
    finished_turn(store)
    assert find(store, '"role"').turns == ()
    assert find(store, "content").turns == ()


def test_a_search_looks_through_a_bounded_piece_and_says_where_it_stopped(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    ids = [finished_turn(store) for _ in range(7)]
    monkeypatch.setattr(looking, "SEARCHED_TURNS", 3)
    found: list[int] = []
    before = None
    for expected in (ids[4], ids[1], None):
        piece = find(store, "fox", before=before)
        found += [one.turn_id for one in piece.turns]
        assert piece.searched_to == expected
        before = piece.searched_to
    assert found == ids[::-1]
    assert find(store, "fox", limit=2).searched_to == ids[5]
