"""The watch: is what people say since a version began to serve worse than what they said before?

    reference   verdicts on turns of the versions before it, on the line that leads to it
    live        verdicts on its own turns, and on those of the versions that were built on it and serve

The test is an e-process: a number that, as long as the version is at least as good as those before it, exceeds
1/alpha at any time at all with a probability of at most alpha. So it may be looked at after every verdict, and be acted
on at once. Nothing here needs torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection

from nextstate.config import WatchConfig
from nextstate.store import learning, watching
from nextstate.store.store import Store
from nextstate.store.watching import LineVersion, SignedTurn

log = logging.getLogger(__name__)

ODDS_RATIOS = (0.5, 0.2, 0.05)
"""How much worse a bad version may be: its odds of a good verdict over the reference's. 0.2 is a fall from 70 % to
32 %. A third of the stake is on each."""

MOST_REFERENCES = 8
"""Reference verdicts that one live verdict is set against, at most; more would add little."""

_SHARE = 40
"""A live verdict takes a fortieth of what is left of the reference, so that it lasts while the evidence grows."""

WATCHED = 10
"""Newest versions of the line whose tests are followed; what is older has served long enough to be what it is."""

LONGEST = 400
"""Live verdicts after which a version's test is over: it has served its time without evidence against it."""

_POLL_S = 1.0


def reference_counts(live: int, *, known: int) -> list[int]:
    """How many reference verdicts each of the live ones is set against.

    Args:
        known: reference verdicts there were when the version was made. What comes later must not change the counts:
            they are part of the bet, which is placed before its outcome is known.
    """
    counts, left = [], known
    for _ in range(live):
        counts.append(max(1, min(MOST_REFERENCES, left // _SHARE)))
        left -= counts[-1]
    return counts


def e_value(live: Sequence[bool], reference: Sequence[bool], *, known: int) -> float:
    """Evidence that the live verdicts are less often good than the reference: 1 for none, 100 for one in a hundred.

    A live verdict is put into a group with k reference verdicts, none of which is used twice. Given that s of these
    k + 1 are good, it is itself the good one with probability s / (k + 1) if all are equally likely to be good, with
    more if it is likelier, and with s r / (s r + f), f = k + 1 - s, if its odds are r times those of the others (the
    conditional likelihood behind Fisher's exact test). The bet on r multiplies its stake by

        (k + 1)     / (s r + f)    when the live verdict is bad
        (k + 1) r   / (s r + f)    when it is good

    whose expectation is 1 at equality and less when the version is better, whatever the rates are. So is that of the
    mean over ODDS_RATIOS, and Ville's inequality (1939) bounds the chance that it ever reaches 1 / alpha by alpha.
    Turner, Ly and Gruenwald, "Generic E-variables for exact sequential k-sample tests that allow for optional stopping"
    (2024), treat such tests in general. Where the reference is used up, the rest of the live verdicts waits.

    Args:
        live: whether good, in the order in which they were given.
        reference: the same, in an order that does not change when more are given.
        known: see `reference_counts`.
    """
    stakes = [0.0] * len(ODDS_RATIOS)
    used = 0
    for good, count in zip(live, reference_counts(len(live), known=known), strict=True):
        group = reference[used : used + count]
        if len(group) < count:
            break
        used += count
        goods = sum(group) + good
        bads = count + 1 - goods
        for n, ratio in enumerate(ODDS_RATIOS):
            stakes[n] += math.log((ratio if good else 1.0) * (count + 1) / (goods * ratio + bads))
    return sum(math.exp(min(stake, 700.0)) for stake in stakes) / len(stakes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A version against what served before it."""

    version: int
    live_good: int
    live_bad: int
    reference_good: int
    reference_bad: int
    e_value: float

    def decides(self, config: WatchConfig) -> bool:
        """Whether there is evidence enough to go back to the version before it."""
        fewest = min(self.live_good + self.live_bad, self.reference_good + self.reference_bad)
        return fewest >= config.min_turns and self.e_value >= 1 / config.alpha

    def __str__(self) -> str:
        return (
            f"{self.live_good} of {self.live_good + self.live_bad} verdicts are good since version {self.version}, "
            f"{self.reference_good} of {self.reference_good + self.reference_bad} were before; "
            f"e-value {self.e_value:.3g}"
        )


def compare(
    line: Sequence[LineVersion], watched: Sequence[LineVersion], turns: Sequence[SignedTurn]
) -> list[Comparison]:
    """Each watched version of a line against those before it, newest first.

    Args:
        line: from the version that serves back to the base.
        watched: the first few of them.
        turns: in the order in which their verdicts were given.
    """
    found = []
    for n, version in enumerate(watched):
        since = {newer.version for newer in line[: n + 1]}
        before = {older.version for older in line[n + 1 :]}
        live = [turn.good for turn in turns if turn.version in since][:LONGEST]
        # Newest first, since the people and their tasks change; what was said later comes behind, and moves nothing.
        known = [turn.good for turn in turns if turn.version in before and turn.at < version.created_at][::-1]
        later = [turn.good for turn in turns if turn.version in before and turn.at >= version.created_at]
        reference = [*known, *later][: LONGEST * MOST_REFERENCES]
        found.append(
            Comparison(
                version=version.version,
                live_good=sum(live),
                live_bad=len(live) - sum(live),
                reference_good=sum(reference),
                reference_bad=len(reference) - sum(reference),
                e_value=e_value(live, reference, known=len(known)),
            )
        )
    return found


def comparisons(db: Connection) -> list[Comparison]:
    """`compare` for what the store holds now."""
    since = watching.window_start(db)
    line = watching.serving_line(db)
    # Of an older version the first verdicts are out of sight; and a bet whose beginning moves is none.
    watched = [version for version in line[:-1] if version.created_at >= since][:WATCHED]
    return compare(line, watched, watching.signed_turns(db, since=since))


async def watch_loop(store: Store, config: WatchConfig) -> None:
    """Go back to the version before a bad one, as soon as verdicts show that it is one.

    reads    signed verdicts and feedback on turns of the versions that serve and served
    writes   marks on the bad version and on what was built on it; the version before it as a candidate; an event
    waits    polls, and looks again when there is a new verdict
    crash    nothing is kept in memory: the same verdicts lead to the same decision
    """
    seen = None
    while True:
        if await store.read(learning.goes_back):
            await store.write(learning.go_back)
        elif (newest := await store.read(watching.newest_signal)) != seen:
            worst = max(await store.read(comparisons), key=lambda one: one.e_value, default=None)
            if worst is None or not worst.decides(config):
                seen = newest
            elif await store.read(learning.candidate) is None:
                back_to = await store.write(learning.take_back, worst.version, str(worst), asdict(worst))
                log.warning("version %d is taken back, version %d is to serve: %s", worst.version, back_to, worst)
        await asyncio.sleep(_POLL_S)
