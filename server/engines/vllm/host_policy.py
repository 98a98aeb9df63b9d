"""The learned order of eviction as a policy of vLLM's KV tier in host memory.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 17179869184, "eviction_policy": "LearnedCachePolicy",
        "cache_policy_module_path": "tonnage.server.engines.vllm.host_policy"}}'

vLLM's manager of the tier registers each chunk with a cache policy, and asks the policy which chunks to evict
(vLLM 0.32, v1/kv_offload/cpu/policies/base.py). This module adapts `tonnage.cache.eviction.chunk_order` to the
interface of such a policy.

An exception in our code never fails a request: after the first one, the least recently used chunks are evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from tonnage.cache.eviction.chunk_order import LearnedChunkOrder

# This logger is a child of the "vllm" logger, because vLLM configures only its own loggers.
log = init_logger(f"vllm.{__name__}")


class LearnedCachePolicy(CachePolicy):
    """A cache policy for vLLM's KV tier in host memory that evicts chunks in the learned order.

    Args:
        cache_capacity: Capacity of the tier, in chunks.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: OrderedDict[Any, ChunkStatus] = OrderedDict()  # the least recently used chunk comes first
        self._busy: dict[Any, int] = {}  # key of a chunk -> a value other than 0 while it is in transfer.
        # The learned eviction order; None after an exception: then the least recently used chunks are evicted.
        self._order: LearnedChunkOrder[Any] | None = LearnedChunkOrder(cache_capacity)

    def get(self, key: Any) -> ChunkStatus | None:
        """Return the chunk with the key `key`, or None if it is not in the KV tier."""
        return self._chunks.get(key)

    def insert(self, key: Any, chunk: ChunkStatus) -> None:
        """Add a chunk that is about to be stored in the KV tier."""
        self._chunks[key], self._busy[key] = chunk, chunk.ref_cnt
        self._learned(lambda order: order.insert(key))

    def remove(self, key: Any) -> None:
        """Remove a chunk that could not be stored in the KV tier."""
        del self._chunks[key]
        self._busy.pop(key, None)
        self._learned(lambda order: order.remove(key))

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """Mark the chunks `keys` as used now in the LRU order.

        The chunks are marked in reverse order, so the first of `keys` becomes the most recently used chunk.

        The LRU order is the fallback. The learned order is updated in `on_request_finished` instead.
        """
        for key in reversed(list(keys)):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        """Do nothing for chunks that the tier does not hold, because `insert` is called for them next."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        """Update the order of eviction by the chunks that a request used, in prefix order for each group."""
        self.touch(order_request_keys(key_groups, req_context), req_context)

        def finish(order: LearnedChunkOrder[Any]) -> None:
            for keys in key_groups:
                order.finish(keys, reused_keys)

        self._learned(finish)

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, ChunkStatus]] | None:
        """Evict from the KV tier and return ``n`` chunks that are neither in transfer nor protected.

        Returns None and removes no chunk if fewer can be evicted.
        """
        if self._order is not None:
            keys = self._learned(lambda order: order.evict(n, protected, self._busy))
            if self._order is not None:
                return None if keys is None else [(key, self._chunks.pop(key)) for key in keys]
        idle = (key for key, chunk in self._chunks.items() if chunk.ref_cnt == 0 and key not in protected)
        oldest = [key for key, _ in zip(idle, range(n), strict=False)]
        return [(key, self._chunks.pop(key)) for key in oldest] if len(oldest) == n else None

    def mark_evictable(self, key: Any) -> None:
        """Record that the last transfer of a chunk has ended, so that it may be evicted."""
        self._busy.pop(key, None)

    def mark_non_evictable(self, key: Any) -> None:
        """Record that a chunk is in transfer, and protect it until the request that loads it ends."""
        self._busy[key] = 1
        self._learned(lambda order: order.use((key,)))

    def clear(self) -> None:
        """Remove all chunks from the policy and its order of eviction."""
        self._chunks.clear()
        self._busy.clear()
        self._learned(lambda order: order.clear())

    def _learned(self, call: Callable[[LearnedChunkOrder[Any]], Any]) -> Any:
        """Return the result of ``call`` on the learned order of eviction, or None if it raises.

        After the first exception, the learned order is no longer used.
        """
        if self._order is None:
            return None
        try:
            return call(self._order)
        except Exception:
            log.exception(
                "the learned eviction of the host tier is off; least recently used chunks are evicted"
            )
            self._order = None
            return None
