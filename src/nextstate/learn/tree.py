"""Token sequences as a tree, in which a token that several sequences share is one row.

Two sequences share a token where they agree on it and on everything before it, so that in each its keys, values and
log-probs are the same numbers:

    a b c d e      rows  0 1 2 3 4          runs   0-4
    a b c f              0 1 2 5                     `- 5-5 behind rows 0-2
    a b g h i            0 1 6 7 8                   `- 6-8 behind rows 0-1

A run is a stretch of rows that follow one another in all sequences that reach them. The longest sequence goes in first:
a session whose prompts only grow is then one run, and one whose prompts each end in passing words is a trunk with a
short run a turn, every one of them behind a single stretch of the trunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Run:
    start: int
    """Its first row."""
    length: int
    before: tuple[slice, ...]
    """Rows of the tokens before it, from the sequence's first on; none where the run begins a sequence."""

    @property
    def depth(self) -> int:
        """Tokens before it."""
        return sum(piece.stop - piece.start for piece in self.before)


@dataclass(slots=True)
class Tree:
    """Rows of distinct (prefix, token), each run of them in one piece; it only ever grows at its end."""

    ids: list[int] = field(default_factory=list)
    """[N] the token of each row."""
    positions: list[int] = field(default_factory=list)
    """[N] tokens before it in its sequences."""
    runs: list[Run] = field(default_factory=list)
    """In the order of their rows."""
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    """The row that holds a token after a row; -1 is before the first token."""
    _run_of: list[int] = field(default_factory=list)
    """[N] the run of each row."""

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, sequence: Sequence[int]) -> list[int]:
        """The row of each token of a sequence; those that are missing are put at the tree's end, as one run."""
        rows: list[int] = []
        last = -1
        for token in sequence:
            row = self._children.get((last, token))
            if row is None:
                break
            rows.append(row)
            last = row
        if len(rows) < len(sequence):
            rows.extend(self._append(last, sequence[len(rows) :], depth=len(rows)))
        return rows

    def missing(self, sequence: Sequence[int]) -> int:
        """How many rows `add` would make."""
        last = -1
        for depth, token in enumerate(sequence):
            row = self._children.get((last, token))
            if row is None:
                return len(sequence) - depth
            last = row
        return 0

    def _append(self, parent: int, tokens: Sequence[int], *, depth: int) -> range:
        before: tuple[slice, ...] = ()
        if parent >= 0:
            run = self.runs[self._run_of[parent]]
            before = (*run.before, slice(run.start, parent + 1))
        rows = range(len(self), len(self) + len(tokens))
        for row, token in zip(rows, tokens, strict=True):
            self._children[parent, token] = parent = row
        self.ids.extend(tokens)
        self.positions.extend(range(depth, depth + len(tokens)))
        self._run_of.extend([len(self.runs)] * len(tokens))
        self.runs.append(Run(rows.start, len(rows), before))
        return rows

    def add_all(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """`add` for several, the longest first, so that what one continues is never cut in two."""
        rows: list[list[int]] = [[]] * len(sequences)
        for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
            rows[i] = self.add(sequences[i])
        return rows


def grouped(sequences: Sequence[Sequence[int]], *, max_rows: int) -> list[list[int]]:
    """Numbers of the sequences in groups with trees of at most `max_rows` rows more than the longest one has.

    What shares much goes together. Room for the longest one there has to be in any case; without more, a trunk that
    fills it would be computed again for each of its branches.
    """
    room = max_rows + max(map(len, sequences), default=0)
    groups: list[list[int]] = []
    left = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    while left:
        tree, group = Tree(), []
        tree.add(sequences[left[0]])
        while left:
            # What shares most comes next, of strangers the longest. Where that has no room, nothing takes its place: it
            # would be torn from the turns of its own session.
            missing = {i: tree.missing(sequences[i]) for i in left}
            best = max(left, key=lambda i: len(sequences[i]) - missing[i])
            if len(tree) + missing[best] > room:
                break
            tree.add(sequences[best])
            group.append(best)
            left.remove(best)
        groups.append(group)
    return groups
