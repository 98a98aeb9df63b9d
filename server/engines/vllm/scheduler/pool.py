"""Cached blocks in vLLM's block pool: how many can be reclaimed, and why others were evicted."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

# Frames between the pool's hook and the manager's allocate_slots (0.30 to 0.33: four or five).
_DEPTH = 10


def cached_blocks(manager: Any) -> int:
    """Return the blocks of vLLM's KVCacheManager that a prefix can hit and no request references.

    O(requests with blocks). The count is the blocks with content minus the blocks in use with content. Two
    blocks with equal content, computed in parallel, are one entry of vLLM's cache: the count is then too low by
    one.
    """
    pool = manager.block_pool
    in_use = int(pool.num_gpu_blocks) - 1 - int(pool.get_num_free_blocks())
    unhashed = 0
    for group in manager.coordinator.single_type_managers:
        for id, table in group.req_to_blocks.items():
            unhashed += len(table) - group.num_cached_block.get(id, 0)
    return max(0, len(pool.cached_block_hash_to_block) - (in_use - unhashed))


class Evictions:
    """A counter of evicted cached blocks by cause: `prefill`, `decode`, `reset`.

    In a full pool nearly every allocation evicts, and finding the cause (`_cause`) costs microseconds. In a
    step whose running requests all decode, set by `stepping`, the cause is `decode` until vLLM looks up the
    first prefix of a waiting request, and `prefill` after that.
    """

    def __init__(self, manager: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._known = ""  # the cause of all evictions now, if it is known
        self._failed = False  # an exception of ours stopped the counting
        pool = manager.block_pool
        evict, reset = pool._maybe_evict_cached_block, pool.reset_prefix_cache
        match = manager.get_computed_blocks

        def matched(*args: Any, **named: Any) -> Any:
            if self._known:
                self._known = "prefill"
            return match(*args, **named)

        def counted(block: Any) -> bool:
            evicted = bool(evict(block))
            if evicted and not self._failed:
                try:
                    self.counts[self._known or _cause()] += 1
                except Exception:
                    self._fail()
            return evicted

        def counted_reset() -> bool:
            cached = self._cached(pool)
            done = bool(reset())
            if done and not self._failed:
                try:
                    self.counts["reset"] += cached
                except Exception:
                    self._fail()
            return done

        pool._maybe_evict_cached_block, pool.reset_prefix_cache = counted, counted_reset
        manager.get_computed_blocks = matched

    def _cached(self, pool: Any) -> int:
        """Return the blocks of `pool` that a prefix can hit, or 0 when reading them fails."""
        try:
            return len(pool.cached_block_hash_to_block)
        except Exception:
            self._fail()
            return 0

    def _fail(self) -> None:
        self._failed = True
        logger.exception("Tonnage failed to count evicted blocks and stops counting them")

    def stepping(self, decodes: bool) -> None:
        """Set whether a step begins whose running requests all decode.

        In such a step vLLM looks up the prefix of every request that starts. False also ends a step, and stands
        for steps where this is not certain.
        """
        self._known = "decode" if decodes else ""


def _cause() -> str:
    """Return why vLLM allocates a block: `reset` without a request, else `prefill` or `decode`.

    The request is a local variable of a caller on the stack.
    """
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame.f_code.co_name == "allocate_slots":
            request = frame.f_locals["request"]
            return "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "reset"
