"""An HTTP client for GET requests with limits on bytes and seconds.

The client follows no redirect, so that an API key goes to no other host. It ignores the proxies set in the
environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tonnage.planner.errors import DeploymentError, TonnageError

# Upper bound of a metrics page. vLLM 0.32's page has 53 kB for one engine, so 300 engines fit.
MAX_PAGE_BYTES = 16 * 2**20
_PORTS = "vLLM's and Tonnage's is 8000, SGLang's 30000, llama-server's 8080"
_ENDPOINTS = ("/metrics", "/v1")  # path endings that are removed from the URL given by the user


class WatchError(TonnageError):
    """An error for a watched server that cannot be read now; a later attempt may succeed."""

    code = "watch_failed"


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response; `start` is the server process's start time if a header gives it, else None."""

    status: int
    text: str
    start: str | None = None

    def json(self) -> Any:
        """Return the body parsed as JSON, or None when the status is not 200 or the body is not JSON."""
        if self.status != 200:
            return None
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class Client:
    """An HTTP client for GET requests to one inference server."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 10.0) -> None:
        self.url = _base_url(url)
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path
        self._tls = parts.scheme == "https"
        self._timeout = timeout
        self._headers = {"Accept": "text/plain, application/json", "Connection": "close"}
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise DeploymentError("an API key must be printable ASCII", field="--api-key")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Response:
        """Return the response to GET `path`.

        Raises:
            WatchError: there was no complete response in time, or it was a redirect or had status 401, 403 or
                503.
        """
        answer = self._get(path)
        if answer.status in (401, 403):
            raise WatchError(
                f"{self.url}{path} needs an API key, or rejects this one (status {answer.status})",
                hint="use --api-key KEY, or TONNAGE_API_KEY in the environment",
            )
        if answer.status == 503:
            raise WatchError(
                f"{self.url}{path} is not ready: {_error_message(answer)}", hint="wait, it may still be loading"
            )
        return answer

    def _get(self, path: str) -> Response:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        held: list[socket.socket] = []
        over = threading.Event()

        # A timer ends the request, because a socket's timeout limits only a single read. A response that
        # arrives slowly, in many reads, never exceeds it.
        def hang_up() -> None:
            over.set()
            for sock in held or [connection.sock]:
                # ignored: the socket is already closed (OSError) or not open yet (TypeError)
                with contextlib.suppress(OSError, TypeError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

        timer = threading.Timer(self._timeout, hang_up)
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            held.append(connection.sock)
            connection.request("GET", self._path + path, headers=self._headers)
            response = connection.getresponse()
            data = response.read(MAX_PAGE_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if over.is_set() or isinstance(error, TimeoutError):
                raise self._timeout_error(path) from None
            raise self._unreachable(path, error) from None
        finally:
            timer.cancel()
            connection.close()
        if over.is_set():
            raise self._timeout_error(path)
        if len(data) > MAX_PAGE_BYTES:
            raise WatchError(
                f"{self.url}{path} is longer than {MAX_PAGE_BYTES:,} bytes, which no inference server sends"
            )
        if 300 <= response.status < 400:
            to = response.headers.get("Location", "elsewhere")
            raise WatchError(f"{self.url}{path} is redirected to {to[:200]}", hint="use that URL")
        return Response(
            response.status, data.decode("utf-8", "replace"), response.headers.get("Process-Start-Time-Unix")
        )

    def _timeout_error(self, path: str) -> WatchError:
        return WatchError(
            f"{self.url}{path}: no complete response within {self._timeout:g} s",
            hint="is the server busy or stopped? --timeout SECONDS waits longer",
        )

    def _unreachable(self, path: str, error: Exception) -> WatchError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return WatchError(
                f"{self.url}: its certificate is not trusted: {error.verify_message}",
                hint="set SSL_CERT_FILE to the certificate of its authority",
            )
        if isinstance(error, ssl.SSLError):
            return WatchError(f"{self.url} does not use TLS", hint="try http:// instead of https://")
        if isinstance(error, socket.gaierror):
            return WatchError(f"{self.url}: the host name is unknown")
        if isinstance(error, ConnectionRefusedError):
            return WatchError(f"no server at {self.url}", hint=f"is it running on this port? {_PORTS}")
        if isinstance(error, OSError) and error.strerror:
            return WatchError(
                f"{self.url}{path}: {error.strerror}", hint=f"is this the server's port? {_PORTS}"
            )
        return WatchError(
            f"{self.url}{path} does not answer in HTTP", hint=f"is this the server's port? {_PORTS}"
        )


def _base_url(url: str) -> str:
    """Return a server's base URL without a known path: ``host:8000/metrics`` -> ``http://host:8000``."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # urlsplit raises when the port is not a number
        good = False
    if not good or not text.isprintable() or not text.isascii() or " " in text:
        raise DeploymentError(
            f"{url[:200]!r} is not a URL", field="URL", hint="for example http://localhost:8000"
        )
    if parts.username is not None:
        raise DeploymentError("user and password are not supported", field="URL", hint="use --api-key KEY")
    path = parts.path.rstrip("/")
    for endpoint in _ENDPOINTS:
        path = path.removesuffix(endpoint)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _error_message(answer: Response) -> str:
    """Return the message in a server's error response, or the beginning of the response's text."""
    try:
        body = json.loads(answer.text)
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        message = None
    return str(message or answer.text.strip() or answer.status)[:200]
