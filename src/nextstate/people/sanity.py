"""Does the text still look like text? Measures that read replies and nothing else.

A model that learns to please can learn it badly: by repeating itself, by giving one answer to every question, by
saying next to nothing. Each measure is None where there is nothing to measure, which is not 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nextstate.people.questions import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Sanity:
    """The measures of one set of replies."""

    replies: int
    mean_words: float | None
    distinct_word_share: float | None
    repeated_trigram_share: float | None
    distinct_reply_share: float | None
    on_subject_share: float | None


def measure(questions: Sequence[Question], replies: Sequence[str]) -> Sanity:
    """All measures of replies to questions, one reply a question, in order."""
    return Sanity(
        replies=len(replies),
        mean_words=mean_words(replies),
        distinct_word_share=distinct_word_share(replies),
        repeated_trigram_share=repeated_trigram_share(replies),
        distinct_reply_share=distinct_reply_share(replies),
        on_subject_share=on_subject_share(questions, replies),
    )


def words(text: str) -> list[str]:
    """Lower-case runs of letters, digits and apostrophes."""
    return re.findall(r"[^\W_]+(?:['’][^\W_]+)*", text.lower())


def mean_words(replies: Sequence[str]) -> float | None:
    """sum over replies of words / replies; an empty reply counts, with 0 words."""
    return _mean([len(words(reply)) for reply in replies])


def distinct_word_share(replies: Sequence[str], *, window: int = 10) -> float | None:
    """Mean over replies of the mean over every `window` words in a row of (different words / window).

    A long text has a lower share of different words than a short one by its length alone; windows of equal length
    can be compared. Replies of fewer than `window` words say nothing and are left out.
    """
    shares = []
    for reply in replies:
        said = words(reply)
        share = _mean([len(set(said[i : i + window])) / window for i in range(len(said) - window + 1)])
        if share is not None:
            shares.append(share)
    return _mean(shares)


def repeated_trigram_share(replies: Sequence[str]) -> float | None:
    """Mean over replies of 1 - different runs of three words / all runs of three words.

    Replies of fewer than three words are left out. It rises with length, so that a fall after learning to be short
    proves nothing, while a rise does.
    """
    shares = []
    for reply in replies:
        said = words(reply)
        trigrams = list(zip(said, said[1:], said[2:], strict=False))
        if trigrams:
            shares.append(1 - len(set(trigrams)) / len(trigrams))
    return _mean(shares)


def distinct_reply_share(replies: Sequence[str]) -> float | None:
    """Different replies, compared word by word, / replies. One answer to all of 4 questions gives 1/4."""
    if not replies:
        return None
    return len({tuple(words(reply)) for reply in replies}) / len(replies)


def on_subject_share(questions: Sequence[Question], replies: Sequence[str]) -> float | None:
    """Share of replies that name their question's subject: at least one of its words of three letters or more.

    A plural 's' on either side is no difference. Right answers may well not name it ("It is white."), so only a
    change from one version to the next means something.
    """
    return _mean(
        [
            float(bool(_stems(question.subject) & _stems(reply)))
            for question, reply in zip(questions, replies, strict=True)
        ]
    )


_FILLERS = frozenset({"the", "and", "for", "that", "with", "who", "are", "does", "have", "has", "person", "place"})


def _stems(text: str) -> set[str]:
    return {word.removesuffix("s") for word in words(text) if len(word) >= 3} - _FILLERS


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
