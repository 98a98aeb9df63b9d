"""Errors of the block manager, each raised before any state has changed."""

from __future__ import annotations

from tonnage.planner.errors import TonnageError


class CacheError(TonnageError):
    """Base class of every error that ``tonnage.cache`` raises."""

    code = "kv_cache_error"


class CacheConfigError(CacheError):
    """An invalid pool, layout or limit, such as zero blocks or a group of an unknown kind."""

    code = "invalid_kv_cache_config"


class InvalidRequest(CacheError):
    """An invalid request or token list, such as an empty prompt or a token id that is not an int."""

    code = "invalid_request"


class SequenceExists(CacheError):
    """The sequence id of a new sequence already belongs to a live sequence."""

    code = "sequence_exists"


class UnknownSequence(CacheError):
    """A call names a sequence id that does not belong to a live sequence."""

    code = "unknown_sequence"


class SequenceFinished(UnknownSequence):
    """A call names a sequence id that was live and has been freed."""

    code = "sequence_finished"


class DoubleFree(SequenceFinished):
    """A sequence is freed a second time."""

    code = "double_free"


class ReservationExceeded(CacheError):
    """A call needs more than admission reserved: tokens, tokens per step, or forks."""

    code = "reservation_exceeded"


class OutOfOrder(CacheError):
    """A call comes before the call it depends on, such as commit before extend."""

    code = "out_of_order"


class InvariantViolation(CacheError):
    """An invariant of the block manager does not hold: a defect of this package, not of its caller."""

    code = "invariant_violation"

    @property
    def law(self) -> str:
        """Name of the broken invariant, as listed in ``tonnage.cache.laws.invariants``."""
        return self.field or ""


class CacheBusy(CacheError):
    """The prefix cache cannot be reset while live sequences hold its blocks."""

    code = "kv_cache_busy"


class NoFreeBlocks(CacheError):
    """A step needs more blocks than are free or cached: the scheduler extended beyond its grant."""

    code = "no_free_blocks"
