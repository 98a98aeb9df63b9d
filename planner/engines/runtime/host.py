"""Host memory of an engine on GPUs: memory for reading the weights, and memory of CUDA.

The figures count the bytes that a container is charged for and the kernel cannot reclaim: anonymous, pinned and
shared memory. Files that are only mapped or read (model, libraries) are page cache, which is reported
separately from the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.host import HostPart
from tonnage.planner.model.layout import KVLayout
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.model.tier import KVTier
from tonnage.planner.plans import RankPlan, Resolved
from tonnage.planner.units import GiB, MiB

# Number of threads and bytes per read with --safetensors-load-strategy prefetch (config/load.py of vLLM 0.32).
_PREFETCH_THREADS, _PREFETCH_BLOCK = 8, 16 * MiB
# Host memory of CUDA besides imported modules: its context, loaded kernels, cuBLAS and cuDNN. The values are
# assumed from pytorch/pytorch#113326: 0.1 GiB with torch 2.2 and one small tensor, 1.6 GiB after a query of
# NVML.
_CUDA, _CUDA_LOW, _CUDA_HIGH = GiB // 2, GiB // 10, 2 * GiB


@dataclass(frozen=True, slots=True)
class HostInputs:
    """The inputs for estimating a GPU engine's host memory.

    Attributes:
        architecture: The whole model.
        chosen: Flags and sizes of the plan.
        layout: Layout of the KV cache.
        ranks: One entry per GPU rank.
        checkpoint: Bytes of all checkpoint files together.
        file: Bytes of a typical checkpoint file.
        largest_file: Bytes of the largest checkpoint file.
        largest: Bytes of the largest tensor.
        block_bytes: Bytes of one KV cache block, summed over all ranks.
        num_blocks: Number of blocks in the pool.
        tokens: Number of tokens that the pool holds.
        token_bounds: Lower and upper bound of `tokens`.
        apart: Bytes of recurrent states on one rank, which the pool holds outside its blocks.
        tiers: KV tiers beside the pool.
    """

    architecture: Architecture
    chosen: Resolved
    layout: KVLayout
    ranks: tuple[RankPlan, ...]
    checkpoint: int
    file: int
    largest_file: int
    largest: int
    block_bytes: int
    num_blocks: int
    tokens: int
    token_bounds: tuple[int, int]
    apart: int = 0
    tiers: tuple[KVTier, ...] = ()


def largest_tensor(tensors: tuple[TensorSpec, ...], size: int) -> int:
    """Return the bytes of the largest tensor in a checkpoint, with ``size`` bytes per element.

    Each expert's weight counts as a tensor of its own, as in the checkpoint's files.
    """
    return max(
        (
            tensor.elements // (tensor.shape[0] * tensor.matrices if tensor.role == "expert" else 1)
            for tensor in tensors
        ),
        default=0,
    ) * size  # fmt: skip


def reading(hosted: HostInputs, together: int = 1) -> list[HostPart]:
    """Return the host memory that all ranks take while they read the weights; each rank reads all files.

    ``together`` is the number of tensors that a rank reads at a time. benchmarks/host_memory.py measured the
    weight iterators of vLLM 0.32 on two files of 384 MiB with tensors of 64 MiB. The host memory with
    --safetensors-load-strategy lazy was 0, with eager 1,152 MiB, and with prefetch 32 MiB, in the threads that
    read the two files. Files in .pt format took 448 MiB.
    """
    flags, ranks = hosted.chosen.flags, len(hosted.ranks)
    tensor = hosted.largest * together
    low_file, high_file = hosted.file, hosted.largest_file
    if flags.load_format == "dummy":
        return []
    if flags.load_format == "pt":
        value, low, high = low_file + tensor, low_file, high_file + tensor
        how = "a file of the checkpoint and a tensor of the one before"
    elif flags.safetensors_load_strategy == "eager":
        # The strategy "eager" holds three copies at once: the bytes of a checkpoint file, its tensors, and the
        # tensors of the file read before it (safetensors_weights_iterator).
        copies = 3 if hosted.checkpoint > low_file else 2
        value, low, high = copies * low_file, 2 * low_file, 3 * high_file
        how = f"{copies} x a file of the checkpoint"
    else:
        # From mapped files, only a tensor that is split along rows or converted to another dtype is copied
        # (Tensor.copy_).
        value, low, high = tensor // 2, 0, tensor
        how = f"up to {together} x the largest tensor {hosted.largest:,}"
        if flags.safetensors_load_strategy == "prefetch":
            ahead = _PREFETCH_THREADS * _PREFETCH_BLOCK
            value, high, how = value + ahead, high + ahead, f"{how} + {ahead:,} read ahead"
    formula = f"{ranks} ranks x {how}"
    source = "--load-format, --safetensors-load-strategy; weight_utils.py of vLLM 0.32, measured"
    return [HostPart("reading weights", ranks * value, ranks * low, ranks * high, formula, source, "loading")]


def cuda(ranks: int) -> HostPart:
    """Return the host memory that CUDA's context and libraries take in ``ranks`` processes."""
    return HostPart(
        "CUDA", ranks * _CUDA, ranks * _CUDA_LOW, ranks * _CUDA_HIGH,
        f"{ranks} x {_CUDA:,}, context and libraries", "assumed, from reports (pytorch/pytorch#113326)",
    )  # fmt: skip


def pinned(size: int) -> int:
    """Return the bytes that PyTorch allocates for ``size`` bytes of pinned memory: the next power of two.

    PyTorch's CachingHostAllocator rounds this way, as measured in vllm-project/vllm#53042, 48436 and 50094.
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


def page_cache(hosted: HostInputs) -> int:
    """Return the bytes of the checkpoint's files in the page cache; 0 with --load-format dummy."""
    return 0 if hosted.chosen.flags.load_format == "dummy" else hosted.checkpoint
