"""/docs and /redoc: Swagger UI and ReDoc with local files, so that they work without internet access."""

from __future__ import annotations

from html import escape
from importlib.resources import as_file, files

from fastapi import APIRouter
from starlette.responses import FileResponse, HTMLResponse, Response

from tonnage.server.errors import ApiError, ErrorCode

# fastapi-offline (MIT) ships the files of Swagger UI (Apache-2.0) and ReDoc (MIT).
_FILES = "fastapi_offline"
_SHIPPED = ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")
_DAY = {"cache-control": "private, max-age=86400"}

# Both pages need inline styles. The content security policy restricts scripts and requests to this server.
# ReDoc runs its search in a worker that it creates from a blob.
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


def docs_router(title: str) -> APIRouter:
    """Return a FastAPI router for /docs, /redoc and their files; ``title`` is the title of both pages."""
    router = APIRouter(include_in_schema=False)
    # The package is looked up only here, so that a command can first name the missing extra.
    static = files(_FILES) / "static"
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
    head += '<meta name=viewport content="width=device-width"><link rel=icon href="docs/favicon.png">'

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
        with as_file(static / name) as path:  # as_file copies nothing, unless the packages are in a zip file.
            return FileResponse(path, headers=_DAY)

    return router
