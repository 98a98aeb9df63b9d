"""Bytes that PyTorch's CUDA allocator counts for weights beyond the tensors' own bytes.

vLLM prints the allocator's total ("Model loading took", from ``torch.cuda.max_memory_allocated``) and subtracts
it from the memory for the KV pool. The allocator rounds an allocation up to 512 bytes and serves it from a free
block. It splits a larger block only if more than 1 MiB would remain. Otherwise the whole block counts: a
down_proj of 47.5 MiB (Qwen3-4B) takes 48 MiB.

Rules and sizes are from c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.5 to 2.13; HIP uses the same file).
Allocations above 1 MiB and below 10 MiB come from segments of 20 MiB. A larger allocation takes a segment of
its size rounded up to 2 MiB. Logs that print four decimals differ from these rules by up to 0.2 MiB
(benchmarks/README.md).

Tensor sizes are those of vLLM's merged modules: one tensor for queries, keys and values, and one for gate and
up projections (packed_modules_mapping of each model class).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from tonnage.planner.deployment import Deployment
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import MiB

_ROUND = 512  # kMinBlockSize: allocations are rounded up to a multiple of these bytes
_SMALL = MiB  # kSmallSize: allocations up to this size use a pool whose blocks are always split
_LARGE_SEGMENT = 20 * MiB  # kLargeBuffer: size of a segment for allocations below kMinLargeAlloc
_MIN_LARGE = 10 * MiB  # kMinLargeAlloc: smallest allocation with a segment of its own
_SEGMENT_ROUND = 2 * MiB  # kRoundLarge: a segment for one allocation is rounded up to a multiple of this size

_MERGED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj", "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba", "in_proj_a": "in_proj_ba",
}  # fmt: skip


def unsplit_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that PyTorch's CUDA allocator takes beyond the sum of ``sizes``.

    ``sizes`` are the bytes of tensors, in the order in which they are allocated.
    """
    free: list[int] = []  # sizes of free blocks, sorted; an allocation takes the smallest sufficient block
    extra = 0
    for size in sizes:
        if size <= _SMALL:
            continue
        wanted = -(-size // _ROUND) * _ROUND
        place = bisect_left(free, wanted)
        if place < len(free):
            block = free.pop(place)
        elif wanted < _MIN_LARGE:
            block = _LARGE_SEGMENT
        else:
            block = -(-wanted // _SEGMENT_ROUND) * _SEGMENT_ROUND
        if block - wanted > _SMALL:
            insort(free, block - wanted)
            block = wanted
        extra += block - size
    return extra


def merged_sizes(tensors: Iterable[TensorSpec], quantization: Quantization, flags: Deployment) -> list[int]:
    """Return the bytes of each tensor that vLLM allocates for one rank's weights, in module order."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.tied_to is not None:
            continue
        parent, _, leaf = tensor.module.rpartition(".")
        module = f"{parent}.{_MERGED.get(leaf, leaf)}"
        if quantization.converts(tensor):
            parts = quantization.parts(tensor)
        else:
            parts = {tensor.name.rpartition(".")[2]: quantization.bytes_after_load(tensor, flags.dtype)}
        for name, size in parts.items():
            key = f"{module}.{name}"
            sizes[key] = sizes.get(key, 0) + size
    return list(sizes.values())


def allocator_rounding(tensors: Iterable[TensorSpec], quantization: Quantization, flags: Deployment) -> int:
    """Return the bytes that PyTorch's CUDA allocator adds to the weights of one rank; 0 on a CPU."""
    if flags.device == "cpu":
        return 0
    return unsplit_bytes(merged_sizes(tensors, quantization, flags))
