"""/plan: the planner's page for the browser, written to a temporary folder at the first request."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from weakref import finalize

from fastapi import APIRouter
from starlette.responses import FileResponse, RedirectResponse, Response

from tonnage.planner.page.build import build
from tonnage.planner.page.pyodide import PageError, present
from tonnage.server.errors import ApiError, ErrorCode

_HEADERS = {"cache-control": "no-cache", "x-content-type-options": "nosniff"}
_TYPES = {".mjs": "text/javascript", ".wasm": "application/wasm"}


class _Written:
    """A temporary folder that holds the planner's page and is removed together with this object."""

    def __init__(self) -> None:
        # present() raises when pyodide is missing, so it runs before the folder is created.
        pyodide = present()
        place = tempfile.mkdtemp(prefix="tonnage-page-")
        finalize(self, shutil.rmtree, place, ignore_errors=True)
        self.folder = Path(place) / "page"
        build(self.folder, str(pyodide))


def plan_page_router() -> APIRouter:
    """Return the routes of the planner's page."""
    router = APIRouter(include_in_schema=False)
    lock = threading.Lock()
    made: list[_Written] = []

    def written() -> _Written:
        """Return the folder with the planner's page; the first call writes it, even if calls are concurrent."""
        with lock:
            if not made:
                made.append(_Written())
            return made[0]

    @router.get("/plan")
    async def slash() -> Response:
        # redirect to the path with a slash, because the page refers to its files by relative paths
        return RedirectResponse("plan/")

    @router.get("/plan/{name:path}")
    # The handler is not async, so that it runs in a thread: the first request writes 15 MB.
    def file(name: str) -> Response:
        try:
            folder = written().folder
        # The client gets a different error, because the original one names folders of the server and flags of
        # a command.
        except PageError:
            raise ApiError(
                ErrorCode.UNKNOWN_URL,
                "unknown URL: this server has no planner page; run `tonnage page` once on the server's "
                "machine, to download the files of the page",
            ) from None
        path = folder / (name or "index.html")
        if path not in set(folder.rglob("*")) or path.is_dir():
            raise ApiError(ErrorCode.UNKNOWN_URL, "unknown URL: the planner page has no such file")
        return FileResponse(path, headers=_HEADERS, media_type=_TYPES.get(path.suffix))

    return router
