"""A headless Chromium for tests, wherever one can be had."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, Error, async_playwright

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The browser of `make browser`, else one that is installed; without any the test is skipped, with the reason."""
    installed = os.environ.get("NEXTSTATE_TEST_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
    async with async_playwright() as playwright:
        try:
            browser = await playwright.chromium.launch(executable_path=installed)
        except Error as error:
            pytest.skip(f"no browser: {error.message.splitlines()[0]}; `make browser` fetches one")
        try:
            yield browser
        finally:
            await browser.close()
