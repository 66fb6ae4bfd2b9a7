"""What an answer is made of while it is generated, whatever dialect the client speaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete and valid call. It comes whole: until its last brace nobody can tell a call from text."""

    index: int
    id: str
    """At most 40 letters and digits; some clients drop everything else, and the ids would no longer match."""
    name: str
    arguments: str
    """A JSON object, compact, since some clients send it back re-serialised."""


AnswerEvent = TextDelta | ReasoningDelta | ToolCall
