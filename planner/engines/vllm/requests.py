"""The blocks that a request takes from vLLM's pool, by the rules of vLLM's KV cache manager.

The source is vLLM 0.32.0: v1/core/kv_cache_coordinator.py and v1/core/kv_cache_utils.py
(resolve_kv_cache_block_sizes, partial_hash_hits_enabled). The rules are stated as a RequestLaw of
``tonnage.planner.model.requests``.
"""

from __future__ import annotations

from math import lcm

from tonnage.planner.engines.pool import Demand, PoolSpec
from tonnage.planner.engines.vllm.versions import rules
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.layout import KVGroup
from tonnage.planner.model.requests import GroupLaw, RequestLaw
from tonnage.planner.plans import Resolved


def request_law(architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
    """Return the rule for the number of KV blocks that a request takes, by prompt and output lengths.

    Raises:
        UnsupportedArchitecture: the rule is not known for the cache or the deployment.
    """
    flags, version = chosen.flags, rules(chosen.version)
    if any(layer.compression > 1 for layer in architecture.cache_layers):
        raise _refused("the planner has no rule for layers that compress tokens", "compress_ratios")
    if flags.speculative_model is not None:
        raise _refused("draft tokens take blocks before they are accepted", "--speculative-model")
    if not version.chunks_prompts:
        raise _refused("the planner has no rule for the block manager of V0 (before 0.8)", "--engine-version")
    # An encoder's output cannot be a shared prefix, so vLLM turns prefix caching off (CrossAttentionManager).
    caching = bool(flags.enable_prefix_caching) and all(group.kind != "cross" for group in pool.layout.groups)
    groups = tuple(
        _group(group, demand, caching) for group, demand in zip(pool.layout.groups, pool.demands, strict=True)
    )
    sizes, aligned = {group.block_size for group in groups}, any(group.aligned for group in groups)
    if aligned and len(sizes) > 1:
        raise _refused("blocks of states and of attention hold different numbers of tokens", "--block-size")
    return RequestLaw(
        groups=groups,
        bytes_per_block=pool.layout.bytes_per_block,
        step_tokens=chosen.max_num_batched_tokens,
        in_flight=version.in_flight_batches if flags.device != "cpu" else 1,
        # A reused prefix ends at a block border that all groups have in common.
        hit_tokens=lcm(*sizes) if caching else None,
        source="vLLM's block manager (v1/core of 0.32)",
        note=_note(chosen, aligned),
    )


def _note(chosen: Resolved, aligned: bool) -> str:
    """Return a note if the planned vLLM version's KV cache manager differs from 0.32's, or may differ.

    The manager may differ in versions whose source code was not read; 0.30 to 0.33 were read. Before 0.32,
    prompts of hybrid models are chunked at other positions (get_mamba_prefill_checkpoint_position).
    """
    version = chosen.version
    if version >= (0, 32, 0) or (version >= (0, 30, 0) and not aligned):
        return ""
    why = "keeps states at other block borders" if version >= (0, 30, 0) else "was not read"
    name = chosen.flags.engine_version
    return f"requests are counted by the block manager of vLLM 0.32; that of {name} {why}"


def _refused(why: str, field: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(f"the KV blocks of a request are not known: {why}", field=field)


def _group(group: KVGroup, demand: Demand, caching: bool) -> GroupLaw:
    size = demand.block_size * demand.shards
    if group.kind == "state":
        if demand.fixed is None:
            raise _refused("the cache keeps a state for each block of tokens", "--mamba-cache-mode")
        # Without prefix caching, a request has one recurrent state. With prefix caching, it has the running
        # state, the state at the last block border and a checkpoint.
        return GroupLaw("state", size, blocks=1, aligned=caching, checkpoint=caching and demand.fixed > 2)
    if demand.fixed is not None:
        return GroupLaw("fixed", size, blocks=demand.fixed)
    if group.kind in ("sliding", "chunked"):
        cap = None if demand.most is None else demand.blocks(demand.most)
        return GroupLaw("window" if group.kind == "sliding" else "chunk", size, group.window or 1, cap=cap)
    return GroupLaw("all", size)
