"""What the block manager answers with."""

from __future__ import annotations

from dataclasses import dataclass

# Why blocks are evicted: for K/V of prompts, of answers, for a copy on write, and because everything cached was
# to be forgotten.
EVICTION_CAUSES = ("prefill", "decode", "copy_on_write", "reset")


@dataclass(frozen=True, slots=True)
class Admitted:
    """Runs now. K/V of the first ``cached_tokens`` prompt positions is already in the row's blocks;
    ``shared_tokens`` of them come from blocks that any salt may read. ``junction``: up to where full groups
    have the prompt, where that is further because no recurrent state is cached there; else 0."""

    row: int
    cached_tokens: int
    shared_tokens: int = 0
    junction: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole block ``src`` to ``dst`` (all layer slots, K and V) before the step writes anything."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks by state: used + cached + free = usable, used <= reserved <= usable. Counters since the start.

    ``evictions_by_cause`` are in the order of `EVICTION_CAUSES`.
    ``query_tokens`` are the prompt tokens of admitted requests, ``hit_tokens`` those served from the cache,
    ``shared_hit_tokens`` the part of them from blocks that any salt may read, ``merged`` the duplicate blocks
    given back when a sequence had computed what another one had published, ``violations`` the calls of
    `sample_invariants` that found a broken law.
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
    violations: int
