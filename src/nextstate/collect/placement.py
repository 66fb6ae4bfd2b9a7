"""Where a request belongs: which session, after which answer, and whether it tells us what came of that answer.

    messages ─▶ spine.read ─▶ conversation ─┐
    headers, body ─▶ request.session_key ───┴─▶ place ─▶ kind, session, parent, next state, the reason

What a client says about itself wins; content decides the rest. Nothing is kept outside the store, and a request costs a
bounded number of look-ups by index, however many sessions there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile

from sqlalchemy import Connection

from nextstate.collect import clients, likeness, spine
from nextstate.collect.clients import Said
from nextstate.collect.next_state import read_next_state
from nextstate.collect.request import Incoming, marked_as_side, session_key, trace_id
from nextstate.collect.spine import Conversation, Step
from nextstate.store.finding import (
    find_session,
    find_turn,
    find_turns,
    first_messages,
    followers,
    load_next_state,
    newest_turn,
    newest_turns,
    recent_turns,
    waiting_turns,
    waits_for_its_conversation,
)
from nextstate.store.store import AnyRow
from nextstate.store.turns import Marks, Placement, can_be_judged_again, load_messages
from nextstate.types import Message, SkipReason, Source, TurnState

_UNFINISHED = (SkipReason.ABORTED, SkipReason.ENGINE_FAULT, SkipReason.SERVER_STOPPED)

_MAX_ANSWERS = 32
"""Answers that are looked for, from the last one backwards."""
_MAX_CHANGED = 4
"""Of these, how many are looked for even if the client changed them."""
_MAX_LOST = 4
"""Messages behind the last answer at whose end an answer may have got lost."""
_MAX_JOINED = 4
"""Answers that a client may have put together into one."""

RETRY_AFTER_S, RETRY_WITHIN_S = 0.1, 600.0
"""When the same opening, unfinished, comes from the same client again: one that has met a fault waits before it tries
again, and tries again soon. At other times it is another conversation that begins with the same words."""
_TITLE_WITHIN_S = 600.0
"""How far a conversation and the request for its title may be apart."""
_RUN_WITHIN_S = 3600.0
"""How long a run may wait for its sub-agents."""
_SUMMARY_WITHIN_S = 60.0
"""How long after a conversation's last request its summary is asked for."""


def place(db: Connection, incoming: Incoming) -> Placement:
    """Decide where a request belongs. The first line that applies decides:

    | case                                                   | kind         | session        | parent         |
    | ------------------------------------------------------ | ------------ | -------------- | -------------- |
    | marked, or known by its text, as work on the side      | side         | key, trace, content | none      |
    | names the turn that it continues                       | continuation | that turn's    | that turn      |
    | the client says that it sends it again                 | retry        | the same       | the same       |
    | the same request again, told that nothing was shown    | continuation | the same       | the first one  |
    | the same request, unfinished, or told to go on         | retry        | the same       | the same       |
    | follows a request whose answer the client dropped      | continuation | the request's  | the request, or its parent if it has no answer |
    | follows an answer that nothing has followed yet        | continuation | the answer's   | the answer     |
    | the same request, finished; has history or a key       | regeneration | the same       | the same       |
    | the same, and that came to nothing                     | continuation | the answer's   | the answer     |
    | follows an answer that something else has followed     | branch       | the answer's   | the answer     |
    | no history; a sub-agent, by mark or by its orders      | subagent     | key, or new    | none           |
    | a known key, and a rewritten history of its newest turn | continuation | the key's     | its newest turn |
    | a known key, and a history nobody recognises           | new          | the key's      | none           |
    | a known key, no history, nearly the same first words   | branch       | the key's      | none           |
    | a known key, no history                                | new          | the key's      | none           |
    | anything else                                          | new          | a new one, or that of its title | none |

    Answers are looked for from the last one backwards: a client that shortens or rewrites the beginning of its history
    still meets its last answer. With a key, only that session's turns are looked at; a key that no session has yet
    opens one.

    The same opening again, finished, without a key, is new rather than a regeneration: a benchmark, a group of rollouts
    and people who say "Hi" all look like that, and two conversations in one session are worse than one that counts as
    two. Neither answer loses anything by it, since each gets the next state that follows it.
    """  # noqa: E501
    return _Placing(db, incoming).place()


@dataclass(frozen=True, slots=True)
class _Found:
    """An earlier turn that a request follows."""

    row: AnyRow
    after: int
    """Index of the first message behind its answer."""
    how: str
    by: str = "answer"
    """answer: it is there as it was given; changed, shortened: nearly so; lost: it is not there."""


class _Placing:
    """One request on its way to its place."""

    def __init__(self, db: Connection, incoming: Incoming) -> None:
        self._db, self._in = db, incoming
        self._talk: Conversation = spine.read(incoming.messages)
        self._key = session_key(incoming)
        self._session_id = find_session(db, incoming.user, self._key) if self._key is not None else None
        self._has_history = bool(self._talk.answers)
        self._trace = trace_id(incoming)

    def place(self) -> Placement:
        side = self._side()
        if side is not None:
            return side
        named = self._named()
        if named is not None:
            return named
        if self._key is not None and self._session_id is None:
            if self._has_history:
                return self._opens("The client named a session that is new here.")
            return self._without_history()
        found = self._parent()
        again = self._again(found)
        if again is not None:
            return again
        if found is not None:
            return self._follows(found)
        return self._unrecognised()

    # -- on the side ---------------------------------------------------------------------------------------------------

    def _side(self) -> Placement | None:
        talk, marked = self._talk, marked_as_side(self._in)
        has_tools = bool(self._in.tools)
        what = clients.known_side_work(self._in.messages, has_tools, talk.said, self._max_tokens())
        if marked:
            because = "The client marked this request as a side request."
        elif what is not None:
            # Even if marked as part of the conversation: plugins that set the mark are known to miss some of these.
            because = f"It is work on the side, by its text: {what}."
        elif marked is None and clients.likely_side_work(self._in.messages, has_tools, talk.said):
            because = "It is work on the side: it asks for something about a conversation and is not one itself."
        elif marked is None and self._has_history and clients.asks_like_a_machine(self._last_words()):
            because = "It is work on the side: it tells a machine to name or sum up the conversation before it."
        elif marked is None and self._under_other_orders():
            because = "It is work on the side: a conversation of ours under orders to name it or to sum it up."
        else:
            return None
        session_id = self._session_id
        if session_id is None and self._key is None:
            session_id = self._side_session(what)
        return self._placement(session_id, "side", None, because)

    def _max_tokens(self) -> int | None:
        names = "max_tokens", "max_completion_tokens", "max_output_tokens"
        return next((value for name in names if isinstance(value := self._in.body.get(name), int)), None)

    def _last_words(self) -> str:
        """What a human, or who speaks in their place, has said behind the last answer; "" when that is nothing."""
        said = [text for text in self._talk.said if text.said is not Said.CARRIER][-1:]
        last = self._talk.steps[-1:]
        return said[0].text if said and said[0].said is Said.HUMAN and last and last[0].role == "user" else ""

    def _under_other_orders(self) -> bool:
        """Whether a system text that asks for a title or the like stands before a conversation that began otherwise."""
        orders = clients.system_text(self._in.messages)
        if not self._has_history or self._in.tools or not clients.asks_about_a_talk(orders):
            return False
        found = self._parent()
        return found is not None and found.row.kind != "side" and found.row.setting != self._talk.setting

    def _side_session(self, what: str | None) -> int | None:
        """The session of a side request that names none: by trace, by what it quotes, by time."""
        if self._trace is not None and (rows := self._turns(trace=self._trace)):
            return int(min(rows, key=lambda row: row.turn_id).session_id)  # a run begins in its own session
        for row in self._turns(request_spine=self._talk.spine):
            if row.kind == "side" and _unfinished(row):
                return int(row.session_id)
        if (found := self._parent()) is not None:
            return int(found.row.session_id)
        if self._has_history or what in ("probe", "scheduled run", "heartbeat", "memory flush"):
            return None
        now, rows = self._in.received_at, self._turns(opening=self._side_opening())
        titled = {row.session_id for row in rows if row.kind == "side"}
        for row in rows:
            recent = abs(now - row.created_at) <= _TITLE_WITHIN_S
            if row.kind != "side" and row.session_id not in titled and recent:
                return int(row.session_id)
        text = " ".join(said.text for said in self._talk.said if said.said is not Said.CARRIER)
        recent_rows = recent_turns(self._db, self._in.user)
        quoted = [(likeness.quoted(text, row), -n, row) for n, row in enumerate(recent_rows)]
        best = max(quoted, key=lambda entry: entry[:2], default=None)
        if best is not None and best[0] > 0:
            return int(best[2].session_id)
        if what in ("summary", "recap"):
            live = [row for row in recent_rows if now - row.last_at <= _SUMMARY_WITHIN_S]
            return int(live[0].session_id) if len(live) == 1 else None
        return None

    def _side_opening(self) -> str:
        """What a conversation would begin with that this request is to name: the last text in it."""
        spoken = [said.text for said in self._talk.said if said.said is Said.HUMAN]
        return spine.opening_of(spoken[-1] if spoken else "")

    # -- what the client says ------------------------------------------------------------------------------------------

    def _named(self) -> Placement | None:
        if self._in.continues is None:
            return None
        row = find_turn(self._db, self._in.user, self._in.continues)
        if row is None:
            return None
        if _unfinished(row):
            because = f"It names turn {row.turn_id}, whose answer was not finished."
            return self._placement(row.session_id, "continuation", row.parent_turn_id, because)
        for same in self._turns(request_spine=self._talk.spine):
            if same.parent_turn_id == row.turn_id and (self._in.retry_count > 0 or _unfinished(same)):
                return self._retry(same, f"It names turn {row.turn_id}, and asks again what turn {same.turn_id} asked.")
        instead_of = self._instead_of(row, self._behind()) if row.continued else None
        kind = "branch" if row.continued and instead_of is None else "continuation"
        because = f"It names turn {row.turn_id} as the one that it continues."
        return self._placement(row.session_id, kind, row.turn_id, because, after=self._behind(), instead_of=instead_of)

    # -- the same request again ----------------------------------------------------------------------------------------

    def _again(self, found: _Found | None) -> Placement | None:
        """A retry or a regeneration, if the same has been asked before."""
        last = [said for said in self._talk.said if said.said is not Said.CARRIER][-1:]
        goes_on = bool(last) and (last[0].said is Said.RETRY or last[0].retry)
        unseen = bool(last) and last[0].said is Said.UNSEEN
        rows = [row for row in self._turns(request_spine=self._talk.spine) if row.kind != "side"]
        if not rows:
            return None
        # The newest decides: a fault before it has been got over.
        row = rows[0]
        if self._in.retry_count > 0 or goes_on:
            row = next(filter(_unfinished, rows), row)
        same = f"the same request as turn {row.turn_id}"
        if self._in.retry_count > 0:
            return self._retry(row, f"The client says that it sends {same} again.")
        if unseen and not _unfinished(row):
            because = f"The client says that the answer of turn {row.turn_id} showed the user nothing."
            return self._placement(row.session_id, "continuation", row.turn_id, because, after=self._index_of_unseen())
        if unseen or goes_on:
            return self._retry(row, f"This is {same}, and the client tells the model to go on after a fault.")
        known = self._has_history or self._session_id is not None
        if row.state == TurnState.GENERATING or _unfinished(row):
            again = known or self._sent_again(row)
            return self._retry(row, f"This is {same}, which was not answered to its end.") if again else None
        if not known:
            return None
        if row.kind != "retry" and likeness.unusable(row):
            return self._retry(row, f"This is {same}, whose answer the client could not read.")
        if found is not None and found.by == "answer" and not found.row.continued:
            return None  # a twin of that conversation, which has got as far as the other
        because = f"This is {same}, which has an answer: the client wants another."
        return self._placement(row.session_id, "regeneration", row.parent_turn_id, because)

    def _sent_again(self, row: AnyRow) -> bool:
        """Whether an opening without a name, which two people may well share, is one client's second try."""
        if row.state == TurnState.GENERATING or row.wording != self._talk.wording or row.setting != self._talk.setting:
            return False
        waited_s = self._in.received_at - (row.finished_at or row.created_at)
        return bool(RETRY_AFTER_S <= waited_s <= RETRY_WITHIN_S)

    def _retry(self, row: AnyRow, because: str) -> Placement:
        # It began where the first try did, whatever the client has written over it since.
        return self._placement(row.session_id, "retry", row.parent_turn_id, because, setting=row.setting)

    def _index_of_unseen(self) -> int:
        """Index of the message in which the client says that nothing was shown."""
        messages = self._in.messages
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] == "user":
                text = clients.read_user_text(spine.flatten(messages[index].get("content")))
                if text.said is Said.UNSEEN:
                    return index
        return len(messages)

    # -- after an answer -----------------------------------------------------------------------------------------------

    def _parent(self) -> _Found | None:
        """The turn that this request follows: the last one that it can have followed."""
        lost = self._lost_answer()
        if lost is not None:
            return lost
        answers = self._talk.answers
        for n, step in enumerate(reversed(answers[-_MAX_ANSWERS:])):
            for row in self._by_ids(step, self._turns(answer_spine=step.spine)):
                how = f"It repeats the conversation up to the answer of turn {row.turn_id} and adds to it."
                return _Found(row, step.index + 1, how)
            if n < _MAX_CHANGED and (changed := self._changed_answer(step)) is not None:
                return changed
            if n == 0 and (shortened := self._shortened(step)) is not None:
                return shortened
        return None

    def _by_ids(self, step: Step, rows: list[AnyRow]) -> list[AnyRow]:
        """Of turns that look the same, first the one whose tool calls bear the ids that came back.

        Side requests come last: some of them are part of the conversation, such as a timer's, and most are not.
        """
        return sorted(rows, key=lambda row: (row.kind == "side", not (step.call_ids & likeness.call_ids(row))))

    def _changed_answer(self, step: Step) -> _Found | None:
        """The model was told the same, and what it said is nearly what the client says it said."""
        heard = [row for row in self._turns(heard_spine=step.heard) if row.kind != "side"]
        for row in heard[:_MAX_CHANGED]:
            if (last := self._joined(row, step)) is not None and last is not row:
                how = f"It repeats the conversation up to the answer of turn {last.turn_id}, joined to the one before."
                return _Found(last, step.index + 1, how, by="changed")
        for row in self._by_ids(step, [row for row in heard if likeness.similar(row, step)]):
            how = f"It repeats the conversation up to the answer of turn {row.turn_id}, which the client has changed."
            return _Found(row, step.index + 1, how, by="changed")
        return None

    def _joined(self, row: AnyRow, step: Step) -> AnyRow | None:
        """The last of several turns whose answers the client has put together, of which `row` is the first."""
        rest, rows = "".join(step.text.split()), [row]
        for _ in range(_MAX_JOINED):
            answers = ((row, answer) for row in rows if (answer := likeness.answer_of(row)) is not None and answer.text)
            begins = ((row, answer) for row, answer in answers if rest.startswith("".join(answer.text.split())))
            row, answer = next(begins, (row, None))
            if answer is None:
                return None
            rest = rest[len("".join(answer.text.split())) :]
            if not rest or answer.calls:
                return row if not rest and answer.calls == step.calls else None
            rows = followers(self._db, row) or []
        return None

    def _shortened(self, step: Step) -> _Found | None:
        """The last exchange is ours, and what came before it has been shortened or rewritten."""
        length = len(step.text) + sum(len(arguments) for _, arguments in step.calls)
        if step.block:
            rows = [
                row for row in self._turns(block_spine=step.block) if row.kind != "side" and likeness.equal(row, step)
            ]
            before = (said for said in reversed(self._talk.steps) if said.index < step.index)
            length += sum(len(said.text) for said in takewhile(lambda said: said.role != "assistant", before))
        elif self._talk.steps[0] is step:
            # Not even what the answer was given to has been kept: only the newest answers are looked at.
            sessions: list[int] = (
                [row.session_id for row in recent_turns(self._db, self._in.user)]
                if self._session_id is None
                else [self._session_id]
            )
            rows = [row for each in sessions for row in newest_turns(self._db, each) if likeness.equal(row, step)]
        else:
            return None
        telling = self._session_id is not None or self._summary() is not None or bool(step.call_ids)
        if not rows or not (telling or length >= likeness.TELLING) or len({row.session_id for row in rows}) > 1:
            return None
        row = self._by_ids(step, rows)[0]
        how = f"It repeats the last exchange of turn {row.turn_id}; the client has shortened what came before."
        return _Found(row, step.index + 1, how, by="shortened")

    def _lost_answer(self) -> _Found | None:
        """A request whose end lies behind the last answer: the client has dropped the answer that it got."""
        after = self._talk.after_answer
        opening = not self._has_history and self._session_id is None
        for step in reversed(after[:-1][-_MAX_LOST:]):
            for row in [*self._turns(request_spine=step.spine), *self._with_more_answers(step)]:
                if row.kind == "side":
                    continue
                recent = self._in.received_at - row.created_at <= RETRY_WITHIN_S
                same = row.setting == self._talk.setting and row.state != TurnState.GENERATING
                if opening and not (same and recent and not row.continued):
                    continue  # another conversation that begins with the same words
                how = f"It goes on after the request of turn {row.turn_id}, whose answer the client has dropped."
                return _Found(row, step.index + 1, how, by="lost")
        return None

    def _with_more_answers(self, step: Step) -> list[AnyRow]:
        """Requests that said the same up to `step` and hold answers that the client has dropped since."""
        if step is self._talk.steps[0]:
            return []
        rows = self._turns(heard_spine=step.heard)
        if not self._has_history:
            return rows
        ours = [(s.role, s.text, s.calls) for s in self._talk.steps if s.index <= step.index]
        return [row for row in rows[:2] if likeness.holds(self._asked(row), ours)]

    def _asked(self, row: AnyRow) -> Conversation:
        """The request of a turn."""
        messages = load_messages(self._db, row.turn_id)
        return spine.read(messages if row.answer is None else messages[:-1])

    def _instead_of(self, row: AnyRow, after: int) -> int | None:
        """The turn that is taken for what follows `row`, if that came to nothing and this request knows nothing of it.

        A client's instruction about the conversation, and words whose answer the client did not wait for: the
        conversation goes on from the same answer without them. Where anything else has followed, this is an edit.
        """
        if not can_be_judged_again(row) or clients.may_be_the_clients(self._last_words()):
            return None
        known, after_it = load_next_state(self._db, row.turn_id), followers(self._db, row)
        ours, _ = read_next_state(self._in.messages[after:])
        if known is None or not ours or not after_it or not all(map(_came_to_nothing, after_it)):
            return None
        turn_id, messages = known
        return None if ours[: len(messages)] == messages else turn_id

    def _follows(self, found: _Found) -> Placement:
        row = found.row
        if _unfinished(row) or row.state == TurnState.GENERATING:
            because = f"It goes on after turn {row.turn_id}, which was not answered to its end."
            if found.by != "lost":
                return self._placement(row.session_id, "continuation", row.turn_id, because)
            after = self._behind() if row.parent_turn_id is not None else None
            newest = newest_turn(self._db, row.session_id)
            kind = "continuation" if newest is None or newest.turn_id < row.turn_id else "branch"
            return self._placement(row.session_id, kind, row.parent_turn_id, because, after=after)
        kind, how, instead_of = "continuation", found.how, None
        if row.continued and (instead_of := self._instead_of(row, found.after)) is not None:
            how = f"It goes on from the answer of turn {row.turn_id}; turn {instead_of} before it came to nothing."
        elif row.continued and found.by != "shortened":
            kind, how = "branch", f"It goes on from the answer of turn {row.turn_id} in another way than before."
        if any(step.index >= found.after for step in self._talk.answers):
            how = f"It repeats the conversation up to the answer of turn {row.turn_id}; later answers are not ours."
        return self._placement(row.session_id, kind, row.turn_id, how, after=found.after, instead_of=instead_of)

    # -- without a parent ----------------------------------------------------------------------------------------------

    def _unrecognised(self) -> Placement:
        if self._key is None and (summarised := self._summarised()) is not None:
            return summarised
        if not self._has_history:
            return self._without_history()
        if self._session_id is None:
            return self._opens("No answer of ours was recognised in it.")
        newest = newest_turn(self._db, self._session_id)
        if newest is None:
            because = "The client named the session, which has no finished turn yet."
            return self._placement(self._session_id, "new", None, because)
        if not self._knows(newest):
            because = f"The client named the session; nothing of its newest turn {newest.turn_id} is in this history."
            return self._placement(self._session_id, "new", None, because)
        because = f"The client named the session and rewrote its history; its newest turn is {newest.turn_id}."
        return self._placement(self._session_id, "continuation", newest.turn_id, because, after=self._behind())

    def _knows(self, newest: AnyRow) -> bool:
        """Whether a history in which no answer of ours was recognised goes on after a turn all the same.

        A name may stand for a whole batch of requests, each with a made-up history of its own.
        """
        if self._summary() is not None or (self._trace is not None and self._turns(trace=self._trace)):
            return True
        ours, theirs = self._talk.answers, self._asked(newest)
        if theirs.answers and theirs.answers[-1].spine == ours[-1].spine:
            return False  # another question behind the same made-up history
        if any(likeness.is_telling(step) and likeness.similar(newest, step) for step in ours[-_MAX_CHANGED:]):
            return True
        asked = next((step.text for step in reversed(theirs.steps) if step.role == "user"), None)
        if any(step.role == "user" and step.text == asked and step.index < ours[-1].index for step in self._talk.steps):
            return True
        return self._talk.opening == theirs.opening and len(ours) > len(theirs.answers)

    def _summary(self) -> str | None:
        """The text that the client has put in place of the beginning of the conversation."""
        return next((said.text for said in self._talk.said[:3] if said.said is Said.SUMMARY), None)

    def _summarised(self) -> Placement | None:
        """The conversation whose summary, which is an answer of ours, this one begins with."""
        summary = self._summary()
        if summary is None:
            return None
        for row in recent_turns(self._db, self._in.user, side=True):
            start = likeness.folded(row.answer or "")[:200]
            newest = (
                newest_turn(self._db, row.session_id)
                if len(start) >= 24 and start in likeness.folded(summary)
                else None
            )
            if newest is not None:
                because = f"It begins with the summary that turn {row.turn_id} gave of its session."
                return self._placement(row.session_id, "continuation", newest.turn_id, because, after=self._behind())
        return None

    def _behind(self) -> int:
        """Index of the first message behind the last answer."""
        return self._talk.answers[-1].index + 1 if self._has_history else 0

    def _without_history(self) -> Placement:
        session_id = self._session_id
        if clients.is_subagent(self._talk.said, dict(self._in.headers)):
            return self._placement(session_id, "subagent", None, "The client says that a sub-agent speaks.")
        orders = self._orders()
        if orders is not None:
            because = f"Its first words are the orders that turn {orders.turn_id} gave in a tool call."
            return self._placement(session_id, "subagent", None, because)
        if session_id is None:
            named = self._key is not None
            return self._opens("The client named a session that is new here." if named else "It has no history.")
        newest = newest_turn(self._db, session_id)
        if newest is not None and self._summary() is not None:
            because = (
                f"The client named the session and put a summary in place of its history up to turn {newest.turn_id}."
            )
            return self._placement(session_id, "continuation", newest.turn_id, because, after=0)
        if waiting := waiting_turns(self._db, session_id):
            because = f"The client named a session that waits for the tool calls of turn {waiting[0].turn_id}."
            return self._placement(session_id, "subagent", None, because)
        if newest is not None and self._edits_the_opening(session_id):
            because = "The client named the session; its first words are those of the session, edited."
            return self._placement(session_id, "branch", None, because)
        return self._placement(session_id, "new", None, "The client named the session; it has no history.")

    def _orders(self) -> AnyRow | None:
        """The turn that called for a sub-agent with the very words that this request begins with."""
        words = [said.text for said in self._talk.said if said.said is Said.HUMAN]
        if not words or len(words[0]) < 16:
            return None
        # Most of what it begins with must be orders: a person may well repeat a command that a tool is running.
        at_least = max(16, 0.6 * len(words[0]))
        rows = recent_turns(self._db, self._in.user)
        if self._session_id is not None:
            rows += waiting_turns(self._db, self._session_id)
        for row in rows:
            waits = row.tool_calls and not row.continued and self._in.received_at - row.created_at <= _RUN_WITHIN_S
            if waits and any(text in words[0] for text in likeness.strings(row.tool_calls) if len(text) >= at_least):
                return row
        return None

    def _edits_the_opening(self, session_id: int) -> bool:
        before, now = (
            next((text.text for text in said if text.said is Said.HUMAN), "")
            for said in (spine.read(first_messages(self._db, session_id)).said, self._talk.said)
        )
        return SequenceMatcher(None, before[:400], now[:400], autojunk=False).ratio() >= 0.6

    def _opens(self, because: str) -> Placement:
        """A new session; the one of its title, if that was asked for first."""
        session_id = None
        if not self._has_history:
            for row in reversed(self._turns(opening=self._talk.opening, anywhere=True)):
                recent = self._in.received_at - row.created_at <= _TITLE_WITHIN_S
                if row.kind == "side" and recent and waits_for_its_conversation(self._db, row.session_id):
                    session_id = row.session_id
                    because = f"{because} Its title was asked for in turn {row.turn_id}."
                    break
        return self._placement(session_id, "new", None, because)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _turns(self, *, anywhere: bool = False, **mark: str) -> list[AnyRow]:
        session_id = None if anywhere else self._session_id
        return find_turns(self._db, self._in.user, session_id, self._talk.setting, **mark)

    def _placement(
        self,
        session_id: int | None,
        kind: str,
        parent_turn_id: int | None,
        because: str,
        *,
        after: int | None = None,
        setting: str | None = None,
        instead_of: int | None = None,
    ) -> Placement:
        """A placement; messages from `after` on are what its parent's answer led to."""
        talk = self._talk
        next_state: tuple[Message, ...] = ()
        source: Source | None = None
        if after is not None:
            next_state, source = read_next_state(self._in.messages[after:])
        return Placement(
            session_id=session_id,
            session_key=self._key,
            parent_turn_id=parent_turn_id,
            kind=kind,
            because=because,
            next_state=next_state,
            source=source,
            instead_of=instead_of,
            marks=Marks(
                heard_spine=talk.heard,
                block_spine=talk.block,
                opening=self._side_opening() if kind == "side" else talk.opening,
                setting=talk.setting if setting is None else setting,
                wording=talk.wording,
                trace=self._trace,
            ),
        )


def _unfinished(row: AnyRow) -> bool:
    return row.reason in _UNFINISHED


def _came_to_nothing(row: AnyRow) -> bool:
    """Whether what followed an answer may have been no part of the conversation."""
    if _unfinished(row):
        return True
    words = [clients.read_user_text(spine.flatten(m.get("content"))) for m in row.messages if m["role"] == "user"]
    return not row.continued and bool(words) and clients.may_be_the_clients(words[-1].text)
