"""The check of the header Host, for a server without API keys that listens on loopback.

The owner of a web page can point the page's name at 127.0.0.1 (DNS rebinding). The browser then lets the page
read a local server's answers. These requests have the page's name in the header Host and are rejected. Names
without a dot are accepted, because no web site has one. A server with keys or on another address makes no
check, unless ``--allowed-hosts`` is given.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tonnage.server.errors import ApiError, ErrorCode, render

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def allowed_hosts(host: str, given: Collection[str], *, keys: bool) -> frozenset[str] | None:
    """Return the names in the header Host that the server accepts, or None if it accepts every name.

    Args:
        host: Address on which the server listens.
        given: Names of ``--allowed-hosts``.
        keys: Whether requests need an API key.
    """
    loopback = host.lower() in _LOOPBACK or host.startswith("127.")
    if not given and (keys or not loopback):
        return None
    return frozenset({host.lower(), *_LOOPBACK, *(name.lower() for name in given)})


class HostCheck:
    """ASGI middleware that rejects requests whose Host header names a dotted host that is not in ``hosts``."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app if the request's header Host is allowed; otherwise reject the request."""
        if scope["type"] == "http":
            # A request of HTTP/1.0 may lack the header Host. Such a request is accepted, because no browser
            # sends it.
            name = _name(Headers(scope=scope).get("host", "localhost"))
            if name not in self._hosts and "." in name:
                error = ApiError(
                    ErrorCode.PERMISSION_DENIED,
                    f"the server does not answer as {name[:100]!r}; start it with --allowed-hosts {name[:100]}",
                )
                await render(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name(host: str) -> str:
    """Return the name in a header Host, without its port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")
