"""GPU memory outside PyTorch that vLLM allocates after its first memory snapshot, before it sizes the KV pool.

vLLM counts memory allocated between this snapshot and the end of the profile run (init_device in
worker/gpu_worker.py, memory_profiling in utils/mem_utils.py; 0.9.1 to 0.33). Memory allocated before the
snapshot does not reduce the pool. It holds CUDA's context and NCCL's communicators: 0.51 GiB on an H100, and
1.5 GiB with several ranks. V1 before 0.9.1 subtracted all memory in use, including the memory allocated
before the snapshot (``_CONTEXT``). The counted memory has two parts:

- The workspace of the fused all-reduce is computed from vLLM's and FlashInfer's source. It has three
  allocations, each rounded up to the granularity of multicast memory.
- The remainder is fitted to logs. It holds kernels loaded on first use, local memory, and NCCL buffers
  allocated on first use. From 0.18 to 0.27, it also holds the memory that remains allocated after vLLM captures
  CUDA graphs to estimate their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of, is_amd, shares_memory
from tonnage.planner.engines.runtime.estimate import Coefficients
from tonnage.planner.engines.runtime.gpu import has_towers
from tonnage.planner.engines.vllm.multimodal import drops_towers
from tonnage.planner.engines.vllm.versions import on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.plans import Resolved
from tonnage.planner.units import GiB, MiB, ceil_div

# FlashInfer rounds each multicast allocation up to CU_MULTICAST_GRANULARITY_RECOMMENDED, 512 MiB with NVSwitch
# (SymmDeviceMemory in flashinfer/comm/mnnvl.py, 0.6.6). Eight logged starts of 0.19.0 with TP 2 and 4 have
# three such allocations.
_MULTICAST = 512 * MiB
# Largest all-reduce that is fused, in MiB by compute capability and ranks (FI_ALLREDUCE_FUSION_MAX_SIZE_MB in
# compilation/passes/fusion/allreduce_rms_fusion.py, 0.17 to 0.32).
_FUSED_MIB = {
    (9, 0): {2: 64.0, 4: 2.0, 8: 0.5},
    (10, 0): {2: 64.0, 4: 32.0, 8: 1.0},
    (10, 3): {2: 64.0, 4: 64.0, 8: 2.0},
}
# Memory before vLLM's first snapshot is logged as 0.51 GiB on an H100, and 1.0 GiB more with several ranks. For
# other GPUs, the value is from starts of 0.8.5 on a T4 and a 4090 (tests/data/field_reports.jsonl).
_CONTEXT, _CONTEXT_HOPPER, _COMMUNICATORS = GiB // 4, int(0.51 * GiB), GiB
# GPUs with less memory than these bytes need less memory outside PyTorch. Logs of such GPUs print 0.02 to 0.08
# GiB, logs of larger GPUs 0.07 to 0.11 GiB.
SMALL = 32 * GiB
# Memory outside PyTorch on AMD GPUs: vLLM 0.9.2 prints 0.66 GiB on an MI300X (tests/data/field_reports.jsonl).
# No other log of an AMD GPU prints non-torch memory, so the value is assumed for all AMD GPUs, with one or
# several ranks.
_ROCM = int(0.66 * GiB)


@dataclass(frozen=True, slots=True)
class NonTorchMemory:
    """Bytes outside PyTorch's allocator, and buffers that PyTorch allocates before the profile run.

    Attributes:
        fused: Workspaces of the fused all-reduce.
        counts: Tensors that count each sequence's tokens, for sampling penalties.
        context: Memory allocated before vLLM's first snapshot (CUDA's context, NCCL); 0 in versions that do not
            subtract it from the pool.
        embeddings: Buffers for the image embeddings of a step, and for hidden states that a draft model reads.
        rest: All other memory, as fitted to start-up logs.
    """

    fused: int
    counts: int
    context: int
    embeddings: int
    rest: int

    @property
    def total(self) -> int:
        """Return the sum of all parts of the non-torch memory in bytes."""
        return self.fused + self.counts + self.context + self.embeddings + self.rest

    @property
    def formula(self) -> str:
        """Return the sum of the non-torch memory's parts with its numbers, as ``--explain`` prints it."""
        parts = {
            f"workspace of fused all-reduce {self.fused:,} (pieces of {_MULTICAST:,})": self.fused,
            f"counts of tokens for penalties {self.counts:,}": self.counts,
            f"CUDA context and NCCL {self.context:,}": self.context,
            f"buffers of embeddings and drafts {self.embeddings:,}": self.embeddings,
        }
        shown = (text for text, size in parts.items() if size)
        return " + ".join((f"non-torch memory {self.rest:,}", *shown))


def non_torch_memory(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> NonTorchMemory:
    """Return the GPU memory of one rank outside PyTorch's allocator, part by part."""
    known = rules(chosen.version)
    # The V2 model runner's buffers reduce the pool only in vLLM versions that subtract all memory in use.
    buffers = known.counts_consumed and on_second_runner(architecture, known)
    counts = _token_counts(architecture, chosen) if buffers else 0
    embeddings = _embeddings(architecture, chosen) if buffers else 0
    fused = fused_all_reduce(architecture, chosen)
    return NonTorchMemory(fused, counts, _context(chosen), embeddings, _rest(chosen, fitted))


def _context(chosen: Resolved) -> int:
    flags = chosen.flags
    if not rules(chosen.version).counts_context:
        return 0
    alone = _CONTEXT_HOPPER if is_hopper(flags) else _CONTEXT
    return alone + (_COMMUNICATORS if flags.tensor_parallel_size * flags.pipeline_parallel_size > 1 else 0)


def _token_counts(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of the token counts that vLLM's V2 model runner keeps for sampling penalties.

    The counts take one int32 and one bit per sequence and vocabulary entry. PyTorch allocates them before the
    profile run (v1/worker/gpu/sample/penalties.py).
    """
    return chosen.max_num_seqs * (architecture.vocab_size * 4 + ceil_div(architecture.vocab_size, 32) * 4)


def _embeddings(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of the V2 model runner's embedding buffers, allocated before the profile run.

    On the first stage, they hold a step's embeddings for images (EncoderRunner in
    v1/worker/gpu/mm/encoder_runner.py). On the last stage, they hold the hidden states passed to a draft model
    (v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py).
    """
    roles = {tensor.role for tensor in architecture.tensors if tensor.layer is None}
    sees = has_towers(architecture) and not drops_towers(architecture, chosen.flags, chosen.version)
    widths = architecture.hidden_size if sees and "embedding" in roles else 0
    if chosen.draft is not None and roles & {"norm", "head"}:
        widths += chosen.draft.follows * chosen.draft.part.hidden_size
    return chosen.max_num_batched_tokens * widths * DTYPE_BYTES[chosen.flags.dtype]


def _rest(chosen: Resolved, fitted: Coefficients) -> int:
    flags, known = chosen.flags, rules(chosen.version)
    hopper = is_hopper(flags)
    if shares_memory(flags.gpu):
        return fitted.non_torch_unified
    if is_amd(flags.gpu):
        return _ROCM
    if flags.tensor_parallel_size > 1:
        if not hopper:
            return fitted.non_torch_parallel
        return int(fitted.non_torch_ranks + fitted.non_torch_doubling * log2(flags.tensor_parallel_size / 2))
    if flags.pipeline_parallel_size > 1:
        return fitted.non_torch_stage
    alone = fitted.non_torch if chosen.device_memory >= SMALL else fitted.non_torch_small
    if hopper and known.torch_2_8:
        alone = fitted.non_torch_hopper
    profiled = known.graphs_within_profile and not flags.enforce_eager and hopper
    return alone + (fitted.graph_profile if profiled else 0)


def is_hopper(flags: Deployment) -> bool:
    """Return whether the GPU is a data centre GPU from Hopper on; an unnamed GPU is assumed to be one."""
    found = capability_of(flags.gpu)
    return flags.gpu is None or (found is not None and (9, 0) <= found < (12, 0))


def fused_all_reduce(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of FlashInfer's workspace for an all-reduce fused with the norm after it.

    vLLM fuses them on Hopper and Blackwell GPUs (enable_allreduce_rms_fusion in config/vllm.py). The workspace
    of FlashInfer's TensorRT-LLM backend has three allocations: the ranks' inputs, flags, and three copies of
    the inputs (trtllm_create_ipc_workspace_for_all_reduce_fusion). The workspace of the MNNVL backend has one
    allocation.
    """
    flags, known = chosen.flags, rules(chosen.version)
    ranks, size = flags.tensor_parallel_size, DTYPE_BYTES[flags.dtype]
    largest = _FUSED_MIB.get(capability_of(flags.gpu) or (0, 0), {}).get(ranks)
    # PCIe GPUs have no NVSwitch and so no multicast memory. vLLM then warns and does not fuse the all-reduce.
    if "pcie" in (flags.gpu or ""):
        return 0
    if not known.fused_all_reduce or largest is None or flags.enforce_eager:
        return 0
    if known.fused_alone and (flags.pipeline_parallel_size > 1 or flags.data_parallel_size > 1):
        return 0
    row = architecture.hidden_size * size
    tokens = min(int(largest * MiB) // row, chosen.max_num_batched_tokens)
    inputs = ranks * tokens * row
    pieces = (3 * inputs,) if known.fused_all_reduce == "mnnvl" else (inputs, 4 * 256 * ranks, 3 * inputs)
    return sum(ceil_div(piece, _MULTICAST) * _MULTICAST for piece in pieces)
