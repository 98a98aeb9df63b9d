"""What an engine raises; ``tonnage.server.errors`` turns each into an answer by its ``code``."""

from __future__ import annotations

from tonnage.planner.errors import TonnageError


class EngineDead(TonnageError):
    """The engine process is gone; in-flight requests end with this."""

    code = "engine_dead"


class NeverFits(TonnageError):
    """The request can never fit (admission said Never); the message carries the numbers."""

    code = "exceeds_kv_capacity"


class Refused(TonnageError):
    """The request is at fault in what only the engine sees: its grammar, or wishes that exclude each other."""

    code = "invalid_value"


class QueueFull(TonnageError):
    """The request would fit, but not now. ``retry_after_seconds`` from the drain estimate."""

    code = "server_overloaded"
    retry_after_seconds: float = 1.0
