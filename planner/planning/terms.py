"""How the KV pool came about, for ``--explain``."""

from __future__ import annotations

from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.resolved import Resolved
from tonnage.planner.model.dtypes import KV_SCALE_BYTES
from tonnage.planner.plans import Term


def kv_terms(pool: PoolSpec, num_blocks: int, chosen: Resolved) -> list[Term]:
    if not pool.demands:
        from tonnage.planner.engines.encoder import terms as encoder_terms

        return encoder_terms()
    layout = pool.layout
    plain = all(group.kind in ("full", "sliding", "chunked") for group in layout.groups)
    per_token = f"{layout.kv_heads} KV heads x {layout.head_size} x {layout.dtype_bytes} bytes"
    formula = f"{layout.layer_slots} layers x 2 (K and V) x {layout.block_size} tokens x {per_token}"
    if (
        not plain
        or layout.slot_bytes != 2 * layout.block_size * layout.kv_heads * layout.head_size * layout.dtype_bytes
    ):
        formula = (
            f"{layout.layer_slots} layer slots x {layout.slot_bytes:,} bytes (the largest page of a layer)"
        )
        if (scale := KV_SCALE_BYTES.get(layout.dtype)) and plain:
            each = f"{layout.head_size} x {layout.dtype_bytes} + a scale of {scale}"
            rows = f"{layout.layer_slots} layers x 2 (K and V) x {layout.block_size} tokens"
            formula = f"{rows} x {layout.kv_heads} KV heads x ({each}) bytes"
    terms = [
        Term(
            "kv_cache.bytes_per_block", layout.bytes_per_block, formula,
            "num_hidden_layers, num_key_value_heads, head_dim, --block-size, --kv-cache-dtype",
        )
    ]  # fmt: skip
    for i, (group, demand) in enumerate(zip(layout.groups, pool.demands, strict=True)):
        tokens = chosen.max_model_len
        if demand.fixed is not None:
            how, source = (
                f"{demand.fixed} whatever the length",
                "--enable-prefix-caching, --num-speculative-tokens",
            )
        elif demand.most is not None:
            kept = min(demand.most, tokens)
            how = f"{kept:,} tokens / {demand.block_size} + {demand.extra}, window {group.window:,}"
            source = "sliding_window, --max-num-batched-tokens, --max-model-len"
        else:
            how, source = f"{tokens:,} tokens / {demand.block_size}", "--max-model-len"
        terms.append(
            Term(
                f"kv_cache.groups[{i}].blocks_per_sequence", demand.blocks(tokens),
                f"{group.kind}, {len(set(group.layers))} layers: {how}", source,
            )
        )  # fmt: skip
    given = chosen.flags.kv_cache_memory_bytes is not None
    terms.append(
        Term(
            "kv_pool_bytes",
            num_blocks * layout.bytes_per_block,
            f"{num_blocks:,} blocks x {layout.bytes_per_block:,}; block 0 is the null block",
            "--kv-cache-memory-bytes" if given else "--device-memory x --gpu-memory-utilization less the rest",
        )
    )
    return terms
