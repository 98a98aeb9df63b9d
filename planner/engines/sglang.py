"""SGLang's token pools: one slot per token, full and sliding layers in pools of their own sizes.

Source: sglang/srt/mem_cache/memory_pool.py and model_executor/model_runner.py (0.5): SWAKVPool splits the
memory between ``full`` tokens and ``full x swa_full_tokens_ratio`` tokens; max_total_num_tokens is the full
pool's. "GB" in its log is GiB. Checked against the logs in tests/data/field_reports.jsonl.
"""

from __future__ import annotations

from tonnage.planner.architecture import Architecture, CacheLayer
from tonnage.planner.dtypes import KV_DTYPE_BYTES
from tonnage.planner.engines.vllm import heads_per_rank
from tonnage.planner.errors import UnsupportedArchitecture


def token_bytes(architecture: Architecture, kv_dtype: str, ranks: int) -> tuple[int, int]:
    """(full, sliding) bytes per token on one rank. Raises UnsupportedArchitecture for other caches."""
    full = sliding = 0
    for layer in architecture.cache_layers:
        if layer.shares is not None:
            continue
        if layer.kind not in ("full", "mla", "sliding") or layer.compression > 1:
            raise UnsupportedArchitecture(
                f"{layer.kind} layers in SGLang's pools are not known here", field="layer_types"
            )
        size = _layer_bytes(layer, kv_dtype, ranks)
        if layer.kind == "sliding":
            sliding += size
        else:
            full += size
    return full, sliding


def _layer_bytes(layer: CacheLayer, kv_dtype: str, ranks: int) -> int:
    size = KV_DTYPE_BYTES[kv_dtype]
    if layer.kind == "mla":
        return (layer.head_size + layer.index_size) * size
    value = layer.head_size if layer.value_head_size is None else layer.value_head_size
    return heads_per_rank(layer.kv_heads, ranks) * (layer.head_size + value) * size
