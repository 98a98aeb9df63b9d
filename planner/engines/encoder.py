"""Encoder models such as BERT, in any engine: they need no pool of KV cache blocks.

An encoder computes a whole text in one step and keeps nothing between steps, so its cache takes 0 bytes per
token. In vLLM 0.32.0, encoder layers register no cache (EncoderOnlyAttention.get_kv_cache_spec), and the pool
has only the null block (get_kv_cache_config_from_groups in v1/core/kv_cache_utils.py). Chunked prefill and
prefix caching are off (ModelConfig.is_chunked_prefill_supported), so one step must hold the longest text.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import KV_DTYPE_BYTES
from tonnage.planner.model.layout import KVLayout
from tonnage.planner.plans import Term

NOTE = (
    "an encoder reads a whole text in one step and keeps nothing between steps: no KV cache, 0 bytes per token"
)
_UNUSED = "--kv-cache-memory-bytes has no effect: there is no pool to size"


def build_pool(architecture: Architecture, flags: Deployment, block_size: int) -> PoolSpec:
    """Return a pool without layers for an encoder, with a note that an encoder has no KV cache."""
    dtype = flags.kv_cache_dtype
    layout = KVLayout(
        groups=(), block_size=block_size, layer_slots=0, kv_heads=architecture.kv_heads,
        head_size=architecture.head_size, dtype=dtype, dtype_bytes=KV_DTYPE_BYTES.get(dtype, 0),
    )  # fmt: skip
    notes = (NOTE,) if flags.kv_cache_memory_bytes is None else (NOTE, _UNUSED)
    return PoolSpec(layout, (), notes)


def capacity(max_num_seqs: int) -> PoolCapacity:
    """Return an encoder's pool capacity: ``max_num_seqs`` texts at once, and only the null block (block 0)."""
    return PoolCapacity(1, 0, 0, 0, float(max_num_seqs))


def whole_texts(deployment: Deployment, max_model_len: int, tokens: int) -> tuple[Deployment, int]:
    """Return the flags and tokens per step for an encoder, which computes each text in one step.

    Prefix caching is turned off. A step holds at least ``max_model_len`` tokens, as in vLLM's default for
    pooling models (engine/arg_utils.py).

    Raises:
        DeploymentError: --max-num-batched-tokens is below ``max_model_len``.
    """
    asked = deployment.max_num_batched_tokens
    if asked is not None and asked < max_model_len:
        raise DeploymentError(
            f"{asked} is below --max-model-len {max_model_len}: an encoder computes a whole text in one step",
            field="--max-num-batched-tokens",
            hint=f"set it to at least {max_model_len}",
        )
    return replace(deployment, enable_prefix_caching=False), max(tokens, max_model_len)


def terms() -> list[Term]:
    """Return the plan's figure for an encoder's KV pool, kv_pool_bytes, which is 0 bytes."""
    return [Term("kv_pool_bytes", 0, NOTE, "model_type")]
