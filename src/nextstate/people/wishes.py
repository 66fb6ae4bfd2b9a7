"""What a simulated user wants of every reply and never says when asking.

A wish is a rule on text, so whether a reply meets it is a fact that needs no judge: the judge's verdicts, which come
from the user's words alone, can be compared with it.
"""

from __future__ import annotations

import re
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
    BOLD = "bold"
    NUMBERED_LIST = "numbered_list"
    """A line that opens with a number and a full stop or a bracket."""
    BOXED = "boxed"
    STEPS_MISSING = "steps_missing"
    """Too little for a solution with its steps."""
    TOO_SHORT = "too_short"
    NO_PRAISE = "no_praise"


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


def count_tokens(text: str) -> int:
    """Words, numbers and punctuation marks, each one token, so that a rule means the same whatever model answers.

    Close to what models count in plain English: 'Well done, Anna!' has 5.
    """
    return len(re.findall(r"\w+|[^\w\s]", text))


COMMENT_TOKENS = 100
"""Fewest tokens of a comment that the assistant teacher takes."""

_BOLD = re.compile(r"\*\*[^\s*][^*\n]*\*\*|__[^_\n]+__|<(?:b|strong)>", re.IGNORECASE)
_NUMBERED = re.compile(r"^[ \t>*#]*(?:step[ \t]+)?\d{1,2}[.):](?=\s|$)", re.MULTILINE | re.IGNORECASE)
_BOXED = re.compile(r"\\f?boxed\b")
_PRAISE = re.compile(
    r"\b(?:well done|excellent|fantastic|wonderful|brilliant|superb|awesome|impressive|bravo|congratulations"
    r"|proud of you|keep it up|keep up the"
    r"|(?:great|good|nice|amazing|terrific) (?:job|work|effort|thinking|reasoning|start|solution))\b",
    re.IGNORECASE,
)
_FEWEST_NUMBERS = 3
"""In a solution of one step: two that are given and one that is found."""


def _handwritten(reply: str) -> Fault | None:
    if _BOLD.search(reply):
        return Fault.BOLD
    if _NUMBERED.search(reply):
        return Fault.NUMBERED_LIST
    if _BOXED.search(reply):
        return Fault.BOXED
    return Fault.STEPS_MISSING if len(re.findall(r"\d+", reply)) < _FEWEST_NUMBERS else None


def _thorough(reply: str) -> Fault | None:
    return Fault.TOO_SHORT if count_tokens(reply) < COMMENT_TOKENS else None


def _warm(reply: str) -> Fault | None:
    return None if _PRAISE.search(reply) else Fault.NO_PRAISE


HANDWRITTEN = Wish(
    name="handwritten",
    description="no bold, no numbered list, no boxed answer, and the steps kept",
    rule=_handwritten,
)
"""The student's: homework that does not look as if a machine had written it."""

THOROUGH = Wish(name="thorough", description=f"comments of at least {COMMENT_TOKENS} tokens", rule=_thorough)
"""The assistant teacher's."""

WARM = Wish(name="warm", description="comments with praise in them, such as 'well done'", rule=_warm)
"""The teacher's."""
