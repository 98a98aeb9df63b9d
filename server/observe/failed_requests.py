"""Log lines for failed requests: one line per request, or one summary when many fail within ten seconds."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.observe.logs import printable
from tonnage.server.requests.accounts import Ticket
from tonnage.server.security.middleware import PUBLIC_PATHS

log = logging.getLogger("tonnage.server")

# At most this many lines are logged in ten seconds. Further failures are counted, and the counts are logged
# when the ten seconds end. A full server rejects hundreds of requests per second, and one line costs as much
# time as generating one token.
AT_ONCE = 10
WINDOW_SECONDS = 10.0

_MOST_OF_A_PATH = 200

# Error codes whose messages contain only numbers and names of settings, and are therefore logged. Other
# messages quote the client's request, which may be a prompt, so the log has only their code and field.
_QUOTE_NOTHING = frozenset(
    {
        ErrorCode.REQUEST_TOO_LARGE, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.EXCEEDS_KV_CAPACITY,
        ErrorCode.INVALID_API_KEY, ErrorCode.PERMISSION_DENIED, ErrorCode.RATE_LIMIT_EXCEEDED,
        ErrorCode.INSUFFICIENT_QUOTA, ErrorCode.REQUEST_TIMEOUT, ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.SERVER_OVERLOADED, ErrorCode.MODEL_LOADING, ErrorCode.SERVER_STOPPING,
    }
)  # fmt: skip


class FailedRequestLog:
    """Logger of one app's failed requests, with a limit of lines per ten seconds; runs on the event loop."""

    def __init__(self) -> None:
        self._lines = 0  # number of lines logged in the current ten seconds.
        # Number of failures in the current ten seconds for which no line was logged, by error code.
        self._more: Counter[str] = Counter()
        self._end: asyncio.TimerHandle | None = None

    def finished(self, ticket: Ticket) -> None:
        """Log the finished request of ``ticket`` if it failed; the request accounts call this method."""
        if ticket.error is not None:
            self.refused(ticket.error, ticket.endpoint, ticket.request_id, ticket.tenant.name)

    def refused(self, error: ApiError, path: str, request_id: str, tenant: str = "") -> None:
        """Log the error of a rejected or failed request; above the limit of lines per ten seconds, count it."""
        # failed health probes are not logged, because one comes every few seconds while a model loads
        if path in PUBLIC_PATHS:
            return
        if self._end is None:
            self._end = asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._window_ends)
        if self._lines >= AT_ONCE:
            self._more[error.code.value] += 1
            return
        self._lines += 1
        fields: dict[str, Any] = {
            "code": error.code.value, "status": error.status, "param": _field(error), "tenant": tenant or None,
            "endpoint": printable(path[:_MOST_OF_A_PATH]), "request_id": request_id or None,
        }  # fmt: skip
        log.log(
            logging.INFO if error.status < 500 else logging.WARNING,
            "request %s: %s",
            "refused" if error.is_refusal else "failed",
            error.message if error.code in _QUOTE_NOTHING else error.code.value.replace("_", " "),
            extra={name: value for name, value in fields.items() if value is not None},
        )

    def _window_ends(self) -> None:
        self._end, self._lines = None, 0
        if self._more:
            log.warning("%d more requests refused or failed", self._more.total(), extra=dict(self._more))
            self._more.clear()


def _field(error: ApiError) -> str | None:
    """Return the name of the top-level field of the request body that the error is about, or None.

    Nested names and unknown fields are left out, because they may contain a secret of the client.
    """
    if error.param is None or error.code is ErrorCode.UNKNOWN_PARAMETER:
        return None
    return printable(error.param.partition(".")[0])
