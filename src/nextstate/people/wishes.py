"""What a simulated user wants of every reply and never says when asking.

A wish is a rule on text, so whether a reply meets it is a fact that needs no judge: the judge's verdicts, which come
from the user's words alone, can be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

SHORT_WORDS = 25
"""Longest reply, in words, that is still short."""


class Fault(StrEnum):
    """Why a reply does not meet a wish."""

    NO_SENTENCE = "no_sentence"
    """Nothing that can be read as a sentence: empty, a word or two, one word repeated, no letters."""
    TOO_LONG = "too_long"
    BROKEN_OFF = "broken_off"
    """The last sentence has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    name: str
    description: str
    """One line for people who read a report; it is never shown to the model."""
    rule: Callable[[str], Fault | None]

    def fault(self, reply: str) -> Fault | None:
        """Why the reply does not meet the wish; None when it does. No wish is met by something unreadable."""
        return Fault.NO_SENTENCE if is_degenerate(reply) else self.rule(reply)

    def met(self, reply: str) -> bool:
        return self.fault(reply) is None


def count_words(text: str) -> int:
    """Stretches between blanks that hold a letter or a digit; a lone dash is no word."""
    return sum(any(sign.isalnum() for sign in stretch) for stretch in text.split())


def is_degenerate(reply: str) -> bool:
    """Whether the reply has fewer than three different words with a letter in them."""
    stretches = {stretch.strip(".,:;!?*\"'").lower() for stretch in reply.split()}
    return sum(any(sign.isalpha() for sign in stretch) for stretch in stretches) < 3


def ends_properly(reply: str) -> bool:
    """Whether the reply closes with '.', '!' or '?', whatever quotes, brackets or stars stand after it."""
    return reply.rstrip().rstrip("\"'”’)]*_").endswith((".", "!", "?"))


def _short(reply: str) -> Fault | None:
    if count_words(reply) > SHORT_WORDS:
        return Fault.TOO_LONG
    return None if ends_properly(reply) else Fault.BROKEN_OFF


SHORT = Wish(
    name="short",
    description=f"at most {SHORT_WORDS} words, in sentences that end",
    rule=_short,
)
"""The demo's wish. The built-in model meets it in about a fifth of its answers."""
