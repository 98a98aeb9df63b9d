"""SGLang and llama.cpp in the planner's terms: a block is one token slot (a cell)."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture
from tonnage.planner.deployment import Resolved
from tonnage.planner.dtypes import KV_DTYPE_BYTES
from tonnage.planner.engines import llama_cpp, sglang
from tonnage.planner.engines.pool import Demand, PoolSpec
from tonnage.planner.layout import KVGroup, KVLayout
from tonnage.planner.units import ceil_div


def build_pool(architecture: Architecture, chosen: Resolved) -> PoolSpec:
    """One token slot of all layers is a block. Raises UnsupportedArchitecture."""
    flags = chosen.flags
    if flags.engine == "sglang":
        full, sliding = sglang.token_bytes(architecture, flags.kv_cache_dtype, flags.tensor_parallel_size)
        size = int(full + flags.swa_full_tokens_ratio * sliding) if full and sliding else full or sliding
        dtype, width = flags.kv_cache_dtype, KV_DTYPE_BYTES[flags.kv_cache_dtype]
    else:
        sequences = chosen.max_num_seqs
        context = chosen.max_model_len * sequences  # n_ctx is what all sequences share
        cache = llama_cpp.size_cache(
            architecture, context, flags.kv_cache_dtype, sequences=sequences,
            ubatch=chosen.max_num_batched_tokens, unified=sequences == 1,
        )  # fmt: skip
        size = ceil_div(cache.bytes, context)
        dtype, width = flags.kv_cache_dtype, 2
    layers = tuple(layer.layer for layer in architecture.cache_layers if layer.shares is None)
    layout = KVLayout(
        groups=(KVGroup("full", layers),),
        block_size=1,
        layer_slots=1,
        kv_heads=architecture.kv_heads,
        head_size=architecture.head_size,
        dtype=dtype,
        dtype_bytes=width,
        page_bytes=size,
    )
    return PoolSpec(layout, (Demand(1),))
