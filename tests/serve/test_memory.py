"""Many clients for a while: everybody gets an answer, and the server's memory stays where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.load import drive, over_http
from benchmarks.server import serving
from benchmarks.tiny import tiny_model

CLIENTS = 50
REQUESTS = 1000
WARM = 300
"""By then each thread has its memory, and the caches of compiled queries are full."""
MAX_GROWTH_MB = 16.0
"""In the other 700 requests: 23 kB for each, less than a leaked request would hold on to."""


@pytest.mark.slow
async def test_a_thousand_requests_leave_nothing_in_memory(tmp_path: Path):
    model = tiny_model(tmp_path / "tiny")
    settings = {"NEXTSTATE_ENGINE__MAX_STREAMS": "16", "NEXTSTATE_SERVE__MAX_QUEUE": str(CLIENTS)}
    with serving(tmp_path, "--no-learn", "--model", str(model), settings=settings) as served:
        async with over_http(served.url, "policy", CLIENTS) as ask:
            driven = await drive(
                ask, clients=CLIENTS, requests=REQUESTS, max_tokens=8, pid=served.pid, marks=(WARM, REQUESTS)
            )
    assert driven.failed == []
    assert driven.tokens > 5 * REQUESTS  # one token in a hundred ends an answer
    before, after = driven.rss_mb[WARM], driven.rss_mb[REQUESTS]
    assert before is not None
    assert after is not None
    assert after - before < MAX_GROWTH_MB
