"""A headless Chromium for tests, wherever one can be had. As a program: whether there is one."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, Error, async_playwright

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """One that is installed, else Playwright's own; $NEXTSTATE_TEST_BROWSER names another.

    Raises:
        Error: there is none, or it does not start.
    """
    named = os.environ.get("NEXTSTATE_TEST_BROWSER")
    installed = named or next(filter(None, map(shutil.which, _NAMES)), None)
    async with async_playwright() as playwright:
        # Chromium's own sandbox refuses root, as which CI and containers run; the pages are our own.
        browser = await playwright.chromium.launch(executable_path=installed, chromium_sandbox=False)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def chromium_or_skip() -> AsyncIterator[Browser]:
    """The same; without any, the test is skipped with the reason."""
    running = chromium()
    try:
        browser = await running.__aenter__()
    except Error as error:
        pytest.skip(f"no browser: {error.message.splitlines()[0]}; `make browser` fetches one")
    try:
        yield browser
    finally:
        await running.__aexit__(None, None, None)


async def _version() -> str:
    async with chromium() as browser:
        return browser.version


if __name__ == "__main__":
    try:
        print(f"the tests of the page run in Chromium {asyncio.run(_version())}")
    except Error:
        sys.exit(1)
