"""Token ids, log-probs and versions as compact columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from nextstate.types import TokenIds


def pack_ids(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(blob: bytes) -> TokenIds:
    return tuple(np.frombuffer(blob, dtype="<i4").tolist())


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(blob: bytes) -> tuple[float, ...]:
    return tuple(np.frombuffer(blob, dtype="<f4").tolist())


def pack_versions(versions: Sequence[int]) -> list[list[int]]:
    """[3, 3, 4] becomes [[3, 2], [4, 1]]."""
    return [[version, len(list(run))] for version, run in groupby(versions)]


def unpack_versions(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(version for version, tokens in runs for _ in range(tokens))
