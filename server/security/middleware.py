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
from tonnage.server.http.disconnect import CLIENT_CLOSED_REQUEST
from tonnage.server.http.turns import work_for
from tonnage.server.security.keys import KeyRing
from tonnage.server.security.rejection_limits import RejectionLimits

# Paths that need no API key, because an orchestrator's health probes send none.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/ping"})
# Paths that show the counts of all tenants.
METRICS_PATHS = frozenset({"/metrics", "/metrics/vllm"})
# Paths that users open in a browser; the pages' own files are below ASSETS.
BROWSER_PATHS = METRICS_PATHS | {"/", "/docs", "/redoc", "/memory", "/openapi.json", "/plan"}
ASSETS = ("/docs/", "/plan/")
_BASIC_CHALLENGE = {"www-authenticate": 'Basic realm="Tonnage: any name, an API key as the password"'}

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """ASGI middleware that adds X-Request-Id to each response, and delays rejections that are too frequent.

    The id is the client's own X-Request-Id, or a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._limits = RejectionLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with a request id in the scope, which is also a header of the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope["tonnage.request_id"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        # A stream sends its chunks through ``tonnage.send`` and so bypasses the middleware, which needs only
        # the start of a response. Passing a token through all middleware would take a twentieth of the time
        # that the server spends on the token.
        scope["tonnage.send"] = send

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                if 400 <= message["status"] < 500 and message["status"] != CLIENT_CLOSED_REQUEST:
                    await self._limits.wait(scope)
                request_id = scope["tonnage.request_id"].encode("latin-1")
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            # The scope and ``send`` refer to each other. Without this line only the garbage collector would
            # free the request.
            del scope["tonnage.send"]


class Authentication:
    """ASGI middleware that requires ``Authorization: Bearer KEY`` and puts the key's tenant into the scope.

    The headers ``x-api-key`` and ``api-key`` may have the key instead of ``Authorization``.

    A browser that opens a page cannot send such a header by itself. For pages, the browser is asked for
    ``Basic`` authentication, with the key as the password. Other paths do not accept ``Basic``, because a
    browser would also send it with requests that other sites cause.

    With several keys, only keys with ``metrics = true`` may read the metrics. ``tonnage.sees_all`` in the scope
    says whether the key of the request may read them. ``on_refused`` is called for each rejected request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        public_paths: frozenset[str],
        on_refused: Callable[[ApiError, str, str], None],
    ) -> None:
        self._app = app
        self._keys = keys
        self._public = public_paths
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app for an authenticated request or a public path; reject any other request."""
        if scope["type"] != "http" or scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        header = headers.get("authorization", "")
        # Anthropic's clients send x-api-key, and Azure's api-key.
        if not header and (key := headers.get("x-api-key") or headers.get("api-key")):
            header = f"Bearer {key}"
        for_browsers = scope["path"] in BROWSER_PATHS or scope["path"].startswith(ASSETS)
        browser = for_browsers and scope["method"] in ("GET", "HEAD")
        sent = _key(header, browser)
        tenant = self._keys.tenant(sent) if sent else None
        if tenant is None:
            message = "incorrect API key" if header.partition(" ")[0] else "you did not provide an API key"
            error = ApiError(ErrorCode.INVALID_API_KEY, f"{message}; send Authorization: Bearer KEY")
            # A browser asks for HTML when it opens a page, and sends sec-fetch-mode when the page loads its
            # files.
            from_page = browser and ("text/html" in headers.get("accept", "") or "sec-fetch-mode" in headers)
            if from_page and not header:  # no log line, because a browser's first request never has a key
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
        work_for(tenant.name)
        scope["tonnage.sees_all"] = sees_all or "/metrics" in self._public
        await self._app(scope, receive, send)

    def _refuse(self, error: ApiError, scope: Scope, extra: dict[str, str] | None = None) -> Response:
        self._on_refused(error, scope["path"], scope["tonnage.request_id"])
        return render(error, extra)


def _key(header: str, basic: bool) -> bytes:
    """Return the key in an Authorization header, or empty bytes when there is none.

    With ``basic``, the password of ``Basic`` authentication is accepted as the key, too.
    """
    scheme, _, value = header.partition(" ")
    # Starlette decodes headers as Latin-1, so encoding as Latin-1 restores the bytes. strip() removes only
    # blanks: U+00A0 and U+0085 are white space in Latin-1, but may be parts of UTF-8 characters.
    sent = value.strip(" \t").encode("latin-1")
    if scheme.lower() == "bearer":
        return sent
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(sent, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
