"""The page: files of the built bundle, as they are in the package."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
INDEX = "index.html"


def page_routes() -> Iterator[Route]:
    """A route for each file of the bundle. Nothing else is read, whatever a path says."""
    folder = files("omni_grpc.web") / "page"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ():
        path = "/" if file.name == INDEX else f"/page/{file.name}"
        yield Route(path, _served(file.name, file.read_bytes()), methods=["GET"])


def _served(name: str, data: bytes) -> Callable[[Request], Awaitable[Response]]:
    headers = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"

    async def file(request: Request) -> Response:
        return Response(data, headers=headers, media_type=media_type)

    return file
