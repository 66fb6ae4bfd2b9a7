from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nextstate.engines.local import LocalEngine
from nextstate.store.store import Store
from tests.clients.children import Place, make_place
from tests.clients.scripted import ScriptedPolicy
from tests.clients.served import Served, serve


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["as it is", "anonymous"])
def anonymous(request: pytest.FixtureRequest) -> bool:
    """Whether the server is kept from seeing what names a session."""
    return request.param == "anonymous"


@pytest.fixture
async def served(engine: LocalEngine, store: Store, tmp_path: Path, anonymous: bool) -> AsyncIterator[Served]:
    """The server, with a policy that has not been told what to say yet."""
    async with serve(ScriptedPolicy(engine), store, tmp_path, anonymous=anonymous) as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)
