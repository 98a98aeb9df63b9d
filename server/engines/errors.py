"""Errors raised by engines; ``tonnage.server.errors`` maps the ``code`` of each to an HTTP response."""

from __future__ import annotations

from tonnage.planner.errors import TonnageError


class EngineDead(TonnageError):
    """The engine process has ended; all requests in flight fail with this error."""

    code = "engine_dead"


class NeverFits(TonnageError):
    """The request exceeds the capacity of the KV pool at any time; the message has the numbers."""

    code = "exceeds_kv_capacity"


class Refused(TonnageError):
    """The request is invalid in a way only the engine can detect: its grammar, or conflicting parameters."""

    code = "invalid_value"


class QueueFull(TonnageError):
    """The request would fit, but not now. ``retry_after_seconds`` comes from the drain estimate."""

    code = "server_overloaded"
    retry_after_seconds: float = 1.0
