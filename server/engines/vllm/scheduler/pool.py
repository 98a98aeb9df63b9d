"""Statistics of cached blocks in vLLM's pool: how many can be evicted, and what caused past evictions."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from vllm.logger import init_logger

# This logger is a child of the "vllm" logger, because vLLM configures only its own loggers.
logger = init_logger(f"vllm.{__name__}")

# Number of stack frames that `_cause` searches. The manager's allocate_slots is four or five frames above the
# method of the pool that evicts a block (vLLM 0.30 to 0.33).
_DEPTH = 10


def cached_blocks(manager: Any) -> int:
    """Return the number of blocks of a vLLM KVCacheManager that a prefix can hit and no request references.

    O(requests with blocks). It is the number of blocks with content minus the blocks in use with content. Two
    blocks with equal content, computed in parallel, are a single entry in vLLM's cache. The result is then too
    low by one.
    """
    pool = manager.block_pool
    in_use = int(pool.num_gpu_blocks) - 1 - int(pool.get_num_free_blocks())
    unhashed = 0
    for group in manager.coordinator.single_type_managers:
        for id, table in group.req_to_blocks.items():
            unhashed += len(table) - group.num_cached_block.get(id, 0)
    return max(0, len(pool.cached_block_hash_to_block) - (in_use - unhashed))


class Evictions:
    """A counter of the cached blocks that vLLM's pool evicts, by cause: `prefill`, `decode`, `reset`.

    In a full pool nearly every allocation evicts, and `_cause` takes microseconds to find the cause. So
    `stepping` announces steps in which all running requests decode. In such a step, the cause is `decode` until
    vLLM looks up the prefix of the first waiting request, and `prefill` after that.
    """

    def __init__(self, manager: Any) -> None:
        self.counts: Counter[str] = Counter()
        # Cause of all evictions at present. If it is empty, `_cause` must find the cause of each eviction.
        self._known = ""
        self._failed = False  # whether an exception in our code has stopped the counting
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
        """Return the number of blocks of `pool` that a prefix can hit, or 0 if reading fails."""
        try:
            return len(pool.cached_block_hash_to_block)
        except Exception:
            self._fail()
            return 0

    def _fail(self) -> None:
        self._failed = True
        logger.exception("Tonnage failed to count evicted blocks and stops counting them")

    def stepping(self, decodes: bool) -> None:
        """Record whether all running requests decode in the step that begins.

        In such a step, an eviction before the first prefix lookup is by a decode, because vLLM looks up the
        prefix of every request that starts. Pass False at the end of a step, and when some running request may
        still be in its prefill.
        """
        self._known = "decode" if decodes else ""


def _cause() -> str:
    """Return why vLLM evicts a block: for `prefill` or `decode` of a request, or `reset` without a request.

    The function finds the request among the local variables of callers on the stack.
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
