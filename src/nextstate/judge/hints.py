"""Hints: short texts that say how a turn should have been done. The user's own corrective words come first.

Only a user's words ever become a hint here. Text that a tool returned never does, whatever it says, or a web page could
plant instructions in the teacher's prompt.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from nextstate.judge.evidence import user_action, user_words
from nextstate.judge.remarks import asks_something_else, remark, sentences, unquoted
from nextstate.types import Hint, Source, TurnToJudge

MIN_WIDTH = 10
"""A hint is wider than this; the published method's bound. A Chinese, Japanese or Korean character counts as two."""

MAX_CHARS = 300
"""Longer texts are cut at a sentence; whoever needs more to say what was wrong is usually setting a new task."""

# Words that complain, ask again or hold a sentence together, and do not say how. A text made of these alone is no hint.
# fmt: off
_SAYS_NOTHING_OF_HOW = frozenset(
    {
        "a", "again", "an", "and", "answer", "are", "at", "awful", "bad", "bro", "broken", "but", "can", "change",
        "come", "could", "damn", "did", "didn", "do", "does", "doesn", "don", "error", "fail", "failed", "fails",
        "for", "get", "good", "have", "hey", "hm", "hmm", "how", "i", "incorrect", "is", "isn", "it", "its", "just",
        "know", "lol", "m", "made", "make", "man", "me", "mean", "meh", "more", "my", "nah", "no", "nonsense",
        "nope", "not", "of", "off", "oh", "ok", "okay", "once", "one", "over", "please", "pls", "re", "really",
        "redo", "regenerate", "retry", "rubbish", "s", "same", "say", "sense", "serious", "so", "sorry", "start",
        "still", "stop", "sure", "t", "terrible", "than", "thanks", "that", "the", "then", "there", "thing",
        "think", "this", "time", "to", "too", "try", "ugh", "understand", "undo", "useless", "ve", "very", "was",
        "wasn", "what", "when", "why", "will", "with", "work", "working", "works", "worse", "worst", "would", "wow",
        "wrong", "wtf", "yes", "you", "your",
    }
)
# fmt: on
# Words that judge an answer as a whole. A sentence of these and the above complains, and is left out of a hint: to the
# teacher a complaint is a part of the conversation, and it apologises instead of answering. Measured on the built-in
# model, 48 questions, how many answers are short and how many name their subject: without a hint 18 and 44; with "One
# short sentence, please." behind the question 42 and 41; with a complaint before that 38 and 24; with a complaint alone
# 15 and 33.
# fmt: off
_JUDGES_THE_WHOLE = frozenset(
    {
        "after", "all", "annoying", "answers", "anything", "appreciate", "ask", "asked", "be", "boring", "breaks",
        "confused", "confusing", "details", "effort", "endless", "enough", "essay", "far", "first", "gist", "going",
        "halfway", "hard", "has", "having", "if", "keep", "lecture", "line", "lines", "long", "longer", "lost", "lot",
        "lots", "many", "middle", "missing", "much", "need", "needed", "needs", "nobody", "nothing", "novel", "now",
        "on", "only", "page", "pages", "point", "question", "quite", "rambling", "read", "reading", "real", "reply",
        "response", "right", "should", "simple", "something", "stopped", "stops", "story", "tells", "text", "through",
        "unclear", "useful", "vague", "verbose", "wall", "want", "wanted", "way", "who", "word", "words", "wordy",
    }
)
# fmt: on
_WORD = re.compile(r"[^\W_]+")


def user_hints(turn: TurnToJudge) -> tuple[Hint, ...]:
    """The user's own words as hint candidates: feedback first, then each message after the answer.

    Meant for turns whose verdict is bad; it does not ask whether the user is content. A text that is only a complaint
    ('wrong, try again') or only a question about something else is no candidate.
    """
    candidates: list[Hint] = []
    if turn.feedback is not None:
        candidates.append(Hint(text=turn.feedback.words, source=Source.FEEDBACK))
    if user_action(turn) is None:  # a resend, an undo or a thumb has no words of its own
        candidates.extend(Hint(text=text, source=Source.USER) for text in user_words(turn))
    kept = (Hint(text=text, source=hint.source) for hint in candidates if (text := directive(hint.text)))
    return merge_hints(kept)


def directive(text: str) -> str:
    """`text` trimmed to a hint of at most MAX_CHARS, or '' if it does not say how an answer should be."""
    text = unquoted(text)
    if "```" in text or "Traceback (most recent call last)" in text:
        text = re.split(r"```|Traceback \(most recent call last\)", text, maxsplit=1)[0]
    parts = [sentence for sentence in sentences(remark(text)) if _says_how(sentence)]
    hint = _bounded(parts) if parts else ""
    return hint if width(hint) > MIN_WIDTH else ""


def _says_how(sentence: str) -> bool:
    """Whether a sentence has content of its own, and is not a question about something else than the answer."""
    return not asks_something_else(sentence) and any(
        word.lower() not in _SAYS_NOTHING_OF_HOW | _JUDGES_THE_WHOLE for word in _WORD.findall(sentence)
    )


def _bounded(parts: Sequence[str]) -> str:
    """The leading sentences that fit; a first sentence that is too long is cut at a word."""
    kept = ""
    for sentence in parts:
        longer = f"{kept} {sentence}".strip()
        if len(longer) > MAX_CHARS:
            break
        kept = longer
    return kept or parts[0][: MAX_CHARS - 1].rsplit(" ", 1)[0] + "…"


def width(text: str) -> int:
    """Columns on a terminal, a measure of content that is fair to scripts with wide characters."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def merge_hints(*groups: Iterable[Hint]) -> tuple[Hint, ...]:
    """All hints in the order given, most trusted first, each text once whatever its case and spacing."""
    unique: dict[str, Hint] = {}
    for group in groups:
        for hint in group:
            unique.setdefault(" ".join(_WORD.findall(hint.text.casefold())), hint)
    trust = list(Source)
    return tuple(sorted(unique.values(), key=lambda hint: trust.index(hint.source)))
