"""The host's memory of an engine on GPUs: what reading the weights takes, and what CUDA does.

Bytes that a container is charged with and the kernel cannot take back: anonymous, pinned and shared memory.
Files that are only mapped or read (the model's, libraries') are page cache, told beside the sum.
"""

from __future__ import annotations

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.host import HostPart
from tonnage.planner.model.layout import KVLayout
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.plans import RankPlan, Resolved
from tonnage.planner.records import dataclass
from tonnage.planner.units import GiB, MiB

# --safetensors-load-strategy prefetch reads with so many threads, in blocks of so many bytes (config/load.py of
# vLLM 0.32).
_PREFETCH_THREADS, _PREFETCH_BLOCK = 8, 16 * MiB
# Beside a process' imports: CUDA's context, kernels as they are loaded, cuBLAS and cuDNN. Assumed, from reports
# (pytorch/pytorch#113326): 0.1 GiB of torch 2.2 with one small tensor, 1.6 where NVML was asked first.
_CUDA, _CUDA_LOW, _CUDA_HIGH = GiB // 2, GiB // 10, 2 * GiB


@dataclass(frozen=True, slots=True)
class Hosted:
    """What the host's memory follows from. ``architecture``: the whole model; ``checkpoint``: bytes of its
    files, ``file`` and ``largest_file`` of one of them, ``largest`` of one tensor; ``ranks``: of all GPUs;
    ``block_bytes``: of one block, of all ranks together; ``num_blocks``, ``tokens``: of the pool."""

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


def largest_tensor(tensors: tuple[TensorSpec, ...], size: int) -> int:
    """Bytes of the largest tensor in a checkpoint's files, of ``size`` bytes an element: experts are stored
    one by one."""
    return max(
        (
            tensor.elements // (tensor.shape[0] * tensor.matrices if tensor.role == "expert" else 1)
            for tensor in tensors
        ),
        default=0,
    ) * size  # fmt: skip


def reading(hosted: Hosted, together: int = 1) -> list[HostPart]:
    """What the ranks hold while they read the weights, each all files. ``together``: tensors of a rank at a
    time.

    Measured with vLLM 0.32's own iterators over two files of 384 MiB with tensors of 64
    (benchmarks/host_memory.py): lazy 0, eager 1,152 MiB, prefetch 32 (of two files' threads), pt 448.
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
        # its bytes, its tensors, and the tensors of the file before (safetensors_weights_iterator)
        copies = 3 if hosted.checkpoint > low_file else 2
        value, low, high = copies * low_file, 2 * low_file, 3 * high_file
        how = f"{copies} x a file of the checkpoint"
    else:
        # mapped; what is cut across its rows or in another dtype is copied first (Tensor.copy_)
        value, low, high = tensor // 2, 0, tensor
        how = f"up to {together} x the largest tensor {hosted.largest:,}"
        if flags.safetensors_load_strategy == "prefetch":
            ahead = _PREFETCH_THREADS * _PREFETCH_BLOCK
            value, high, how = value + ahead, high + ahead, f"{how} + {ahead:,} read ahead"
    formula = f"{ranks} ranks x {how}"
    source = "--load-format, --safetensors-load-strategy; weight_utils.py of vLLM 0.32, measured"
    return [HostPart("reading weights", ranks * value, ranks * low, ranks * high, formula, source, "loading")]


def cuda(ranks: int) -> HostPart:
    return HostPart(
        "CUDA", ranks * _CUDA, ranks * _CUDA_LOW, ranks * _CUDA_HIGH,
        f"{ranks} x {_CUDA:,}, context and libraries", "assumed, from reports (pytorch/pytorch#113326)",
    )  # fmt: skip


def pinned(size: int) -> int:
    """Bytes that PyTorch takes for ``size`` pinned ones: the next power of two (CachingHostAllocator; measured
    in vllm-project/vllm#53042, 48436 and 50094)."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def page_cache(hosted: Hosted) -> int:
    return 0 if hosted.chosen.flags.load_format == "dummy" else hosted.checkpoint
