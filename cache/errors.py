"""Errors of the block manager. Each is raised before any state has changed."""

from __future__ import annotations

from tonnage.planner.errors import TonnageError


class CacheError(TonnageError):
    """Base of every error of ``tonnage.cache``."""

    code = "kv_cache_error"


class CacheConfigError(CacheError):
    """Pool, layout or limits that cannot work: zero blocks, a group of a kind that has no table ..."""

    code = "invalid_kv_cache_config"


class InvalidRequest(CacheError):
    """A request or a token list that means nothing: no prompt, max_tokens below 1, a token that is no int."""

    code = "invalid_request"


class SequenceExists(CacheError):
    """The sequence id is already live."""

    code = "sequence_exists"


class UnknownSequence(CacheError):
    """The sequence id is not live."""

    code = "unknown_sequence"


class SequenceFinished(UnknownSequence):
    """The sequence id was live and has been freed."""

    code = "sequence_finished"


class DoubleFree(SequenceFinished):
    """The sequence has already been freed."""

    code = "double_free"


class ReservationExceeded(CacheError):
    """The call asks for more than admission reserved: tokens, tokens per step, or forks."""

    code = "reservation_exceeded"


class OutOfOrder(CacheError):
    """The call comes before the one it depends on: commit before extend, fork before the prompt is computed."""

    code = "out_of_order"


class InvariantViolation(CacheError):
    """A law of the block manager does not hold: a defect of this package, not of its caller."""

    code = "invariant_violation"

    @property
    def law(self) -> str:
        """Name of the broken law, as listed in ``tonnage.cache.laws.invariants``."""
        return self.field or ""


class CacheBusy(CacheError):
    """The cache cannot be reset while sequences hold its blocks."""

    code = "kv_cache_busy"


class NoFreeBlocks(CacheError):
    """A step asks for more blocks than are free or cached: admission was not asked first, or broke its word."""

    code = "no_free_blocks"
