"""vLLM's KV cache groups as admission sees them: full groups, and upper bounds for all other groups.

A *full* group keeps the K and V of every token, in blocks of one size. Admission forecasts its growth block by
block. Other groups are sliding windows, recurrent states, encoder tokens and groups with another block size. In
these, a request reserves at its start the most blocks it can ever hold, as in
`tonnage.cache.admission.reservation`. Source: v1/core/single_type_kv_cache_manager.py of vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
)

from tonnage.cache.admission import Limits
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.planner.units import ceil_div
from tonnage.server.engines.vllm.scheduler.versions import VllmNames

_KEEP_ALL = (FullAttentionManager, SinkFullAttentionManager)


@dataclass(frozen=True, slots=True)
class Other:
    """A KV cache group that is not full; a request reserves its blocks there at its start.

    Attributes:
        manager: vLLM's manager of the group.
        most: upper bound of a request's blocks; None if only its number of tokens bounds them.
        extra: blocks in addition to the blocks for tokens (in Mamba groups, for speculation and checkpoints).
    """

    manager: Any
    most: int | None
    extra: int

    def most_blocks(self, slots: int, encoder_slots: int) -> int:
        """Return the upper bound of a request's KV blocks in this group.

        Args:
            slots: number of token slots of prompt and output.
            encoder_slots: number of token slots of encoder inputs.
        """
        tokens = encoder_slots if isinstance(self.manager, CrossAttentionManager) else slots
        blocks = ceil_div(tokens, self.manager.block_size) + self.extra
        return blocks if self.most is None else min(blocks, self.most)

    def own_blocks(self, id: str, processed: int, hit: int) -> int:
        """Return a lower bound of the request's blocks in this group that were not found in the prefix cache.

        Args:
            id: request id.
            processed: number of computed tokens, without steps in flight.
            hit: tokens found in the prefix cache.
        """
        held = len(self.manager.req_to_blocks.get(id, ()))
        if isinstance(self.manager, MambaManager):
            return min(held, 1)  # only the request's last block is certainly real; others may be null blocks
        size = self.manager.block_size
        gone = self.manager.get_num_skipped_tokens(processed) // size if self._slides else 0
        return max(0, held - max(gone, ceil_div(hit, size)))

    @property
    def _slides(self) -> bool:
        return isinstance(self.manager, SlidingWindowManager | ChunkedLocalAttentionManager)


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV cache groups of one vLLM scheduler, as admission sees them.

    Attributes:
        full: index of the first full group in vLLM's list; None without a full group.
        others: the groups that are not full.
        limits: numbers of blocks and length limits for admission.
        lookahead: token slots that a request takes in a step beyond its last token, for draft tokens and for
            the draft proposer.
        in_flight: number of draft tokens in the previous step; async scheduling counts them as computed until
            the step returns.
    """

    full: int | None
    others: tuple[Other, ...]
    limits: Limits
    lookahead: int
    in_flight: int = 0

    @property
    def count(self) -> int:
        """Return the number of full groups: KV cache groups with full attention and one block size."""
        return len(self.limits.layout.groups)

    def most_blocks(self, tokens: int, encoder_tokens: int) -> tuple[int, int]:
        """Return upper bounds of a request's KV blocks: (in full-attention groups, in all other groups).

        The last output token is sampled and never computed, so it needs no slot. Draft tokens after it may need
        slots.

        Args:
            tokens: number of prompt and output tokens.
            encoder_tokens: number of tokens of the request's encoder inputs.
        """
        slots = min(tokens - 1 + self.lookahead + self.in_flight, self.limits.max_model_len)
        full = self.count * ceil_div(slots, self.limits.layout.block_size)
        return full, sum(other.most_blocks(slots, encoder_tokens) for other in self.others)


def read_groups(scheduler: Any, names: VllmNames) -> Groups:
    """Return vLLM's KV cache groups as admission sees them, read from a newly created vLLM scheduler."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    config = scheduler.vllm_config
    keep_all = [
        (at, manager.block_size)
        for at, manager in enumerate(managers)
        if type(manager) in _KEEP_ALL and getattr(manager, names.most_blocks) is None
    ]
    size = min((size for _, size in keep_all), default=min(manager.block_size for manager in managers))
    full = [at for at, block_size in keep_all if block_size == size]
    layout = KVLayout(
        tuple(KVGroup("full", (at,)) for at in full), size, 1, 1, 1, str(config.model_config.dtype), 1
    )  # admission reads only the groups and the block size; the other values are placeholders
    return Groups(
        full=full[0] if full else None,
        others=tuple(
            _other(manager, getattr(manager, names.most_blocks), config)
            for at, manager in enumerate(managers)
            if at not in full
        ),
        limits=Limits(
            layout,
            # one less than vLLM's number of blocks, because the null block cannot hold tokens
            usable_blocks=scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
            max_model_len=scheduler.max_model_len,
            max_num_seqs=scheduler.max_num_running_reqs,
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            prefix_caching=scheduler.kv_cache_manager.enable_caching,
        ),
        lookahead=scheduler.num_spec_tokens + scheduler.num_lookahead_tokens,
        # vLLM 0.30 to 0.33 (v1/core/sched/async_scheduler.py) counts draft tokens as computed until their step
        # returns. Before it returns, schedule() may schedule another step of the request, unless the tokens
        # without drafts reach max_tokens.
        in_flight=scheduler.num_spec_tokens if config.scheduler_config.async_scheduling else 0,
    )


def _other(manager: Any, most: int | None, config: Any) -> Other:
    spec = manager.kv_cache_spec
    if not isinstance(manager, MambaManager):
        return Other(manager, most, 0)
    if getattr(spec, "mamba_cache_mode", "none") != "align":
        return Other(manager, most, spec.num_speculative_blocks)
    # With Mamba's cache mode "align", a request needs in a step one block for the state that it reads, one for
    # the state that it writes, and one for a checkpoint. A prefix hit is copied, which takes one more block.
    bound = spec.max_memory_usage_bytes(config) // spec.page_size_bytes + 1
    return Other(manager, bound, bound)
