"""GET and POST /v1/learning: whether anything is trained and published, for the owner of the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from nextstate.serve.auth import OPERATOR, caller
from nextstate.serve.body import RequestBody
from nextstate.serve.errors import ApiError
from nextstate.serve.services import Services
from nextstate.store.steering import pause_learning, paused_since, resume_learning


class LearningRequest(RequestBody, extra="forbid"):
    paused: bool


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    async def learning() -> dict[str, Any]:
        since = await services.store.read(paused_since)
        return {"enabled": services.learning, "paused": since is not None, "paused_since": since}

    @routes.get("/v1/learning")
    async def show() -> dict[str, Any]:
        return await learning()

    @routes.post("/v1/learning")
    async def change(body: LearningRequest, request: Request) -> dict[str, Any]:
        if caller(request) != OPERATOR:
            # One user's key must not stop what the server learns from the others.
            raise ApiError(
                403,
                "Only the owner pauses and resumes learning: with serve.api_key, or with `nextstate pause learning` on "
                "the server's machine. Nothing has changed.",
                code="not_the_owner",
            )
        await services.store.write(pause_learning if body.paused else resume_learning)
        return await learning()

    return routes
