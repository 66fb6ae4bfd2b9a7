"""GET /v1/models, and what a request's `model` means."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from nextstate.serve.errors import ApiError
from nextstate.serve.services import Services, ServingEngine
from nextstate.types import PolicyRef

POLICY = "policy"
AUX = "policy-aux"
"""The same weights for work on the side, by a name that clients can be set to; see collect/request.py."""


def resolve_model(engine: ServingEngine, name: str) -> PolicyRef:
    """The weights behind a name: 'policy', 'policy-aux' or the model's own is what serves now, 'policy@3' version 3.

    Raises:
        ApiError: there is no such model, or the version is not loaded.
    """
    base, _, version = name.partition("@")
    if name in (POLICY, AUX, engine.loaded.name):
        return PolicyRef()
    if base == POLICY and version.isdecimal() and len(version) < 19:
        if int(version) in engine.versions:
            return PolicyRef(version=int(version))
        loaded = ", ".join(f"{POLICY}@{v}" for v in sorted(engine.versions))
        raise _not_found(f"Version {int(version)} of '{POLICY}' is not loaded. Loaded now: {loaded}.")
    raise _not_found(
        f"Model '{name[:99]}' does not exist. This server has '{POLICY}', also known as '{engine.loaded.name}'; "
        f"'{POLICY}@N' is a version of it."
    )


def _not_found(message: str) -> ApiError:
    return ApiError(404, message, param="model", code="model_not_found")


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    started = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        engine = services.engine
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "nextstate",
            "base_model": engine.loaded.name,
            "version": engine.version,
            "loaded_versions": sorted(engine.versions),
            "context_tokens": engine.loaded.context_tokens,
            "learning": services.learning,
        }

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        names = dict.fromkeys((POLICY, AUX, services.engine.loaded.name))
        return {"object": "list", "data": [describe(name) for name in names]}

    @routes.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        resolve_model(services.engine, name)
        return describe(name)

    return routes
