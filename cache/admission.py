"""Admission in guaranteed mode: a pure function of a request, a snapshot and the limits.

**The law.** Every admitted request is promised the most blocks it can ever hold; a request is admitted only
while the sum of all promises stays within the usable blocks.

**Why an allocation inside a promise cannot fail.** Call *held* the number of distinct blocks in the block
tables of a request's sequences. `promised_blocks` bounds *held* at every moment of every schedule (argued
below, group by group). Blocks in use are the union over requests, so ``used <= sum(held) <= sum(promised)
<= usable``. Whoever is about to allocate holds strictly less than its promise, so ``used < usable`` at that
moment and a block is free or cached and unreferenced, hence evictable. Nothing here speaks of an order:
prefill chunks of any size, decodes and stalls may interleave as they like. (A rule that foretells a peak over
time from lockstep decoding and whole-prompt prefill does depend on the order, and chunked prefill breaks it.)

**Why no credit for prefix hits.** A hit on a block in use saves an allocation, but the other owner may leave
and the block then lives on this request's promise alone; a hit on an unreferenced cached block turns an
evictable block into a used one, exactly as an allocation would. Charging every request as if it shared
nothing covers both: the shared block is in the union once and in the sum at least once.

**The bounds**, for one of ``n`` sequences, ``total = prompt_tokens + max_tokens``:

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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tonnage.cache.errors import CacheConfigError, InvalidRequest
from tonnage.planner.layout import KVGroup, KVLayout


class WaitReason(StrEnum):
    """What a request waits for."""

    BLOCKS = "blocks"
    SEQUENCES = "sequences"


class NeverReason(StrEnum):
    """What a request exceeds even when it is alone."""

    MAX_MODEL_LEN = "max_model_len"
    BLOCKS = "blocks"
    SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """All that is known at submit; the true output length is not.

    ``n`` sequences of ``max_tokens`` each from one prompt. ``tenant`` and ``priority`` order the queue and do
    not change the promise. Raises InvalidRequest where a count is below 1.
    """

    prompt_tokens: int
    max_tokens: int
    n: int = 1
    tenant: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        for field, value in (
            ("prompt_tokens", self.prompt_tokens),
            ("max_tokens", self.max_tokens),
            ("n", self.n),
        ):
            if value < 1:
                raise InvalidRequest(f"{value} is below 1", field=field, hint="give at least 1")

    @property
    def total_tokens(self) -> int:
        """Tokens of one sequence at its longest."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is to promise. ``usable_blocks`` leaves out the null block; ``max_num_batched_tokens`` is the
    most positions one sequence computes in one step. Raises CacheConfigError, naming the field."""

    layout: KVLayout
    usable_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        block_size = self.layout.block_size
        if block_size < 1 or block_size & (block_size - 1):
            raise CacheConfigError(
                f"{block_size} is not a power of two", field="block_size", hint="for example 16"
            )
        for field in ("usable_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, field) < 1:
                raise CacheConfigError(
                    f"{getattr(self, field)} is below 1", field=field, hint="give at least 1"
                )
        if not self.layout.groups:
            raise CacheConfigError("the layout has no group", field="layout")
        for group in self.layout.groups:
            if group.kind not in ("full", "sliding"):
                raise CacheConfigError(f"a group of kind {group.kind!r} is not understood", field="layout")
            if group.kind == "sliding" and (group.window is None or group.window < 1):
                raise CacheConfigError(
                    f"a sliding group with window {group.window}", field="layout", hint="a window is at least 1"
                )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is already promised: blocks, and sequences (forks still to come included)."""

    promised_blocks: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """Run it. ``blocks`` is the promise."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Wait:
    """It fits, but not now: so many blocks or sequences must be given back first."""

    reason: WaitReason
    blocks_short: int = 0
    sequences_short: int = 0


@dataclass(frozen=True, slots=True)
class Never:
    """It does not fit even alone.

    ``largest_prompt_tokens`` is the longest prompt that fits with the same max_tokens and n; 0: none does.
    """

    reason: NeverReason
    needed_blocks: int
    usable_blocks: int
    needed_tokens: int
    max_model_len: int
    needed_sequences: int
    max_num_seqs: int
    largest_prompt_tokens: int

    def __str__(self) -> str:
        if self.reason is NeverReason.SEQUENCES:
            return f"n = {self.needed_sequences} sequences, max_num_seqs is {self.max_num_seqs}"
        if self.reason is NeverReason.MAX_MODEL_LEN:
            need = (
                f"prompt and max_tokens need {self.needed_tokens} tokens, max_model_len is {self.max_model_len}"
            )
        else:
            need = f"the request needs {self.needed_blocks} KV blocks, the pool has {self.usable_blocks}"
        if self.largest_prompt_tokens:
            return f"{need}; with this max_tokens a prompt of {self.largest_prompt_tokens} tokens fits"
        return f"{need}; with this max_tokens no prompt fits, lower max_tokens"


Decision = Admit | Wait | Never


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer not below value / divisor."""
    return -(-value // divisor)


def first_needed_block(window: int | None, computed: int, block_size: int) -> int:
    """Index of the first block that a query at a position >= ``computed`` can still read (0 for full)."""
    if window is None:
        return 0
    return max(0, computed - window + 1) // block_size


def group_promise(group: KVGroup, request: AdmissionRequest, limits: Limits) -> int:
    """Most blocks the request's n sequences can hold in one group at once (see the module's argument)."""
    block_size = limits.layout.block_size
    total = ceil_div(request.total_tokens, block_size)
    shared = request.prompt_tokens // block_size
    as_full = shared + request.n * (total - shared)
    if group.kind == "full" or group.window is None:
        return as_full
    span = group.window - 1 + limits.max_num_batched_tokens
    return min(as_full, request.n * ceil_div(span + block_size - 1, block_size))


def promised_blocks(request: AdmissionRequest, limits: Limits) -> int:
    """Most blocks the request can ever hold, over all groups: blocks of any group come from one pool."""
    return sum(group_promise(group, request, limits) for group in limits.layout.groups)


def decide(request: AdmissionRequest, snapshot: Snapshot, limits: Limits) -> Decision:
    """Admit now, wait, or never; changes nothing.

    A request that can never fit is told apart from one that cannot fit now, so that no queue waits for it.
    """
    needed = promised_blocks(request, limits)
    reason: NeverReason | None = None
    if request.n > limits.max_num_seqs:
        reason = NeverReason.SEQUENCES
    elif request.total_tokens > limits.max_model_len:
        reason = NeverReason.MAX_MODEL_LEN
    elif needed > limits.usable_blocks:
        reason = NeverReason.BLOCKS
    if reason is not None:
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
    sequences_short = snapshot.running + request.n - limits.max_num_seqs
    blocks_short = snapshot.promised_blocks + needed - limits.usable_blocks
    if sequences_short > 0:
        return Wait(WaitReason.SEQUENCES, max(0, blocks_short), sequences_short)
    if blocks_short > 0:
        return Wait(WaitReason.BLOCKS, blocks_short, 0)
    return Admit(needed)


def largest_prompt(request: AdmissionRequest, limits: Limits) -> int:
    """Longest prompt that fits an empty pool with the request's max_tokens and n; 0: none does."""
    longest = limits.max_model_len - request.max_tokens
    if longest < 1 or request.n > limits.max_num_seqs:
        return 0

    def fits(prompt_tokens: int) -> bool:
        candidate = AdmissionRequest(prompt_tokens, request.max_tokens, request.n)
        return promised_blocks(candidate, limits) <= limits.usable_blocks

    # With n > 1 the promise falls where the prompt fills a block (the block becomes shared), so it grows
    # steadily only from one full block to the next, and within one block: search the former, then the latter.
    block_size = limits.layout.block_size
    full = _last_true(lambda blocks: fits(blocks * block_size), 1, longest // block_size)
    low = max(1, full * block_size)
    return _last_true(fits, low, min(longest, full * block_size + block_size - 1))


def _last_true(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Largest value of [low, high] that fits, where those that fit come first; 0 when none does."""
    if high < low or not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
