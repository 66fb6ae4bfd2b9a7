"""What a request costs, however many sessions there are: look-ups by index, and few of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, event, insert

from nextstate.collect import clients, spine
from nextstate.collect.placement import place
from nextstate.store import schema
from nextstate.store.finding import MAX_FOUND, find_turns
from nextstate.store.store import Store
from nextstate.store.turns import end_sessions
from tests.collect.talk import TOOLS, Talk, call, says, tool, user

MAX_LOOKUPS = 64


def statements(store: Store, work: Callable[[Connection], object]) -> list[tuple[str, tuple]]:
    """The SQL that `work` runs, with its parameters."""
    seen: list[tuple[str, tuple]] = []

    def note(db: Connection) -> None:
        def before(_conn, _cursor, statement, parameters, _context, _many):
            seen.append((statement, parameters))

        event.listen(db, "before_cursor_execute", before)
        work(db)

    store.read_now(note)
    return [entry for entry in seen if entry[0].lstrip().upper().startswith("SELECT")]


def scans(store: Store, sql: str, parameters: tuple) -> list[str]:
    """Lines of the query plan in which a table is read from end to end."""
    plan = store.read_now(lambda db: [row[3] for row in db.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters)])
    assert plan
    return [
        line for line in plan if line.startswith("SCAN") and line.split()[1] in ("turns", "sessions", "next_states")
    ]


def test_a_table_that_is_read_from_end_to_end_would_be_seen(store: Store):
    assert scans(store, "SELECT * FROM turns WHERE opening = ?", ("x",)) != []


def long_talk(n: int) -> list[dict]:
    """A conversation of n exchanges that no answer of ours is in."""
    said = [(user(f"say {i}"), says("", call("ls", f'{{"n":{i}}}', f"c{i}")), tool("x", f"c{i}")) for i in range(n)]
    return [message for exchange in said for message in exchange] + [user("a"), user("b"), user("c")]


KINDS_OF_REQUEST = {
    "opening": {"messages": [user("Please find all files that mention the moon.")]},
    "opening with a key": {"messages": [user("Hi")], "key": "known"},
    "opening with a new key": {"messages": [user("Hi")], "key": "unknown"},
    "retry": {"messages": [user("Hi")], "retries": 1},
    "foreign history": {"messages": long_talk(200)},
    "foreign history under a key": {"messages": long_talk(200), "key": "known"},
    "title": {"messages": [{"role": "system", "content": "You are a title generator."}, user("Hi")]},
    "traced summary": {
        "messages": [{"role": "system", "content": "You are a context summarization assistant."}, user("x")],
        "headers": {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
    },
    "joined answers": {"messages": [user("Hi"), says("Hello, and more of it"), user("x")]},
    "window": {"messages": [says("Hello, at some length, as nobody else says it"), user("x")]},
    "dropped answers": {"messages": [user("Hi"), user("a"), user("b"), user("c"), user("d"), user("e")]},
    "another follow-up": {"messages": [user("Hi"), says("Hello"), user("another")]},
    "title inside": {"messages": [user("Hi"), says("Hello"), user("Write a 3-5 word title for this conversation.")]},
    "summarised history": {
        "messages": [user("This session is being continued from a previous conversation that ran out of context. x")]
    },
    "named predecessor": {"messages": [user("Hi")], "continues": 1},
}


@pytest.mark.parametrize("what", KINDS_OF_REQUEST)
def test_a_request_costs_a_bounded_number_of_look_ups_and_each_has_its_index(store: Store, what: str):
    talk = Talk(store)
    talk.ask([user("Hi")], "Hello", tools=TOOLS)
    talk.ask([user("Hi"), says("Hello"), user("Write a title.")], "A title", tools=TOOLS)
    talk.ask([user("Hi")], says("", call("ls", "{}", "c1")), key="known", tools=TOOLS)
    incoming = talk.incoming(**KINDS_OF_REQUEST[what])
    run = statements(store, lambda db: place(db, incoming))
    assert 0 < len(run) <= MAX_LOOKUPS
    for sql, parameters in run:
        assert scans(store, sql, parameters) == [], sql


SPACE = " \n" * 100_000
MARKS = ("<system-reminder>", "<task>", "<feedback>", "Runtime: agent=", "<think>", "<<<BEGIN_OPENCLAW", "Generate a ")


@pytest.mark.parametrize(
    "text",
    [f"a{SPACE}b", f"<task>{SPACE}b", f"a:{SPACE}Runtime: agent", *(mark * 20_000 for mark in MARKS)],
    ids=range(10),
)
def test_the_longest_text_is_read_in_time_that_grows_with_it(text: str):
    text_of_a_tool = f"[read_file] Result: {text}\n"
    began = time.process_time()
    for role in ("system", "user", "assistant"):
        for said in (text, text_of_a_tool):
            messages = [{"role": role, "content": said}, says("x"), user(f"Write a title for this chat. {said}")]
            spine.read(messages)
            clients.runtime_key(messages)
            clients.asks_like_a_machine(messages[-1]["content"])
            clients.may_be_the_clients(said)
    assert time.process_time() - began < 5.0  # the square of these lengths takes minutes


def test_of_many_conversations_that_begin_alike_few_are_looked_at(store: Store):
    talk = Talk(store)
    for _ in range(3 * MAX_FOUND):
        talk.ask([user("Hi")], "Hello")
    spine = store.read_now(lambda db: db.exec_driver_sql("SELECT request_spine FROM turns").scalar())
    assert len(store.read_now(lambda db: find_turns(db, "", None, "", request_spine=spine))) == MAX_FOUND


@pytest.mark.slow
def test_a_hundred_thousand_idle_sessions_are_rows_and_nothing_else(store: Store):
    n, talk = 100_000, Talk(store)
    first = talk.ask([user("Hi")], "Hello")
    template = store.read_now(lambda db: dict(db.execute(schema.turns.select()).one()._mapping))
    now = time.time()

    def fill(db: Connection) -> None:
        ids = range(2, n + 1)
        named = [{"session_id": i, "user": "", "key": f"k{i}", "started_at": now, "last_at": now} for i in ids]
        db.execute(insert(schema.sessions), named)
        db.execute(insert(schema.turns), [{**template, "turn_id": i, "session_id": i} for i in ids])

    store.write_now(fill)
    # The same few look-ups as with one session, none of which reads a table.
    opening, more = [user("Hi")], [user("Hi"), says("Hello"), user("More")]
    for messages in (opening, more):
        incoming = talk.incoming(messages)
        run = statements(store, lambda db, incoming=incoming: place(db, incoming))
        assert len(run) <= 6
        assert not any(scans(store, sql, parameters) for sql, parameters in run)
    # Only what is live can be open, and only rows tell of the rest.
    live = talk.ask(more, "World", received_at=now + 10)
    assert store.write_now(end_sessions, idle_before=now + 5) == n - 1
    states = store.read_now(
        lambda db: db.exec_driver_sql("SELECT state, count(*) FROM turns GROUP BY state").fetchall()
    )
    assert dict(map(tuple, states)) == {"left_out": n - 1, "continued": 1, "finished": 1}
    assert talk.row(live).state == "finished"
    assert talk.row(first).state == "left_out" or talk.row(live).parent_turn_id == first
