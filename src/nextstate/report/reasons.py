"""Why turns wait or are left out, in the words of docs/left-out-turns.md, which comes with the package."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@cache
def explanations() -> dict[str, str]:
    """What each WaitReason and SkipReason means and what to do about it, in plain sentences without markup."""
    page = files("nextstate.report").joinpath("left-out-turns.md").read_text()
    # The page's other headings end the last section before them.
    sections = re.split(r"^#{1,3} ", page, flags=re.MULTILINE)
    named = (section.partition("\n") for section in sections if re.match(r"[a-z_]+\n", section))
    return {name: _plain(text) for name, _, text in named}


def _plain(markdown: str) -> str:
    return " ".join(_LINK.sub(r"\1", markdown).replace("`", "").split())
