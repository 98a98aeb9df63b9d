"""vLLM on a GPU: the workspace of FlashInfer's attention.

The builder of its metadata allocates it on first use (v1/attention/backends/flashinfer.py
_get_workspace_buffer). No attention runs in the profile run: the first full graph of the first model runner's
trial capture is where it appears, so that it counts as CUDA graphs (vllm#50780). The second runner makes it
with the pool (v1/worker/gpu/attn_utils.py init_attn_backend), where nothing counts it.
"""

from __future__ import annotations

from tonnage.planner.devices.catalogue import capability_of
from tonnage.planner.engines.vllm.versions import rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved
from tonnage.planner.units import MiB

_LEAST = 394 * MiB  # VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE (envs.py, 0.25.1 to 0.33)
_PER_VALUE = 16  # FLASHINFER_PREFILL_WORKSPACE_BYTES_PER_ELEM
_HEAD_SIZES = (64, 128, 256, 512)  # get_supported_head_sizes
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


def workspace(architecture: Architecture, chosen: Resolved) -> int:
    """Bytes on one rank, 0 where another backend runs. FlashAttention comes first but on SM10x, and takes fp8
    on Hopper only (_get_backend_priorities in platforms/cuda.py, supports_kv_cache_dtype of
    FlashAttentionBackend, 0.25.1 to 0.29). Of models with windows it is not known which one runs."""
    flags = chosen.flags
    capability = capability_of(flags.gpu)
    attention = [layer for layer in architecture.cache_layers if layer.kind != "state"]
    if capability is None or capability < (8, 0) or flags.enforce_eager:
        return 0
    if not attention or any(layer.kind != "full" or layer.head_size not in _HEAD_SIZES for layer in attention):
        return 0
    if capability[0] == 10:  # TensorRT-LLM's kernels, which have one of fixed size
        return _LEAST
    if capability[0] == 9 or flags.kv_cache_dtype not in _FP8 or flags.num_speculative_tokens:
        return 0  # drafts are verified in pieces of graphs, outside of which attention runs
    if not rules(chosen.version).sized_workspace:
        return _LEAST
    heads = architecture.heads // flags.tensor_parallel_size
    size = max(layer.head_size for layer in attention)
    return max(_LEAST, chosen.max_num_batched_tokens * heads * size * _PER_VALUE)
