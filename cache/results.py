"""Result types of the KV block manager's calls."""

from __future__ import annotations

from dataclasses import dataclass

# Reasons of an eviction: space for K/V of a prompt, for K/V of an output, for a copy-on-write, or a reset of
# the prefix cache.
EVICTION_CAUSES = ("prefill", "decode", "copy_on_write", "reset")


@dataclass(frozen=True, slots=True)
class Admitted:
    """The block manager's answer to an admitted request, which may run in the next step.

    Attributes:
        row: Index of the sequence's row in the block tables.
        cached_tokens: Leading prompt positions whose K/V is already in the row's blocks.
        shared_tokens: Tokens of ``cached_tokens`` in blocks that requests with any salt may read.
        junction: Length in tokens of a prefix that full-attention groups have cached, but without a recurrent
            state at its end, so that it is no hit. 0 if there is none.
    """

    row: int
    cached_tokens: int
    shared_tokens: int = 0
    junction: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of block ``src`` to block ``dst`` (K and V of all layers), to perform before the step writes."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Numbers of KV blocks by state (used, cached, free), and counters of the block manager since its start.

    used + cached + free = usable, and used <= reserved <= usable.

    Attributes:
        num_blocks: Blocks of the pool, with the null block.
        usable: Blocks of the pool without the null block.
        used: Blocks with a reference.
        cached: Blocks without a reference whose content is in the prefix index.
        free: Blocks without content.
        reserved: Blocks reserved for the running requests.
        sequences: Live sequences.
        evictions: Cached blocks that lost their content.
        evictions_by_cause: The evictions by cause, in the order of `EVICTION_CAUSES`.
        query_tokens: Prompt tokens of admitted requests.
        hit_tokens: Tokens of ``query_tokens`` served from the prefix cache.
        shared_hit_tokens: Tokens of ``hit_tokens`` from blocks that requests with any salt may read.
        merged: Duplicate blocks released because another sequence had published the same tokens.
    """

    num_blocks: int
    usable: int
    used: int
    cached: int
    free: int
    reserved: int
    sequences: int
    evictions: int
    evictions_by_cause: tuple[int, ...]
    query_tokens: int
    hit_tokens: int
    shared_hit_tokens: int
    merged: int
