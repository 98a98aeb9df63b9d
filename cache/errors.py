"""Errors of the KV block manager, each raised before any state has changed."""

from __future__ import annotations

from tonnage.planner.errors import TonnageError


class CacheError(TonnageError):
    """Base class of every error that ``tonnage.cache`` raises."""

    code = "kv_cache_error"


class CacheConfigError(CacheError):
    """The error that a pool, layout or limit is invalid, such as zero blocks or a group of an unknown kind."""

    code = "invalid_kv_cache_config"


class InvalidRequest(CacheError):
    """The error that a request or token list is invalid: an empty prompt, or a token id that is not an int."""

    code = "invalid_request"


class SequenceExists(CacheError):
    """The error that the id of a new sequence already belongs to a live sequence."""

    code = "sequence_exists"


class UnknownSequence(CacheError):
    """The error that a call names a sequence id that does not belong to a live sequence."""

    code = "unknown_sequence"


class SequenceFinished(UnknownSequence):
    """The error that a call names the id of a sequence that has been freed."""

    code = "sequence_finished"


class DoubleFree(SequenceFinished):
    """The error that a sequence is freed a second time."""

    code = "double_free"


class ReservationExceeded(CacheError):
    """The error that a call needs more than admission reserved: tokens, tokens per step, or forks."""

    code = "reservation_exceeded"


class OutOfOrder(CacheError):
    """The error that a call comes before the call it depends on, such as commit before extend."""

    code = "out_of_order"


class InvariantViolation(CacheError):
    """The error that an invariant of the block manager does not hold, which is a defect of this package."""

    code = "invariant_violation"

    @property
    def law(self) -> str:
        """Name of the broken invariant, as listed in ``tonnage.cache.laws.sampled.LAWS``."""
        return self.field or ""


class CacheBusy(CacheError):
    """The error that the prefix cache cannot be reset while live sequences hold its blocks."""

    code = "kv_cache_busy"


class NoFreeBlocks(CacheError):
    """The error that a step exceeds what `grant` allowed and needs more KV blocks than are free or cached."""

    code = "no_free_blocks"
