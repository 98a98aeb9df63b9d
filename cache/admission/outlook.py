"""The forecast of the running requests' KV blocks, to which admission adds one waiting request after another.

Between two steps the running requests stay the same for all decisions. Their forecast is therefore computed
once (`Outlook`). Each waiting request adds a few numbers to the forecast (`Newcomer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.cache.admission.peak import Added, Growth, Int64Array
from tonnage.cache.admission.snapshot import (
    HELD,
    OUTPUT,
    OUTPUT_LEFT,
    PRIVATE,
    PROMPT,
    PROMPT_LEFT,
    SEQUENCES,
    Int32Array,
    RunningSnapshot,
)
from tonnage.cache.admission.types import Limits
from tonnage.cache.blocks.groups import num_full


@dataclass(slots=True)
class Newcomer:
    """A request waiting for an admission decision, with its lengths and the KV blocks that it would take.

    Attributes:
        entry: The request's row of a `RunningSnapshot`: one number per column.
        cached: Cached blocks of the request's prefix, over all full-attention groups, that no running request
            holds. Taking them uses capacity.
        windowed: Blocks that are reserved in full for the request's groups with windows or states.
        reserved: Upper bound of the request's blocks in all groups.
        lost: int32 [requests]: blocks that each running request now holds alone and would share with this
            request, in order of admission. The array may be shorter than the number of running requests; the
            others lose none. None if no block would be shared.
        produced: Output tokens that the request produced before a preemption.
        tenant: Name of the tenant whose finished requests forecast this request's length.
        kept: Blocks that must stay free for requests of other API keys.
    """

    entry: Sequence[int]
    cached: int
    windowed: int
    reserved: int
    lost: Int32Array | None = None
    produced: int = 0
    tenant: str = ""
    kept: int = 0

    def prompt_missing(self, block_size: int, groups: int) -> int:
        """Return how many KV blocks the uncomputed prompt tokens need in ``groups`` full-attention groups."""
        return max(0, (self.entry[PROMPT] + block_size - 1) // block_size * groups - self.entry[HELD])

    def growth(self, length: int, prompts: int, block_size: int, chunk: int, groups: int) -> Added:
        """Return how many blocks of one full-attention group the request holds over time if it starts now.

        Args:
            length: Output tokens forecast for the request.
            prompts: Uncomputed prompt tokens of the running requests, which are computed first.
            block_size: Tokens per block.
            chunk: Prompt tokens that all requests together compute in a step.
            groups: Number of full-attention groups.
        """
        entry = self.entry
        shared, left = (entry[HELD] - entry[PRIVATE]) // groups, entry[PROMPT_LEFT]
        end = length + (-(-(prompts + left) // chunk) if left > 0 else 0)
        tail = entry[PROMPT] % block_size + entry[OUTPUT]
        return Added(entry[PROMPT] // block_size - shared, tail, entry[SEQUENCES], end)

    def beyond(self, length: int, block_size: int, groups: int) -> int:
        """Return how many KV blocks the request may need beyond a forecast output of ``length`` tokens."""
        more = -(-(self.entry[OUTPUT_LEFT] - length) // block_size)
        return more * self.entry[SEQUENCES] * groups


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast of the running requests' KV blocks over time, made for a decision on one waiting request.

    Attributes:
        snapshot: The running requests.
        growth: Blocks of the running requests over time, if each produces its forecast output.
        private: Number of blocks, over all full-attention groups, that only one request holds. Blocks that
            several requests share are not in ``growth``; they are added once, as ``used - private``.
        prompts: Prompt tokens of the running requests that are not computed yet.
        beyond: Smallest number of blocks that any of the running requests may need beyond its forecast.
        own: Output tokens forecast for the waiting request.
    """

    snapshot: RunningSnapshot
    growth: Growth
    private: int
    prompts: int
    beyond: int
    own: int = 0

    def without(self, lost: Int32Array, groups: int) -> Growth:
        """Return the running requests' KV blocks over time if some of their private blocks become shared.

        ``lost``, int32 [requests], has the number of these blocks for each running request in order of
        admission. It may be shorter than the number of running requests; the others lose none.
        """
        rows, now, fixed = self.snapshot.rows[: len(lost)], self.growth, self.growth.fixed.copy()
        shared = rows[:, HELD] - rows[:, PRIVATE]
        fixed[: len(lost)] += shared // groups - (shared + lost) // groups
        return Growth(fixed, now.tail, now.sequences, now.end)


def outlook_of(snapshot: RunningSnapshot, output_left: Int64Array, limits: Limits, own: int = 0) -> Outlook:
    """Forecast the running requests' KV blocks if each produces ``output_left`` [running] more tokens.

    The prompts of all requests together are computed in steps of at most max_num_batched_tokens, in order of
    admission. ``own`` is the number of output tokens forecast for the waiting request under decision.
    """
    from tonnage.cache.admission.loops import grow

    block_size, groups = limits.layout.block_size, num_full(limits.layout)
    out = np.empty((4, len(snapshot)), np.int64)
    chunk = limits.max_num_batched_tokens
    private, prompts, beyond = grow(snapshot.rows, output_left, block_size, chunk, groups, out)
    return Outlook(snapshot, Growth(out[0], out[1], out[2], out[3]), private, prompts, beyond, own)
