"""A simulated user: asks, reads the reply, and says what such a person would say next.

    open()        -> the first question
    react(reply)  -> the next message, or None when the user leaves

The user has a wish that no question mentions. It shows only in what the user says after a reply, and what is said
never contradicts the wish: complaints follow replies that miss it, praise follows replies that meet it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from nextstate.people.questions import Question
from nextstate.people.wishes import SHORT, Fault, Wish
from nextstate.people.wordings import COMPLAINTS, DIRECTIVES, OFF_TOPIC, PRAISE, QUESTION_LEADS, REPEAT_LEADS


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How often a user does what. Each group is of shares of 1; what is missing to 1 is said under its last field."""

    complain: float = 0.80
    """After a miss: say what is wrong."""
    ask_on_after_miss: float = 0.10
    """After a miss: ask the next question without a comment."""
    off_topic: float = 0.05
    """After a miss: make a remark that has nothing to do with the reply, then ask the next question.
    In the rest of cases the user leaves."""

    praise: float = 0.45
    """After a reply as wished: say so."""
    ask_on_after_hit: float = 0.45
    """After a reply as wished: ask the next question without a comment. In the rest of cases the user leaves."""

    direct: float = 0.80
    """Of complaints: how often words follow on how to do better."""

    complain_and_repeat: float = 0.40
    """Of complaints: with the same question again."""
    complain_and_ask_on: float = 0.30
    """Of complaints: with the next question. The rest stands alone, and the model tries again."""

    praise_alone: float = 0.20
    """Of praise: without a next question; the user then leaves. A session that has had its answers ends like this."""

    session_replies: tuple[float, float, float] = (0.5, 0.3, 0.2)
    """Weights of reading 2, 3 or 4 replies before leaving."""

    def __post_init__(self) -> None:
        groups = (
            (self.complain, self.ask_on_after_miss, self.off_topic),
            (self.praise, self.ask_on_after_hit),
            (self.direct,),
            (self.complain_and_repeat, self.complain_and_ask_on),
            (self.praise_alone,),
        )
        for group in groups:
            if min(group) < 0 or sum(group) > 1 + 1e-9:
                raise ValueError(f"shares {group} are not between 0 and 1 in all")


class SimulatedUser:
    """One person with one wish, in one session at a time; `open` starts the next one.

    The same seed, questions and replies give the same words. No question is asked twice before all were asked.
    """

    def __init__(
        self, questions: Sequence[Question], *, seed: int, wish: Wish = SHORT, habits: Habits | None = None
    ) -> None:
        if not questions:
            raise ValueError("a simulated user needs at least one question to ask")
        self.wish = wish
        self._habits = habits or Habits()
        self._random = random.Random(seed)
        self._questions = tuple(questions)
        self._unasked: list[Question] = []
        self._question: Question | None = None
        self._replies_left = 0
        self._said_goodbye = False

    def open(self) -> str:
        """Start a session: a bare question, with no greeting and no sign of the wish."""
        self._replies_left = self._random.choices((2, 3, 4), weights=self._habits.session_replies)[0]
        self._said_goodbye = False
        return self._next_question()

    def react(self, reply: str) -> str | None:
        """What the user says to a reply; None when the user says no more. The last reply gets no reaction."""
        if self._question is None:
            raise RuntimeError("no session is open: call open() before react()")
        self._replies_left -= 1
        message = None
        if self._replies_left > 0 and not self._said_goodbye:
            fault = self.wish.fault(reply)
            message = self._after_hit() if fault is None else self._after_miss(fault)
        if message is None:
            self._question = None
        return message

    def _after_miss(self, fault: Fault) -> str | None:
        habits, draw = self._habits, self._random.random()
        if draw < habits.complain:
            return self._complaint(fault)
        if draw < habits.complain + habits.ask_on_after_miss:
            return self._ask_on()
        if draw < habits.complain + habits.ask_on_after_miss + habits.off_topic:
            return f"{self._random.choice(OFF_TOPIC)} {self._next_question()}"
        return None

    def _after_hit(self) -> str | None:
        habits, draw = self._habits, self._random.random()
        if draw < habits.praise:
            return self._approval()
        if draw < habits.praise + habits.ask_on_after_hit:
            return self._ask_on()
        return None

    def _complaint(self, fault: Fault) -> str:
        words = self._random.choice(COMPLAINTS[fault])
        if self._random.random() < self._habits.direct:
            words += " " + self._random.choice(DIRECTIVES[fault])
        draw = self._random.random()
        if draw < self._habits.complain_and_repeat:
            return f"{words} {self._same_question()}"
        if draw < self._habits.complain_and_repeat + self._habits.complain_and_ask_on:
            return f"{words} {self._ask_on()}"
        return words

    def _approval(self) -> str:
        words = self._random.choice(PRAISE)
        # With one reply left, a next question would get an answer that nobody reacts to.
        if self._replies_left == 1 or self._random.random() < self._habits.praise_alone:
            self._said_goodbye = True
            return words
        return f"{words} {self._ask_on()}"

    def _ask_on(self) -> str:
        return self._random.choice(QUESTION_LEADS) + self._next_question()

    def _same_question(self) -> str:
        assert self._question is not None
        return self._random.choice(REPEAT_LEADS) + self._question.text

    def _next_question(self) -> str:
        if not self._unasked:
            self._unasked = self._random.sample(self._questions, k=len(self._questions))
        self._question = self._unasked.pop()
        return self._question.text
