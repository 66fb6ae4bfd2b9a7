"""Keys and values of finished sequences, kept for the next prompt that begins the same way.

A session's next prompt repeats the one before, and every vote of a judge repeats its examples. An entry belongs to
the version that computed all of it, so a prompt is never served from another version's cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nextstate.engines.packed import KVCache

_WORTH_REUSING = 16
"""Tokens; below that, copying gains nothing."""


@dataclass(eq=False, slots=True)
class _Entry:
    version: int
    ids: list[int]
    cache: KVCache


class PrefixCache:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: list[_Entry] = []  # least recently used first

    def take(self, version: int, ids: Sequence[int], most: int) -> KVCache:
        """A copy of the longest cached beginning of `ids`, at most `most` tokens; empty when there is none."""
        best, shared = None, 0
        for entry in self._entries:
            if entry.version == version:
                n = min(common_prefix(entry.ids, ids), entry.cache.length, most)
                if n > shared:
                    best, shared = entry, n
        if best is None or shared < _WORTH_REUSING:
            return KVCache()
        self._entries.remove(best)
        self._entries.append(best)
        return best.cache.prefix(shared)

    def put(self, version: int, ids: Sequence[int], cache: KVCache) -> None:
        """Keep a finished sequence. It replaces those of which it repeats more than half."""
        held = list(ids[: cache.length])
        self._entries = [
            e for e in self._entries if e.version != version or 2 * common_prefix(e.ids, held) <= e.cache.length
        ]
        self._entries.append(_Entry(version, held, cache))
        total = sum(e.cache.length for e in self._entries)
        while self._entries and total > self._max_tokens:
            total -= self._entries.pop(0).cache.length

    def keep_only(self, versions: Collection[int]) -> None:
        """Forget what other versions computed."""
        self._entries = [e for e in self._entries if e.version in versions]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    limit = min(len(a), len(b))
    if list(a[:limit]) == list(b[:limit]):
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
