"""ASGI middleware around the app: a request id on every response, and authentication by API key.

Starlette's BaseHTTPMiddleware is not used, because it buffers streams and hides disconnects.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tonnage.server.errors import ApiError, ErrorCode, render
from tonnage.server.security.keys import KeyRing
from tonnage.server.security.rejection_limits import RejectionLimits

# Paths without a key, because an orchestrator's probes have none.
PUBLIC_PATHS = frozenset({"/health", "/ready"})
# Paths that show the counts of all tenants.
METRICS_PATHS = frozenset({"/metrics", "/metrics/vllm"})
# Paths that a person opens in a browser, and the files of these pages.
BROWSER_PATHS = METRICS_PATHS | {"/", "/docs", "/redoc", "/memory", "/openapi.json", "/plan"}
ASSETS = ("/docs/", "/plan/")
_BASIC_CHALLENGE = {"www-authenticate": 'Basic realm="Tonnage: any name, an API key as the password"'}

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """Middleware that adds X-Request-Id (given or new) to each response, and delays repeated rejections."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._limits = RejectionLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app with a request id in the scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope["tonnage.request_id"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        # A stream that has begun sends its chunks directly. Middleware reads only the start of a response, and
        # passing each token through all of it would take a twentieth of the token's time.
        scope["tonnage.send"] = send

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                if 400 <= message["status"] < 500:
                    await self._limits.wait(scope)
                request_id = scope["tonnage.request_id"].encode("latin-1")
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, named)


class Authentication:
    """Middleware that requires ``Authorization: Bearer KEY`` and puts the key's tenant into the scope.

    A browser cannot send that header by itself. For its pages it may send the key as the password of ``Basic``,
    and is asked for it. Other paths do not accept ``Basic``, because a browser repeats it for requests of other
    sites.

    With several keys, only keys with ``metrics = true`` may read the metrics; ``tonnage.sees_all`` in the scope
    is whether this key may. ``on_refused`` is called for each rejected request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        public_paths: frozenset[str] = PUBLIC_PATHS,
        on_refused: Callable[[ApiError, str, str], None] | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._public = public_paths
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an authenticated request on; reject another one."""
        if scope["type"] != "http" or scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        header = headers.get("authorization", "")
        browser = scope["method"] in ("GET", "HEAD") and _for_browsers(scope["path"])
        sent = _key(header, browser)
        tenant = self._keys.tenant(sent) if sent else None
        if tenant is None:
            message = "incorrect API key" if header.partition(" ")[0] else "you did not provide an API key"
            error = ApiError(ErrorCode.INVALID_API_KEY, f"{message}; send Authorization: Bearer KEY")
            # A browser requests a page as HTML; the files that a page loads come with a sec-fetch-mode header.
            from_page = browser and ("text/html" in headers.get("accept", "") or "sec-fetch-mode" in headers)
            if from_page and not header:  # a browser's first request never has the header, so it is not logged
                await render(error, _BASIC_CHALLENGE)(scope, receive, send)
                return
            await self._refuse(error, scope, _BASIC_CHALLENGE if from_page else None)(scope, receive, send)
            return
        sees_all = tenant.metrics or len(self._keys) == 1
        if scope["path"] in METRICS_PATHS and not sees_all:
            error = ApiError(
                ErrorCode.PERMISSION_DENIED,
                f"{scope['path']} shows the counts of all tenants: it requires a key with metrics = true",
            )
            await self._refuse(error, scope)(scope, receive, send)
            return
        scope["tonnage.tenant"] = tenant
        scope["tonnage.sees_all"] = sees_all or "/metrics" in self._public
        await self._app(scope, receive, send)

    def _refuse(self, error: ApiError, scope: Scope, extra: dict[str, str] | None = None) -> Response:
        if self._on_refused is not None:
            self._on_refused(error, scope["path"], scope["tonnage.request_id"])
        return render(error, extra)


def _for_browsers(path: str) -> bool:
    return path in BROWSER_PATHS or path.startswith(ASSETS)


def _key(header: str, basic: bool) -> bytes:
    """Return the key in an Authorization header, or empty bytes; ``basic`` also accepts it as a password."""
    scheme, _, value = header.partition(" ")
    # Starlette decodes headers as Latin-1, so encoding restores the bytes. Only blanks are stripped, because
    # U+00A0 and U+0085 are white space in Latin-1 and parts of characters in UTF-8.
    sent = value.strip(" \t").encode("latin-1")
    if scheme.lower() == "bearer":
        return sent
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(sent, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
