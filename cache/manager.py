"""The block manager with all its features, as engines and the replay of traces create it.

`tonnage.cache.block_manager.BlockManager` is the mechanism. Here it gets the admission modes, learned eviction,
KV events and the checks of the invariants. No other module puts them together.
"""

from __future__ import annotations

from typing import Literal

from tonnage.cache.admission.controller import Admission
from tonnage.cache.admission.policy import Policy
from tonnage.cache.admission.types import AdmissionMode
from tonnage.cache.block_manager import BlockManager
from tonnage.cache.blocks.state import columns
from tonnage.cache.errors import CacheConfigError
from tonnage.cache.laws import sampled as laws
from tonnage.cache.prefix.events import EventLog, Subscriber
from tonnage.cache.prefix.keyed import keyed_hash
from tonnage.cache.results import Admitted, BlockCopy, CacheStats
from tonnage.cache.sequences import learned
from tonnage.planner.model.layout import KVLayout

__all__ = ["Admitted", "BlockCopy", "CacheStats", "KVCacheManager"]

Eviction = Literal["adaptive", "lru"]


class KVCacheManager(BlockManager):
    """A block manager with an admission policy, learned eviction, KV events and checks of its invariants.

    `BlockManager` describes in more detail the arguments that both classes have.

    Args:
        layout: KV cache groups and block size.
        num_blocks: Blocks of the pool, with the null block (block 0).
        max_num_seqs: Upper bound of live sequences.
        max_model_len: Upper bound of prompt + max_tokens, in tokens.
        max_num_batched_tokens: Upper bound of positions that one sequence computes in a step.
        enable_prefix_caching: Whether full blocks are kept for later requests with the same prefix.
        policy: Admission policy; None is ``no_evict``.
        eviction: "adaptive" for learned eviction (`tonnage.cache.eviction.reuse`), or "lru".
        prefix_cache_retention_interval: Tokens between two kept recurrent states (vLLM's name).
        hash_seed: Key of the block hashes; None: a random key.
        kv_events: Whether `subscribe` is allowed; never if every group has a sliding window.

    Attributes:
        violations: Number of calls of `sample_invariants` that found a broken invariant.
    """

    admission: Admission

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        policy: Policy | None = None,
        eviction: Eviction = "adaptive",
        prefix_cache_retention_interval: int | None = 0,
        hash_seed: int | None = None,
        kv_events: bool = False,
    ) -> None:
        super().__init__(
            layout,
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            admission=lambda held: Admission(policy or Policy(AdmissionMode.NO_EVICT), held),
            prefix_cache_retention_interval=prefix_cache_retention_interval,
            hash_seed=hash_seed,
            keyed_hash=keyed_hash,
            logged=kv_events,
            learning=eviction == "adaptive",
        )
        core, self.model = self.core, columns(self.core.model)
        if self.model.learning[0]:
            self.prefix.lock_hit, self.leave = learned.lock_hit, learned.leave
        self._events = EventLog(core) if self.counts.logged[0] else None
        if self._events is not None:
            self.on_step = self._events.flush
        self.violations = 0

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with all later KV events (blocks stored in or removed from the prefix cache).

        Raises CacheConfigError unless the manager was created with ``kv_events``.
        """
        if self._events is None:
            raise CacheConfigError(
                "KV events are off",
                field="kv_events",
                hint="create the manager with kv_events=True; a layout of sliding windows alone has none",
            )
        self._events.subscribe(subscriber)

    def reset_prefix_cache(self) -> None:
        """Evict all blocks of the prefix cache, for example after the model's weights have changed.

        Raises CacheBusy while a sequence is live.
        """
        held = self.pool.cached > 0
        super().reset_prefix_cache()
        if held:  # LRU's simulated cache is emptied as well
            self.model.span[0] = self.model.alive[0] = 0
        if self._events is not None:
            self._events.cleared()

    def sample_invariants(self) -> str | None:
        """Return the name of the block manager's first broken invariant, or None if all hold; raise nothing.

        ``violations`` counts the calls that found a broken invariant. The checks are compiled and take
        milliseconds for a large pool, so that a server can call them between steps.
        """
        broken = laws.first_broken(self.core)
        self.violations += broken is not None
        return None if broken is None else broken[0]
