"""The reservation: the most blocks a request can ever hold, exact group by group.

For one of ``n`` sequences, ``total = prompt_tokens + max_tokens``:

- full group: ``ceil(total / block_size)``. The ``prompt_tokens // block_size`` full prompt blocks are the
  same blocks in all n sequences (a fork is allowed only once they are computed, and they are never written
  again), so they count once; everything after them counts for each sequence, the partly filled last prompt
  block included, since the first write of each fork copies it.
- sliding group of window ``W``: a query at position p reads positions ``p - W + 1 .. p``. With positions below
  ``c`` computed, every block whose last position is below ``c - W + 1`` is dead, and `KVCacheManager.extend`
  drops the dead blocks *before* it takes new ones. A step computes at most ``B = max_num_batched_tokens``
  positions, so the sequence holds the blocks that cover ``[c - W + 1, c + B)``: ``W - 1 + B`` positions, which
  touch at most ``ceil((W - 1 + B + block_size - 1) / block_size)`` blocks when they start at the last slot of
  a block (reached: the bound is exact). Forks may have no common block left in their windows: times n, or
  the full group's count where that is less.
- chunked group of chunk ``C``: a query reads its own chunk up to itself, at most ``C - 1`` positions before
  those of the step; the sliding bound with ``W = C``.
- state group: one block for each sequence (a fork copies it before its first step); with cached states
  (`tonnage.cache.groups.states`) two, the state it goes on from and the one it writes, unless all its tokens
  are in one block.

**Where the sum of all reservations fits, no allocation inside one can fail.** Call *held* the number of
distinct blocks in the block tables of a request's sequences; its reservation bounds it at every moment of
every schedule. Blocks in use are the union over requests, so ``used <= sum(held) <= sum(reserved) <=
usable``. Whoever is about to allocate holds strictly less than its reservation, so ``used < usable`` at that
moment and a block is free or cached and unreferenced, hence evictable. Nothing here speaks of an order:
prefill chunks of any size, decodes and stalls may interleave as they like. A prefix hit earns no credit: the
other owner of a block may leave, and it then lives on this reservation alone. (TensorRT-LLM's
GUARANTEED_NO_EVICT and mini-sglang admit so, as ``no_evict`` does; it leaves most of the pool unused.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from tonnage.cache.admission.types import AdmissionRequest, Limits, Never, NeverReason
from tonnage.cache.blocks.groups import FULL, MOST_STATES, STATE, kind_of
from tonnage.planner.model.layout import KVGroup
from tonnage.planner.units import ceil_div


def group_reservation(group: KVGroup, request: AdmissionRequest, limits: Limits) -> int:
    """Most blocks the request's n sequences can hold in one group at once (see the module's argument)."""
    kind, block_size = kind_of(group), limits.layout.block_size
    total, shared = ceil_div(request.total_tokens, block_size), request.prompt_tokens // block_size
    if kind == STATE:
        return request.n * (min(total, MOST_STATES) if limits.cached_states else 1)
    as_full = shared + request.n * (total - shared)
    if kind == FULL or group.window is None:
        return as_full
    span = group.window - 1 + limits.max_num_batched_tokens
    return min(as_full, request.n * ceil_div(span + block_size - 1, block_size))


def split_reservation(request: AdmissionRequest, limits: Limits) -> tuple[int, int]:
    """Most blocks the request can ever hold: (in full groups, in those set aside whole: windows and states)."""
    parts = [0, 0]
    for group in limits.layout.groups:
        parts[kind_of(group) != FULL] += group_reservation(group, request, limits)
    return parts[0], parts[1]


def reserved_blocks(request: AdmissionRequest, limits: Limits) -> int:
    """Both parts: blocks of any group come from one pool."""
    return sum(split_reservation(request, limits))


def refusal(request: AdmissionRequest, limits: Limits, tenant_blocks: int | None = None) -> Never | None:
    """Why the request does not fit even an empty pool (or its tenant's quota of it); None when it does."""
    needed = reserved_blocks(request, limits)
    if request.n > limits.max_num_seqs:
        reason = NeverReason.SEQUENCES
    elif request.total_tokens > limits.max_model_len:
        reason = NeverReason.MAX_MODEL_LEN
    elif needed > limits.usable_blocks:
        reason = NeverReason.BLOCKS
    elif tenant_blocks is not None and needed > tenant_blocks:
        reason, limits = NeverReason.TENANT_QUOTA, replace(limits, usable_blocks=tenant_blocks)
    else:
        return None
    return Never(
        reason=reason,
        needed_blocks=needed,
        usable_blocks=limits.usable_blocks,
        needed_tokens=request.total_tokens,
        max_model_len=limits.max_model_len,
        needed_sequences=request.n,
        max_num_seqs=limits.max_num_seqs,
        largest_prompt_tokens=largest_prompt(request, limits),
    )


def largest_prompt(request: AdmissionRequest, limits: Limits) -> int:
    """Longest prompt that fits an empty pool with the request's max_tokens and n; 0: none does."""
    longest = limits.max_model_len - request.max_tokens
    if longest < 1 or request.n > limits.max_num_seqs:
        return 0

    def fits(prompt_tokens: int) -> bool:
        candidate = AdmissionRequest(prompt_tokens, request.max_tokens, request.n)
        return reserved_blocks(candidate, limits) <= limits.usable_blocks

    # With n > 1 the reservation falls where the prompt fills a block (the block becomes shared), so it grows
    # steadily only from one full block to the next, and within one block: search the former, then the latter.
    block_size = limits.layout.block_size
    full = _last_true(lambda blocks: fits(blocks * block_size), longest // block_size) * block_size
    return full + _last_true(lambda more: fits(full + more), min(longest - full, block_size - 1))


def _last_true(fits: Callable[[int], bool], most: int) -> int:
    """Largest value of [1, most] that fits, where those that fit come first; 0 when none does."""
    return bisect_left(range(1, most + 1), True, key=lambda value: not fits(value))
