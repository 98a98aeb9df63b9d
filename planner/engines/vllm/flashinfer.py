"""The workspace of FlashInfer's attention in vLLM on a GPU.

vLLM's attention metadata builder allocates the workspace on first use (_get_workspace_buffer in
v1/attention/backends/flashinfer.py). The profile run executes no attention. In vLLM's V1 model runner, the
workspace is therefore allocated when vLLM captures the first full CUDA graph to estimate the memory of graphs,
and vLLM counts it as CUDA graphs (vllm#50780). The V2 model runner allocates it together with the pool
(init_attn_backend in v1/worker/gpu/attn_utils.py), and vLLM does not count it.
"""

from __future__ import annotations

from tonnage.planner.devices.catalogue import capability_of
from tonnage.planner.engines.vllm.versions import on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved
from tonnage.planner.units import MiB

# Minimum bytes of the workspace (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE in envs.py, 0.25.1 to 0.33).
_LEAST = 394 * MiB
# Bytes of the workspace per value of a step's queries (FLASHINFER_PREFILL_WORKSPACE_BYTES_PER_ELEM).
_PER_VALUE = 16
_HEAD_SIZES = (64, 128, 256, 512)  # head sizes that FlashInfer supports (get_supported_head_sizes)
_FORMATS = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")  # cache formats that FlashAttention supports only on Hopper


def charged(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of FlashInfer's attention workspace on one rank that vLLM counts as CUDA graphs."""
    if chosen.flags.enforce_eager or not runs(architecture, chosen):
        return 0
    # TensorRT-LLM's kernels have a separate workspace of fixed size in both of vLLM's model runners.
    if _on_tensorrt(chosen):
        return _LEAST
    # Draft tokens are verified with piecewise CUDA graphs, which do not contain the attention.
    counted = not chosen.flags.num_speculative_tokens and not _second(architecture, chosen)
    return _workspace(architecture, chosen) if counted else 0


def uncounted(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of FlashInfer's attention workspace on one rank outside vLLM's memory budget.

    The V2 model runner allocates them together with the KV pool.
    """
    known = runs(architecture, chosen) and _second(architecture, chosen)
    return _workspace(architecture, chosen) if known else 0


def drops_full_graphs(architecture: Architecture, chosen: Resolved) -> bool:
    """Return whether vLLM captures no full CUDA graphs of decode steps, due to FlashInfer and a draft model.

    FlashInfer's backend supports full CUDA graphs only if a step decodes one token per sequence, except with
    TensorRT-LLM's kernels (config/compilation.py, 0.20 to 0.30). A step that verifies draft tokens computes
    several. The log of a start of 0.20.0 on a GB10 confirms this rule.
    """
    return bool(chosen.flags.num_speculative_tokens) and runs(architecture, chosen) and not _on_tensorrt(chosen)


def _second(architecture: Architecture, chosen: Resolved) -> bool:
    return on_second_runner(architecture, rules(chosen.version))


def _on_tensorrt(chosen: Resolved) -> bool:
    return (capability_of(chosen.flags.gpu) or (0, 0))[0] == 10


def runs(architecture: Architecture, chosen: Resolved) -> bool:
    """Return whether vLLM selects FlashInfer as its attention backend.

    vLLM prefers FlashAttention, except on SM10x (_get_backend_priorities in platforms/cuda.py,
    supports_kv_cache_dtype of FlashAttentionBackend, 0.25.1 to 0.29). For models with sliding windows, the
    planner does not know the selection and returns False.
    """
    capability = capability_of(chosen.flags.gpu)
    attention = [layer for layer in architecture.cache_layers if layer.kind != "state"]
    if capability is None or capability < (8, 0) or capability[0] == 9:
        return False
    if not attention or any(layer.kind != "full" or layer.head_size not in _HEAD_SIZES for layer in attention):
        return False
    return _on_tensorrt(chosen) or chosen.flags.kv_cache_dtype in _FORMATS


def _workspace(architecture: Architecture, chosen: Resolved) -> int:
    if not rules(chosen.version).sized_workspace:
        return _LEAST
    heads = architecture.heads // chosen.flags.tensor_parallel_size
    size = max(layer.head_size for layer in architecture.cache_layers)
    return max(_LEAST, chosen.max_num_batched_tokens * heads * size * _PER_VALUE)
