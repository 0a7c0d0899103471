"""The page at `/`: the files of gateway/page, read once at start.

With its content security policy, the page can load files from this gateway only, and can call nothing else. The folders
in gateway/page are not part of the URLs: scripts/main.js is served as /page/main.js.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media type of a file, by the ending of its name. Files with other endings are not served."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content security policy of the page. Its last two rules make the browser refuse to write a string as HTML
(`innerHTML`)."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of the response for each file of the page."""


def page_routes() -> list[Route]:
    """Return the routes of the page's files, for GET and HEAD: `/` for index.html, `/page/NAME` for the others."""
    routes = []
    for file in page_files():
        media_type = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            path = f"/page/{file.name}"
            if file.name == "index.html":
                path = "/"
            routes.append(Route(path, _endpoint(file.read_bytes(), media_type), include_in_schema=False))
    return routes


def page_files() -> list[Traversable]:
    """Return the files in gateway/page and its folders. Their names must be unique, because they become URLs."""
    page = files("gateway").joinpath("page")
    found = [page.joinpath("index.html")]
    for folder in ("assets", "scripts"):
        found += page.joinpath(folder).iterdir()
    return found


def _endpoint(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    headers = HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"', "content-type": media_type}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return serve
