"""ASGI middleware that serves HEAD requests and paths with a trailing slash, which clients and probes send."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class LenientPaths:
    """ASGI middleware that routes HEAD like GET, and a path with trailing slashes like the path without them.

    A redirect would lose the body of a POST request in many clients. Paths below ``kept`` are left as they are,
    because their pages have relative links. For HEAD the HTTP server leaves out the body of the response.
    """

    def __init__(self, app: ASGIApp, kept: tuple[str, ...] = ()) -> None:
        self._app = app
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with GET instead of HEAD, and with the path without trailing slashes."""
        if scope["type"] == "http":
            path = scope["path"]
            if path.endswith("/") and len(path) > 1 and not path.startswith(self._kept):
                scope["path"] = path.rstrip("/") or "/"
            if scope["method"] == "HEAD":
                # The scope is copied, because the HTTP server later reads the method HEAD in its own scope.
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
