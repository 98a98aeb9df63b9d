"""Errors that engines raise; ``tonnage.server.errors`` maps the ``code`` of each to an HTTP response."""

from __future__ import annotations

from tonnage.planner.errors import TonnageError


class EngineDead(TonnageError):
    """An error for all requests in flight because the engine process has ended."""

    code = "engine_dead"


class NeverFits(TonnageError):
    """An error for a request that exceeds even an empty KV pool; its message has both sizes."""

    code = "exceeds_kv_capacity"


class Refused(TonnageError):
    """An error for an invalid request that only the engine can detect, such as an invalid grammar."""

    code = "invalid_value"


class QueueFull(TonnageError):
    """An error for a request that fits the empty KV pool, but cannot be accepted now.

    ``retry_after_seconds`` is an estimate of when blocks will be free.
    """

    code = "server_overloaded"
    retry_after_seconds: float = 1.0
