"""The page at /: files of this package, as they are, that load nothing from anywhere else."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Only our own files run; no text can become markup or code, since nothing may make either from a string; and no other
page may show this one within itself."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def _load() -> dict[str, tuple[bytes, str]]:
    """Content and type by path."""
    found = {}
    for file in files("nextstate.serve").joinpath("page_files").iterdir():
        kind = _TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = file.read_bytes(), f"{kind}; charset=utf-8"
    return found


FILES = _load()


def router() -> APIRouter:
    routes = APIRouter()
    for path, (content, kind) in FILES.items():
        routes.add_api_route(path, _shown(content, kind), methods=["GET"], response_class=Response)
    return routes


def _shown(content: bytes, kind: str):  # type: ignore[no-untyped-def]
    tag = f'"{sha256(content).hexdigest()[:16]}"'
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # Asked for each time, and sent only when it has changed: an upgrade must not meet half of the old page.
        "Cache-Control": "no-cache",
        "ETag": tag,
    }

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return show
