"""Stop strings: where an answer ends before the model ends it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, which the client does not see.

    Text that might be the beginning of a stop string waits until more text decides, so that the pieces joined do not
    depend on how the text was cut into pieces. The first stop string is the one that is complete first; of two that
    are complete at the same character, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Args:
        stops: none of them empty.
        """
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string has appeared; from then on nothing passes."""
        self.matched: str | None = None
        """Which one."""

    def add(self, text: str) -> str:
        """What of the text so far may be shown now, without what was shown before."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
