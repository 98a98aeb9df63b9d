"""The reservation: an upper bound of the blocks that a request can ever hold, exact for each group.

For a request of ``n`` sequences with ``total = prompt_tokens + max_tokens``:

- Full-attention group: ``ceil(total / block_size)`` blocks per sequence. The ``prompt_tokens // block_size``
  full prompt blocks count once, because all n sequences share them. A fork is allowed only after they are
  computed, and they are never written again. All later blocks count per sequence. This includes the partly
  filled last prompt block, since the first write of each fork copies it.
- Sliding window of ``W``: a query at position p reads positions ``p - W + 1 .. p``. With the positions below
  ``c`` computed, a block is dead if its last position is below ``c - W + 1``. `KVCacheManager.extend` releases
  dead blocks *before* it takes new ones. A step computes at most ``B = max_num_batched_tokens`` positions. The
  sequence therefore holds the blocks that cover ``[c - W + 1, c + B)``, i.e. ``W - 1 + B`` positions. These
  are in at most ``ceil((W - 1 + B + block_size - 1) / block_size)`` blocks. They are in that many blocks if the
  first position has the last slot of a block. Forks may share no block of their windows, so the bound is
  multiplied by n. The full-attention bound holds instead if it is lower.
- Chunked attention of chunk ``C``: a query reads the positions of its own chunk up to itself. At most ``C - 1``
  of them are before the positions that the step computes, so the sliding bound with ``W = C`` holds.
- Recurrent state: one block per sequence, since a fork copies the state before its first step. With cached
  states (`tonnage.cache.groups.states`) a sequence has two blocks, one for the state it continues from and one
  for the state it writes. If all its tokens are in one block of tokens, it has one block for its state.

**If the sum of all reservations fits, no allocation within one can fail.** Call *held* the distinct blocks in
the tables of a request's sequences. The reservation bounds it at every moment of every schedule. Blocks in use
are the union over requests, so ``used <= sum(held) <= sum(reserved) <= usable``. A request that is about to
allocate holds less than its reservation. Hence ``used < usable`` at that moment, and some block is free, or
cached and evictable.

The argument does not depend on an order: prefill chunks of any size, decodes and stalls may interleave. A
prefix hit does not reduce the reservation, because the other owner of a shared block may end, and the block
then belongs to this request alone. TensorRT-LLM's GUARANTEED_NO_EVICT, mini-sglang and the mode ``no_evict``
admit by the sum of all reservations, which leaves most of the pool unused.
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
    """Return the upper bound of the blocks that a request's n sequences hold in one KV cache group at once."""
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
    """Return two upper bounds of a request's KV blocks: in full-attention groups, and in all other groups.

    The other groups have sliding windows or recurrent states. Their blocks are subtracted from the pool in full
    when the request is admitted.
    """
    parts = [0, 0]
    for group in limits.layout.groups:
        parts[kind_of(group) != FULL] += group_reservation(group, request, limits)
    return parts[0], parts[1]


def reserved_blocks(request: AdmissionRequest, limits: Limits) -> int:
    """Return the upper bound of the blocks that a request holds in all KV cache groups together."""
    return sum(split_reservation(request, limits))


def refusal(request: AdmissionRequest, limits: Limits, tenant_blocks: int | None = None) -> Never | None:
    """Return why the request can never run (pool or tenant quota too small), or None if it can."""
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
    """Return the length of the longest prompt that fits an empty pool with the request's max_tokens and n.

    Returns 0 when no prompt fits.
    """
    longest = limits.max_model_len - request.max_tokens
    if longest < 1 or request.n > limits.max_num_seqs:
        return 0

    def fits(prompt_tokens: int) -> bool:
        candidate = AdmissionRequest(prompt_tokens, request.max_tokens, request.n)
        return reserved_blocks(candidate, limits) <= limits.usable_blocks

    # With n > 1 the reservation falls when the prompt fills a block, because that block becomes shared. Between
    # two full blocks, and over all prompts of full blocks, it only grows. Two bisections therefore find the
    # longest prompt: one over prompts of full blocks, one over the tokens of the next block.
    block_size = limits.layout.block_size
    full = _last_true(lambda blocks: fits(blocks * block_size), longest // block_size) * block_size
    return full + _last_true(lambda more: fits(full + more), min(longest - full, block_size - 1))


def _last_true(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number in [1, most] for which the monotonic function ``fits`` is true, or 0."""
    return bisect_left(range(1, most + 1), True, key=lambda value: not fits(value))
