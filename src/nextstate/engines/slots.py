"""Versions beside the base in one engine: what the local engine asks of whoever holds them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torch import nn


class VersionSlots(Protocol):
    """A few places for versions of one kind. Each is filled beside the engine thread, and used by it alone."""

    @property
    def versions(self) -> list[int]:
        """Versions that can answer; 0, the base, always can."""
        ...

    def load(self, version: int, artifact: Path, keep: Iterable[int]) -> None:
        """Fill a place with a version, instead of the oldest one that is not in `keep`.

        Raises:
            AdapterError: the files are missing or damaged, or (AdapterMismatch) of another shape or kind; nothing was
                loaded.
            EngineFault: every place is in use just now.
        """
        ...

    def activate(self, version: int) -> nn.Module:
        """The model to compute this version with, until the next call. Takes well under a millisecond."""
        ...


def oldest_to_leave(held: Iterable[int], keep: Iterable[int]) -> int | None:
    """The version that makes room for another one; None: all are in use."""
    return min(set(held) - set(keep), default=None)
