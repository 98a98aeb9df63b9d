"""/plan: the planner's page, written once when it is first asked for; on / is how this server does."""

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
    """A folder with the page, removed with this object."""

    def __init__(self) -> None:
        pyodide = present()  # first: where there is none, no folder is made
        place = tempfile.mkdtemp(prefix="tonnage-page-")
        finalize(self, shutil.rmtree, place, ignore_errors=True)
        self.folder = Path(place) / "page"
        build(self.folder, str(pyodide))


def plan_page_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    lock = threading.Lock()
    made: list[_Written] = []

    def written() -> _Written:
        """One, however many ask for it first."""
        with lock:
            if not made:
                made.append(_Written())
            return made[0]

    @router.get("/plan")
    async def slash() -> Response:
        return RedirectResponse("plan/")  # files of the page are beside it

    @router.get("/plan/{name:path}")
    def file(name: str) -> Response:  # of a thread: the first asked writes 15 MB
        try:
            folder = written().folder
        except PageError:  # it names the server's folders and a command's flags
            raise ApiError(
                ErrorCode.UNKNOWN_URL,
                "unknown URL: this server has no page that plans; tonnage page fetches it once",
            ) from None
        path = folder / (name or "index.html")
        if path not in set(folder.rglob("*")) or path.is_dir():
            raise ApiError(ErrorCode.UNKNOWN_URL, "unknown URL: no file of the page that plans")
        return FileResponse(path, headers=_HEADERS, media_type=_TYPES.get(path.suffix))

    return router
