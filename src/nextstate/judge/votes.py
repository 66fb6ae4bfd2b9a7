"""Votes to a verdict. Absent is not zero: a judge that abstains casts None, and None never becomes NEUTRAL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nextstate.types import Vote

SIGN_AT = 0.5
"""Probability from which a vote is good or bad; docs/judge.md has what that was measured to be worth."""

NEUTRAL_AT = 0.4
"""Probability from which a vote is neutral. Lower, because a neutral turn trains nothing and a mistake is cheap."""


def majority(votes: Sequence[Vote | None]) -> Vote | None:
    """The vote cast most often; a tie for first place is neutral, and None means that every judge abstained."""
    top = Counter(vote for vote in votes if vote is not None).most_common(2)
    if not top:
        return None
    return Vote.NEUTRAL if len(top) == 2 and top[0][1] == top[1][1] else top[0][0]


def vote_of(
    probabilities: Mapping[Vote, float], *, sign_at: float = SIGN_AT, neutral_at: float = NEUTRAL_AT
) -> Vote | None:
    """The most probable value if it is probable enough, else None: an abstention."""
    best = max(Vote, key=lambda vote: probabilities[vote])
    needed = neutral_at if best is Vote.NEUTRAL else sign_at
    return best if probabilities[best] >= needed else None
