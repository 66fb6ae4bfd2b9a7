"""Made-up clients that change what they send back in every way we know of, many conversations at once.

All conversations begin with one of two texts, so that only what was answered tells them apart. A made-up client keeps
what really happened; each request must be placed accordingly, whatever it looks like.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest

from nextstate.store.store import Store
from nextstate.types import FinishReason
from tests.collect.talk import TOOLS, Talk, call, says, tool, user


@dataclass
class Change:
    """What a client does to the answers that it sends back."""

    random: random.Random
    drop_reasoning: bool
    strip_ids: bool
    spell_arguments_anew: bool
    pad: bool
    parts: bool
    system: str
    other_system: bool
    """It puts another text into the system message with each request."""

    @classmethod
    def any(cls, source: random.Random) -> Change:
        flips = [source.random() < 0.5 for _ in range(6)]
        return cls(source, *flips[:5], system=f"You are agent {source.randrange(3)}.", other_system=flips[5])

    def sent(self, messages: list[dict]) -> list[dict]:
        number = self.random.randrange(1000) if self.other_system else 0
        return [{"role": "system", "content": f"{self.system} It is {number}."}, *map(self._message, messages)]

    def _message(self, message: dict) -> dict:
        message = dict(message)
        if self.drop_reasoning:
            message.pop("reasoning_content", None)
        if "tool_call_id" in message:
            message["tool_call_id"] = self._id(message["tool_call_id"])
        if message["role"] != "assistant":
            if self.parts:
                half = len(message["content"]) // 2
                texts = message["content"][:half], message["content"][half:]
                message["content"] = [{"type": "text", "text": text, "cache_control": {}} for text in texts]
            return message
        if self.pad and message["content"]:
            message["content"] = f"\n{message['content']}\n\n"
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in calls]
        return {**message, "refusal": None}

    def _call(self, call: dict) -> dict:
        function = dict(call["function"])
        if self.spell_arguments_anew:
            function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=1)
        return {"function": function, "type": "function", "id": self._id(call["id"])}

    def _id(self, call_id: str) -> str:
        return "".join(filter(str.isalnum, call_id)) if self.strip_ids else call_id


@dataclass
class Person:
    """One conversation, as it really goes."""

    user: str
    change: Change
    key: str | None
    history: list[dict] = field(default_factory=list)
    """As the client keeps it; ends with an answer, or is empty."""
    asked: list[dict] | None = None
    """The last request."""
    parent: int | None = None
    """The turn of the last answer in `history`."""
    before: int | None = None
    """The parent of that."""
    session: int | None = None


class World:
    def __init__(self, talk: Talk, seed: int) -> None:
        self.talk, self.random, self.words = talk, random.Random(seed), 0

    def text(self, what: str) -> str:
        self.words += 1
        return f"{what} number {self.words}"

    def person(self) -> Person:
        named = self.random.random() < 0.3
        key = f"key-{self.text('k')}" if named else None
        return Person(user=self.random.choice(["ann", "bob"]), change=Change.any(self.random), key=key)

    def check(self, person: Person, messages: list[dict], kind: str, parent: int | None, answer, **how) -> int:
        """Send a request, and see that it is placed as `kind` behind `parent` in the person's session."""
        sent = person.change.sent(messages)
        finish = how.pop("finish", FinishReason.STOP)
        turn = self.talk.ask(sent, answer, finish, user=person.user, key=person.key, tools=TOOLS, **how)
        row = self.talk.row(turn)
        assert (row.kind, row.parent_turn_id) == (kind, parent), f"{row.placed_because} {sent}"
        if person.session is None:
            person.session = row.session_id
        assert row.session_id == person.session, row.placed_because
        person.asked = messages
        return turn

    def answer(self) -> dict:
        said = says(self.text("an answer"), reasoning_content=self.text("a thought"))
        if self.random.random() < 0.4:
            arguments = json.dumps({"path": self.text("file"), "all": True}, separators=(",  ", ":   "))
            said["tool_calls"] = [call("ls", arguments, f"call_{self.words}-x")]
        return said

    def opens(self, person: Person) -> None:
        words = [user(self.random.choice(["Hi", "Please help me."]))]
        said = self.answer()
        turn = self.check(person, words, "new", None, said)
        person.history, person.parent, person.before = [*words, said], turn, None

    def follow_up(self, person: Person) -> list[dict]:
        calls = person.history[-1].get("tool_calls", ())
        results = [tool(self.text("result"), c["id"]) for c in calls]
        return [*person.history, *results, *([] if calls else [user(self.text("say"))])]

    def goes_on(self, person: Person) -> None:
        messages, said = self.follow_up(person), self.answer()
        turn = self.check(person, messages, "continuation", person.parent, said)
        person.history, person.before, person.parent = [*messages, said], person.parent, turn

    def retries(self, person: Person) -> None:
        messages = self.follow_up(person)
        first = self.check(person, messages, "continuation", person.parent, None)
        if self.random.random() < 0.5:
            self.talk.fail(first)  # else it is still being answered
        said = self.answer()
        turn = self.check(person, messages, "retry", person.parent, said)
        person.history, person.before, person.parent = [*messages, said], person.parent, turn

    def wants_another(self, person: Person) -> None:
        if len(person.history) < 3 or person.before is None:
            return
        said = self.answer()
        turn = self.check(person, person.history[:-1], "regeneration", person.before, said)
        person.history, person.parent = [*person.history[:-1], said], turn

    def edits(self, person: Person) -> None:
        last = max((i for i, m in enumerate(person.history) if m["role"] == "user"), default=0)
        if (
            last == 0
            or person.before is None
            or any(m["role"] == "tool" for m in person.history[last:])
            or last != len(person.history) - 2
        ):
            return
        said = self.answer()
        messages = [*person.history[:last], user(self.text("say it otherwise"))]
        turn = self.check(person, messages, "branch", person.before, said)
        person.history, person.parent = [*messages, said], turn

    def stops_an_answer(self, person: Person) -> None:
        if person.history[-1].get("tool_calls"):
            return
        messages = self.follow_up(person)
        self.check(person, messages, "continuation", person.parent, self.text("half"), finish=FinishReason.ABORTED)
        messages, said = [*messages, user(self.text("never mind, say"))], self.answer()
        turn = self.check(person, messages, "continuation", person.parent, said)
        person.history, person.before, person.parent = [*messages, said], person.parent, turn

    def loses_an_answer(self, person: Person) -> None:
        """A program that drops an answer which it cannot use, and says so in a message of its own."""
        messages = self.follow_up(person)
        turn = self.check(person, messages, "continuation", person.parent, self.text("useless"))
        messages, said = [*messages, user(self.text("that was no use"))], self.answer()
        last = self.check(person, messages, "continuation", turn, said)
        person.history, person.before, person.parent = [*messages, said], turn, last

    def joins_two_answers(self, person: Person) -> None:
        messages, one, two = self.follow_up(person), self.text("one half"), self.text("the other")
        turn = self.check(person, messages, "continuation", person.parent, one)
        last = self.check(person, [*messages, says(one)], "continuation", turn, two)
        person.history, person.before, person.parent = [*messages, says(f"{one}\n{two}")], None, last

    def names_it(self, person: Person) -> None:
        """A request for a title, which joins the session and changes nothing in it."""
        system = {"role": "system", "content": "Generate a short title for the conversation."}
        messages = [system, user(f"user: {person.history[0]['content']}\nassistant: {person.history[1]['content']}")]
        turn = self.talk.ask(messages, "A title", user=person.user, key=person.key)
        assert self.talk.row(turn).kind == "side"


@pytest.mark.parametrize("seed", range(12))
def test_every_request_of_any_client_is_where_it_belongs(store: Store, seed: int):
    world = World(Talk(store), seed)
    people = [world.person() for _ in range(6)]
    for person in people:
        world.opens(person)
    acts = [world.goes_on, world.goes_on, world.retries, world.wants_another, world.edits, world.stops_an_answer]
    acts += [world.loses_an_answer, world.joins_two_answers]
    for _ in range(60):
        world.random.choice([*acts, world.names_it])(world.random.choice(people))
    assert len({person.session for person in people}) == len(people)


def test_conversations_that_look_alike_to_the_last_word_are_told_apart_by_the_ids_of_their_calls(store: Store):
    talk = Talk(store)
    opening = [user("Hi")]
    turns = [talk.ask(opening, says("", call("ls", "{}", f"call_{n}")), tools=TOOLS) for n in range(4)]
    for n in (2, 0, 3, 1):
        said = says("", call("ls", "{}", f"call{n}"))
        placed = talk.place([*opening, said, tool("x", f"call{n}")], tools=TOOLS)
        assert placed.parent_turn_id == turns[n]


def test_a_regeneration_does_not_take_the_place_of_another_conversation_with_other_instructions(store: Store):
    talk = Talk(store)
    one, two = ({"role": "system", "content": f"You are agent {n}."} for n in (1, 2))
    first = talk.ask([one, user("Hi")], "Hello")
    talk.ask([two, user("Hi")], "Hello")
    again = [one, user("Hi"), says("Hello"), user("More")]
    talk.ask(again, "A")
    placed = talk.place(again)
    assert (placed.kind, placed.session_id) == ("regeneration", talk.session(first))
