"""What docs/clients tells people to write, so that the tests do just that."""

from __future__ import annotations

import re
from pathlib import Path

DEFAULT = "127.0.0.1:8700"
"""Where the server of these pages is."""
FOLDER = Path(__file__).parents[2] / "docs" / "clients"


def block(page: str, language: str) -> str:
    """The first block of a language on a page of docs/clients."""
    found = re.search(rf"^```{language}\n(.*?)^```$", (FOLDER / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/clients/{page}.md has no block of {language}"
    return found[1]


def exports(page: str, address: str) -> dict[str, str]:
    """What the first block of shell commands on a page exports, for a server at this address."""
    found = re.findall(r"^export (\w+)=(\S+)$", block(page, "sh"), re.MULTILINE)
    return {name: value.replace(DEFAULT, address) for name, value in found}
