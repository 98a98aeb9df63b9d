"""Cached blocks in vLLM's block pool: how many are reclaimable, and what others were given up for."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

# Frames between the pool's hook and the manager's allocate_slots (0.30 to 0.33: four or five).
_DEPTH = 10


def cached_blocks(manager: Any) -> int:
    """Blocks of vLLM's KVCacheManager that nobody references and a prefix can hit; O(requests with blocks).

    Those with content less those in use with content. Two blocks of the same content, computed side by side,
    are one entry of vLLM's cache: then it is too low by one.
    """
    pool = manager.block_pool
    in_use = int(pool.num_gpu_blocks) - 1 - int(pool.get_num_free_blocks())
    unhashed = 0
    for group in manager.coordinator.single_type_managers:
        for id, table in group.req_to_blocks.items():
            unhashed += len(table) - group.num_cached_block.get(id, 0)
    return max(0, len(pool.cached_block_hash_to_block) - (in_use - unhashed))


class Evictions:
    """Counts cached blocks that the pool gives up, by what for: ``prefill``, ``decode``, ``reset``.

    In a full pool nearly every new block is one, and to look at who asks (`_cause`) costs microseconds. So
    `stepping` says when a step begins in which those that run only decode, and the first look for a prefix in
    it that vLLM has come to those that wait.
    """

    def __init__(self, manager: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._known = ""  # what all blocks are taken for now
        self._failed = False  # an exception of ours: nothing is counted any more
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
        """Return the blocks of ``pool`` that a prefix can hit; 0 where that fails."""
        try:
            return len(pool.cached_block_hash_to_block)
        except Exception:
            self._fail()
            return 0

    def _fail(self) -> None:
        self._failed = True
        logger.exception("Tonnage failed to count evicted blocks: it counts no more of them")

    def stepping(self, decodes: bool) -> None:
        """A step begins: all that run decode, and who waits has his prefix looked for. False: that is not
        sure, or it is over."""
        self._known = "decode" if decodes else ""


def _cause() -> str:
    """The request that vLLM allocates for is a local of one of the callers; without one, nobody asked."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame.f_code.co_name == "allocate_slots":
            request = frame.f_locals["request"]
            return "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "reset"
