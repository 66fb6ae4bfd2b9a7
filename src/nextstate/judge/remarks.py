"""What a user says about the answer, without the next request behind it.

"Too long. One sentence, please. What color is coal?" is a verdict on one answer and the question for the next; a
small judge that reads both takes it for a change of topic.
"""

from __future__ import annotations

import re

_SENTENCE_END = re.compile(r"(?<=[.!?。！？;])\s+|(?<=[。！？])|\n+")
_ASKS_FOR_A_CHANGE = re.compile(
    r"^(?:please\s+)?(?:can|could|would|will|why|won't|can't|couldn't)\b.*\b(?:you|u|we)\b|\binstead\b", re.IGNORECASE
)
_QUOTED = re.compile(r"^[ \t]*```.*?(?:^[ \t]*```[ \t]*$|\Z)|^[ \t]*>[^\n]*$", re.DOTALL | re.MULTILINE)


def sentences(text: str) -> list[str]:
    """The sentences of a text, with single blanks."""
    return [" ".join(part.split()) for part in _SENTENCE_END.split(text) if part and part.strip()]


def asks_something_else(sentence: str) -> bool:
    """Whether a sentence is a question that does not ask for another answer."""
    return sentence.rstrip(" \"'").endswith("?") and not _ASKS_FOR_A_CHANGE.search(sentence) and sentence.isascii()


def unquoted(text: str) -> str:
    """`text` without fenced blocks and quoted lines: whoever said those is to have no voice in the verdict."""
    return _QUOTED.sub("", text).strip()


def remark(text: str) -> str:
    """`text` without what it quotes and without the questions at its end, unless it is nothing but these."""
    text = unquoted(text) or text
    parts = sentences(text)
    while parts and asks_something_else(parts[-1]):
        parts.pop()
    return " ".join(parts) or text
