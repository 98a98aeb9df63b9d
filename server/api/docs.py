"""/openapi.json, /docs and /redoc: Swagger UI and ReDoc with local files, which need no internet access."""

from __future__ import annotations

import asyncio
import json
from html import escape
from importlib.resources import as_file, files
from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from tonnage.server.errors import ApiError, ErrorCode, render

# fastapi-offline (MIT) ships the files of Swagger UI (Apache-2.0) and ReDoc (MIT).
_FILES = "fastapi_offline"
_SHIPPED = ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")
# Maximum number of documentation files that are sent at once. A page loads three.
MOST_FILES = 64
_DAY = {"cache-control": "private, max-age=86400"}

# Swagger UI and ReDoc need inline styles. The content security policy restricts scripts and requests to this
# server. ReDoc runs its search in a worker that it creates from a blob.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src data:; connect-src 'self'; worker-src blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
# Paths are relative, because a proxy may serve the pages under a prefix. A page whose URL contains a user name
# or password cannot fetch a relative path, so the script computes the absolute URL.
_DOCUMENT = 'new URL("openapi.json", location.origin + location.pathname).href'
_STARTS = {
    "swagger.js": f'SwaggerUIBundle({{url: {_DOCUMENT}, dom_id: "#ui", deepLinking: true}});\n',
    "redoc.js": f'Redoc.init({_DOCUMENT}, {{}}, document.getElementById("ui"));\n',
}


class _CountedFile(FileResponse):
    """A response with a documentation file, or with an error while too many such files are being sent.

    The semaphore ``sending`` limits how many files are sent at the same time. This bounds the server's memory:
    for a client that does not read, the server keeps some hundred kilobytes of a file for a minute
    (`tonnage.server.http.protocol.WRITE_SECONDS`).
    """

    def __init__(self, path: Path, sending: asyncio.Semaphore) -> None:
        super().__init__(path, headers=_DAY)
        self._sending = sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, or an error when too many files are being sent."""
        if self._sending.locked():
            error = ApiError(ErrorCode.SERVER_OVERLOADED, "too many files of the documentation are being sent")
            await render(error)(scope, receive, send)
            return
        async with self._sending:
            await super().__call__(scope, receive, send)


def docs_router(title: str, app: FastAPI) -> APIRouter:
    """Return the router of /openapi.json, /docs, /redoc and their files.

    Args:
        title: Title of both pages.
        app: App whose OpenAPI document is served.
    """
    router = APIRouter(include_in_schema=False)
    sending = asyncio.Semaphore(MOST_FILES)
    # holds the OpenAPI document after its first request, serialized as JSON
    documents: list[bytes] = []

    # fastapi_offline is looked up only here and not at import, so that a command can report a missing extra.
    static = files(_FILES) / "static"
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
    head += '<meta name=viewport content="width=device-width"><link rel=icon href="docs/favicon.png">'

    @router.get("/openapi.json")
    async def openapi() -> Response:
        if not documents:
            documents.append(json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode())
        return Response(documents[0], media_type="application/json")

    @router.get("/docs")
    async def swagger() -> Response:
        body = (
            '<div id=ui></div><script src="docs/swagger-ui-bundle.js"></script><script src="docs/swagger.js">'
        )
        style = '<link rel=stylesheet href="docs/swagger-ui.css">'
        return HTMLResponse(f"{head}{style}{body}</script></html>\n", headers=_HEADERS)

    @router.get("/redoc")
    async def redoc() -> Response:
        body = '<div id=ui></div><script src="docs/redoc.standalone.js"></script><script src="docs/redoc.js">'
        return HTMLResponse(f"{head}{body}</script></html>\n", headers=_HEADERS)

    @router.get("/docs/{name}")
    async def shipped(name: str) -> Response:
        if name in _STARTS:
            return Response(_STARTS[name], media_type="text/javascript", headers=_DAY)
        if name not in _SHIPPED:
            raise ApiError(ErrorCode.UNKNOWN_URL, "unknown URL: the documentation has no such file")
        with as_file(static / name) as path:  # as_file copies the file only from a zipped package
            return _CountedFile(path, sending)

    return router
