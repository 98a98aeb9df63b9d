"""Around the app: a request id on every answer, and API keys.

Pure ASGI: Starlette's BaseHTTPMiddleware buffers streams and hides disconnects.
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
from tonnage.server.security.refusals import Refusals

# Open without a key: an orchestrator's probes have none.
PUBLIC_PATHS = frozenset({"/health", "/ready"})
# What they show is of all tenants.
METRICS_PATHS = frozenset({"/metrics", "/metrics/vllm"})
# What a person opens in a browser, and what those pages load.
BROWSER_PATHS = METRICS_PATHS | {"/", "/docs", "/redoc", "/memory", "/openapi.json", "/plan"}
ASSETS = ("/docs/", "/plan/")
_ASK_A_PERSON = {"www-authenticate": 'Basic realm="Tonnage: any name, an API key as the password"'}

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """Takes the caller's X-Request-Id, or makes one, and sends it back with the answer; paces refusals."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope["tonnage.request_id"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        # Where a stream that has begun sends its chunks: every middleware looks at the start of an answer only,
        # and passing each token through all of them costs a twentieth of what a token costs.
        scope["tonnage.send"] = send

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                if 400 <= message["status"] < 500:
                    await self._refusals.wait(scope)
                request_id = scope["tonnage.request_id"].encode("latin-1")
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, named)


class Authentication:
    """``Authorization: Bearer KEY`` on every route but the public ones; its tenant goes into the scope.

    A browser cannot send that: for the pages it shows it may send the key as the password of ``Basic``, and is
    asked for it. Nowhere else, since it sends that again by itself, whoever made it ask. ``on_refused`` hears
    of each refusal.

    Where there are several keys, the metrics are for those marked ``metrics = true`` in the key file;
    ``tonnage.sees_all`` in the scope says whether this one may see them.
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
            # A page is asked for as HTML; what it loads comes with the header of fetches.
            asks = browser and ("text/html" in headers.get("accept", "") or "sec-fetch-mode" in headers)
            if asks and not header:  # how a browser always begins
                await render(error, _ASK_A_PERSON)(scope, receive, send)
                return
            await self._refuse(error, scope, _ASK_A_PERSON if asks else None)(scope, receive, send)
            return
        sees_all = tenant.metrics or len(self._keys) == 1
        if scope["path"] in METRICS_PATHS and not sees_all:
            error = ApiError(
                ErrorCode.PERMISSION_DENIED,
                f"{scope['path']} shows the counts of all tenants: it takes a key of metrics = true",
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
    """The key that an Authorization header holds; empty for none. ``basic``: also as a password."""
    scheme, _, value = header.partition(" ")
    # Starlette reads a header as Latin-1, so this is what was sent. Only blanks: U+00A0 and U+0085 are
    # white space in Latin-1 and parts of characters in UTF-8.
    sent = value.strip(" \t").encode("latin-1")
    if scheme.lower() == "bearer":
        return sent
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(sent, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
