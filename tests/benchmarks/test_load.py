from __future__ import annotations

import asyncio
import os

import pytest
from benchmarks.load import Failed, costs, drive


def test_two_runs_tell_the_cost_of_a_request_from_that_of_a_token():
    # 10 requests at 3 each and 2 a token: 30 + 2 * 10, and 30 + 2 * 100
    assert costs(10, (10, 50.0), (100, 230.0)) == pytest.approx((3.0, 2.0))


async def test_all_requests_are_made_once_and_those_that_failed_are_told():
    asked: list[int] = []

    async def ask(n: int, max_tokens: int) -> int:
        await asyncio.sleep(0)
        asked.append(n)
        if n % 10 == 3:
            raise Failed(f"request {n}")
        return max_tokens

    driven = await drive(ask, clients=7, requests=40, max_tokens=5, pid=os.getpid(), marks=(4, 40))
    assert sorted(asked) == list(range(40))
    assert sorted(driven.failed) == ["request 13", "request 23", "request 3", "request 33"]
    assert driven.tokens == 36 * 5  # 40 - 4 answers
    assert set(driven.rss_mb) == {4, 40}
