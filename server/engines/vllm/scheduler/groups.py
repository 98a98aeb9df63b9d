"""vLLM's KV cache groups in the terms of admission: full groups, and upper bounds for all others.

A *full* group keeps every token, in blocks of the one size that all full groups have. Its growth is forecast
block by block. In every other group (sliding windows, recurrent states, encoder tokens, other block sizes) a
request reserves at once the most blocks it can ever hold, as in `tonnage.cache.admission.reservation`. Source:
v1/core/single_type_kv_cache_manager.py of vLLM 0.30 to 0.33.
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
    """A KV cache group that is not full, so its blocks are reserved at once.

    Attributes:
        manager: vLLM's manager of the group.
        most: upper bound of a request's blocks, None when only its tokens bound them.
        extra: blocks beside the tokens' blocks (Mamba's, for speculation and checkpoints).
    """

    manager: Any
    most: int | None
    extra: int

    def most_blocks(self, slots: int, encoder_slots: int) -> int:
        """Return the upper bound of the blocks of a request with `slots` token slots."""
        tokens = encoder_slots if isinstance(self.manager, CrossAttentionManager) else slots
        blocks = ceil_div(tokens, self.manager.block_size) + self.extra
        return blocks if self.most is None else min(blocks, self.most)

    def own_blocks(self, id: str, processed: int, hit: int) -> int:
        """Return a lower bound of the blocks that the request holds and did not find in the prefix cache.

        Args:
            id: request id.
            processed: tokens whose step has come back.
            hit: tokens found in the prefix cache.
        """
        held = len(self.manager.req_to_blocks.get(id, ()))
        if isinstance(self.manager, MambaManager):
            return min(held, 1)  # other blocks may be null blocks; only the last one is certain
        size = self.manager.block_size
        gone = self.manager.get_num_skipped_tokens(processed) // size if self._slides else 0
        return max(0, held - max(gone, ceil_div(hit, size)))

    @property
    def _slides(self) -> bool:
        return isinstance(self.manager, SlidingWindowManager | ChunkedLocalAttentionManager)


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV cache groups of one scheduler.

    Attributes:
        full: index of the first full group in vLLM's list, None without one.
        others: the groups that are not full.
        limits: blocks and lengths for admission.
        lookahead: slots that a step takes beyond its last token (draft tokens and their proposer's slots).
        in_flight: draft tokens of the step before, which async scheduling counts as computed until it comes
            back.
    """

    full: int | None
    others: tuple[Other, ...]
    limits: Limits
    lookahead: int
    in_flight: int = 0

    @property
    def count(self) -> int:
        """Return the number of full groups."""
        return len(self.limits.layout.groups)

    def most_blocks(self, tokens: int, encoder_tokens: int) -> tuple[int, int]:
        """Return the upper bounds of a request's blocks, in full groups and in all other groups.

        The last token is sampled and never computed, so it needs no slot; a draft token beyond it may.

        Args:
            tokens: prompt and output tokens.
            encoder_tokens: tokens of its encoder inputs.
        """
        slots = min(tokens - 1 + self.lookahead + self.in_flight, self.limits.max_model_len)
        full = self.count * ceil_div(slots, self.limits.layout.block_size)
        return full, sum(other.most_blocks(slots, encoder_tokens) for other in self.others)


def read_groups(scheduler: Any, names: VllmNames) -> Groups:
    """Return the KV cache groups of a newly created vLLM scheduler."""
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
    )  # admission reads only the groups and the block size of this layout
    return Groups(
        full=full[0] if full else None,
        others=tuple(
            _other(manager, getattr(manager, names.most_blocks), config)
            for at, manager in enumerate(managers)
            if at not in full
        ),
        limits=Limits(
            layout,
            usable_blocks=scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,  # one is the null block
            max_model_len=scheduler.max_model_len,
            max_num_seqs=scheduler.max_num_running_reqs,
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            prefix_caching=scheduler.kv_cache_manager.enable_caching,
        ),
        lookahead=scheduler.num_spec_tokens + scheduler.num_lookahead_tokens,
        # vLLM 0.30 to 0.33 (v1/core/sched/async_scheduler.py) counts drafts as computed until a step returns.
        # schedule() adds another step meanwhile, unless max_tokens is reached without the drafts.
        in_flight=scheduler.num_spec_tokens if config.scheduler_config.async_scheduling else 0,
    )


def _other(manager: Any, most: int | None, config: Any) -> Other:
    spec = manager.kv_cache_spec
    if not isinstance(manager, MambaManager):
        return Other(manager, most, 0)
    if getattr(spec, "mamba_cache_mode", "none") != "align":
        return Other(manager, most, spec.num_speculative_blocks)
    # In align mode a step holds the state it reads, the state it writes and a checkpoint; a hit is copied.
    bound = spec.max_memory_usage_bytes(config) // spec.page_size_bytes + 1
    return Other(manager, bound, bound)
