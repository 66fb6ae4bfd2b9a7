"""The index of docs/clients."""

from __future__ import annotations

import anthropic
import openai

from tests.clients.installed import CLIENTS
from tests.clients.pages import FOLDER


def test_the_index_names_every_page_and_the_versions_that_are_tested():
    index = (FOLDER / "README.md").read_text()
    versions = [package.rpartition("==")[2].rpartition("@")[2] for client in CLIENTS for package in client.packages]
    for version in (*versions, openai.__version__, anthropic.__version__):
        assert version in index
    for page in FOLDER.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index
