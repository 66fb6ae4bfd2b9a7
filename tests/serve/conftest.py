from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from gated_engine import GatedEngine

from nextstate.engines.local import LocalEngine


@pytest.fixture
def gated(engine: LocalEngine) -> GatedEngine:
    return GatedEngine(engine)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]
