"""The HTTP application: which endpoints there are, and what every request passes through.

count ─▶ key, or loopback ─▶ JSON ─▶ size, time, depth ─▶ endpoint
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from nextstate import __version__
from nextstate.chat.formats import detect_format
from nextstate.collect.redaction import Redactor
from nextstate.config import Config
from nextstate.serve import (
    chat_completions,
    completions,
    feedback,
    generate,
    looking,
    messages,
    models,
    page,
    responses,
    steering,
)
from nextstate.serve.auth import Admit
from nextstate.serve.errors import handle_errors
from nextstate.serve.limits import RequireJson, TakeBody
from nextstate.serve.metrics import CountRequests, Metrics
from nextstate.serve.services import Services, ServingEngine
from nextstate.store.status import why_not_learning
from nextstate.store.store import Store

ROUTES = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/generate", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/responses", "/v1/models", "/v1/feedback", "/v1/learning", "/healthz", "/readyz", "/metrics", "/",
        "/api/me", "/api/sessions", "/api/search", "/api/learning",
    }
)  # fmt: skip


def create_app(
    *,
    store: Store,
    engine: ServingEngine,
    config: Config,
    learning: bool,
    ready: Callable[[], tuple[bool, str]],
    wake_judge: Callable[[], None],
) -> FastAPI:
    """The application around an engine that has been started.

    Args:
        learning: False keeps turns and never judges or trains them.
        ready: whether answers can be had now, and a sentence for the one who asks.
        wake_judge: called when a turn may have become ready for a verdict.
    """
    metrics = Metrics(store, lambda: engine.load)
    services = Services(
        store=store,
        engine=engine,
        form=detect_format(
            engine.loaded.tokenizer, reasoning=config.engine.reasoning_form, tools=config.engine.tool_form
        ),
        config=config,
        metrics=metrics,
        learning=learning,
        ready=ready,
        wake_judge=wake_judge,
        redactor=Redactor.of(config.store),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        answers = list(services.answers)
        for answer in answers:
            answer.abandon()
        await asyncio.gather(*(answer.written() for answer in answers))

    # The pages that describe the API would fetch scripts from another host.
    app = FastAPI(title="nextstate", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.services = services
    handle_errors(app)
    for router in (
        chat_completions.router,
        completions.router,
        generate.router,
        messages.router,
        responses.router,
        models.router,
        feedback.router,
        looking.router,
        steering.router,
    ):
        app.include_router(router(services))
    app.include_router(page.router())

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        # Serving is healthy without it; whoever wonders why nothing is learned looks here too.
        why = await store.read(why_not_learning) if learning else None
        return {"status": "ok"} if why is None else {"status": "ok", "not_learning": why}

    @app.get("/readyz")
    async def readyz() -> Response:
        is_ready, sentence = services.ready()
        return PlainTextResponse(f"{sentence}\n", 200 if is_ready else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(await asyncio.to_thread(metrics.text), media_type=CONTENT_TYPE_LATEST)

    # The one added last is passed first.
    app.add_middleware(
        TakeBody,
        max_bytes=config.serve.max_body_bytes,
        timeout_s=config.serve.body_timeout_s,
        max_depth=config.serve.max_depth,
    )
    app.add_middleware(RequireJson)
    app.add_middleware(Admit, store=store, serve=config.serve)
    app.add_middleware(CountRequests, metrics=metrics, routes=ROUTES)
    return app
