"""vLLM on a GPU: the workspace of FlashInfer's attention.

The builder of its metadata allocates it on first use (v1/attention/backends/flashinfer.py
_get_workspace_buffer). No attention runs in the profile run: the first full graph of the first model runner's
trial capture is where it appears, so that it counts as CUDA graphs (vllm#50780). The second runner makes it
with the pool (v1/worker/gpu/attn_utils.py init_attn_backend), where nothing counts it.
"""

from __future__ import annotations

from tonnage.planner.devices.catalogue import capability_of
from tonnage.planner.engines.vllm.versions import on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved
from tonnage.planner.units import MiB

_LEAST = 394 * MiB  # VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE (envs.py, 0.25.1 to 0.33)
_PER_VALUE = 16  # FLASHINFER_PREFILL_WORKSPACE_BYTES_PER_ELEM
_HEAD_SIZES = (64, 128, 256, 512)  # get_supported_head_sizes
_FORMATS = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")  # of caches that FlashAttention takes on Hopper only


def charged(architecture: Architecture, chosen: Resolved) -> int:
    """Bytes on one rank that count as CUDA graphs."""
    if chosen.flags.enforce_eager or not _runs(architecture, chosen):
        return 0
    if _on_tensorrt(chosen):  # its kernels have a workspace of their own, of fixed size, in either runner
        return _LEAST
    # drafts are verified in pieces of graphs, outside of which attention runs
    counted = not chosen.flags.num_speculative_tokens and not _second(architecture, chosen)
    return _workspace(architecture, chosen) if counted else 0


def uncounted(architecture: Architecture, chosen: Resolved) -> int:
    """Bytes on one rank that appear with the pool."""
    known = _runs(architecture, chosen) and _second(architecture, chosen)
    return _workspace(architecture, chosen) if known else 0


def _second(architecture: Architecture, chosen: Resolved) -> bool:
    return on_second_runner(architecture, rules(chosen.version))


def _on_tensorrt(chosen: Resolved) -> bool:
    return (capability_of(chosen.flags.gpu) or (0, 0))[0] == 10


def _runs(architecture: Architecture, chosen: Resolved) -> bool:
    """FlashAttention comes first but on SM10x (_get_backend_priorities in platforms/cuda.py,
    supports_kv_cache_dtype of FlashAttentionBackend, 0.25.1 to 0.29). Of models with windows it is not known
    which one runs."""
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
