"""Log formats: text for terminals, JSON for log collectors. No log line contains a prompt or an output.

The request log for `tonnage replay` is a file of its own (`tonnage.server.observe.request_log`).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from tonnage.server.requests.accounts import Ticket

access = logging.getLogger("tonnage.access")

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime"}
# vLLM, when it runs in this process, adds this attribute to every log record (its logger.py, 0.32).
_STANDARD |= {"vllm_process_name"}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that the caller of the logger added to a record with `extra`."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """A log formatter that writes one JSON object per line and record, with the caller's `extra` as fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one JSON object."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= _extra(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def printable(text: str) -> str:
    """Return a log text with control characters escaped, so that it fits one line and is safe in a terminal."""
    return text if text.isprintable() else ascii(text)


class TextFormatter(logging.Formatter):
    """A log formatter that writes lines of the form ``time level message key=value ...``."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a log record's message, followed by the caller's `extra` as `key=value` pairs."""
        more = [f"{name}={printable(str(value))}" for name, value in _extra(record).items()]
        return " ".join([super().formatMessage(record), *more])


class _ToStderr(logging.StreamHandler[TextIO]):
    """A log handler that writes to the current sys.stderr, which it looks up for each line.

    A progress display replaces sys.stderr while a model loads.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(form: Literal["text", "json"], level: str) -> None:
    """Send the logs of tonnage and uvicorn to stderr.

    Args:
        form: whether to write lines of text or of JSON.
        level: name of the lowest level to write.
    """
    handler = _ToStderr()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("tonnage", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


def log_access(ticket: Ticket) -> None:
    """Log one line with outcome, duration and token counts of the ended request of ``ticket``."""
    counts = ticket.counts
    fields: dict[str, Any] = {
        "request_id": ticket.request_id,
        "endpoint": ticket.endpoint,
        "outcome": ticket.outcome,
        "seconds": round(ticket.seconds, 4),
        "prompt_tokens": counts.prompt if counts else None,
        "completion_tokens": counts.completion if counts else None,
        "cached_tokens": counts.cached_total if counts else None,
    }
    if ticket.first_token_seconds is not None:
        fields["first_token_seconds"] = round(ticket.first_token_seconds, 4)
    if ticket.tenant.name:
        fields["tenant"] = ticket.tenant.name
    if ticket.error is not None:
        fields |= {"code": ticket.error.code.value, "status": ticket.error.status}
    access.info("request", extra={name: value for name, value in fields.items() if value is not None})
