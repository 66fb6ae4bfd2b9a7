from __future__ import annotations

from pathlib import Path

import pytest

from nextstate.config import ServeConfig
from nextstate.serve.auth import OPEN_PATHS

PAGE = Path("docs/keys.md").read_text()


@pytest.mark.parametrize("name", ["max_body_bytes", "max_depth", "body_timeout_s", "send_timeout_s", "max_queue"])
def test_every_limit_is_documented_with_its_default(name: str):
    assert f"| `serve.{name}` | {ServeConfig.model_fields[name].default} |" in PAGE


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_what_needs_no_key_is_documented(path: str):
    assert f"`{path}`" in PAGE
