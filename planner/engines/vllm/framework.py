"""vLLM on a GPU: memory outside PyTorch that appears between its first snapshot and the end of its profile run.

What is there before the snapshot (CUDA's context, NCCL's communicators: 0.51 GiB on an H100, 1.5 with several
ranks) is the engine's too but does not come off the pool: vLLM counts from there (worker/gpu_worker.py
init_device, utils/mem_utils.py memory_profiling; vLLM 0.9.1 to 0.33). V1 before that took off whatever was in
use (``_CONTEXT``). Two parts:

* the workspace of fused all-reduce, derived: three allocations that the driver rounds up to what multicast
  memory is handed out in;
* the rest, fitted: kernels loaded on first use, local memory, buffers NCCL makes on first use, and from 0.18 to
  0.27 what the trial capture of CUDA graphs leaves.
"""

from __future__ import annotations

from math import log2

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of, shares_memory
from tonnage.planner.engines.runtime.estimate import Coefficients
from tonnage.planner.engines.runtime.gpu import has_towers
from tonnage.planner.engines.vllm.multimodal import drops_towers
from tonnage.planner.engines.vllm.versions import on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.plans import Resolved
from tonnage.planner.records import dataclass
from tonnage.planner.units import GiB, MiB, ceil_div

# CU_MULTICAST_GRANULARITY_RECOMMENDED, which FlashInfer rounds each allocation up to (flashinfer/comm/mnnvl.py
# SymmDeviceMemory, 0.6.6): 512 MiB with NVSwitch. Eight starts of 0.19.0 with TP 2 and 4 hold three of them.
_MULTICAST = 512 * MiB
# Largest all-reduce that is fused, in MiB by compute capability and ranks (FI_ALLREDUCE_FUSION_MAX_SIZE_MB in
# compilation/passes/fusion/allreduce_rms_fusion.py, 0.17 to 0.32).
_FUSED_MIB = {
    (9, 0): {2: 64.0, 4: 2.0, 8: 0.5},
    (10, 0): {2: 64.0, 4: 32.0, 8: 1.0},
    (10, 3): {2: 64.0, 4: 64.0, 8: 2.0},
}
# What is there before the first snapshot: 0.51 GiB printed on an H100, 1.0 GiB more with several ranks; on
# other GPUs what starts of 0.8.5 lack on a T4 and a 4090 (tests/data/field_reports.jsonl).
_CONTEXT, _CONTEXT_HOPPER, _COMMUNICATORS = GiB // 4, int(0.51 * GiB), GiB
SMALL = 32 * GiB  # fewer multiprocessors hold less: 0.02 to 0.08 GiB printed, 0.07 to 0.11 on larger ones


@dataclass(frozen=True, slots=True)
class Held:
    """``fused``: allocations of the fused all-reduce; ``counts``: of tokens each sequence has used, for
    penalties; ``context``: what was there before vLLM's first snapshot; ``embeddings``: of a step, for pictures
    and a draft; ``rest``: what is fitted. Bytes."""

    fused: int
    counts: int
    context: int
    embeddings: int
    rest: int

    @property
    def total(self) -> int:
        return self.fused + self.counts + self.context + self.embeddings + self.rest

    @property
    def formula(self) -> str:
        text = f"non-torch memory {self.rest:,}"
        if self.fused:
            text += f" + workspace of fused all-reduce {self.fused:,} (pieces of {_MULTICAST:,})"
        if self.counts:
            text += f" + counts of tokens for penalties {self.counts:,}"
        if self.context:
            text += f" + CUDA context and NCCL {self.context:,}"
        if self.embeddings:
            text += f" + buffers of embeddings and drafts {self.embeddings:,}"
        return text


def held(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> Held:
    """Of one rank."""
    return Held(
        fused_all_reduce(architecture, chosen), _token_counts(architecture, chosen), _context(chosen),
        _embeddings(architecture, chosen), _rest(chosen, fitted),
    )  # fmt: skip


def _context(chosen: Resolved) -> int:
    flags = chosen.flags
    if not rules(chosen.version).counts_context:
        return 0
    alone = _CONTEXT_HOPPER if is_hopper(flags) else _CONTEXT
    return alone + (_COMMUNICATORS if flags.tensor_parallel_size * flags.pipeline_parallel_size > 1 else 0)


def _token_counts(architecture: Architecture, chosen: Resolved) -> int:
    """Of the second model runner: 4 bytes and a bit for each sequence and token of the vocabulary
    (v1/worker/gpu/sample/penalties.py). PyTorch's memory, but from before the profile: it came off the pool
    only once vLLM counted what the device lost."""
    known = rules(chosen.version)
    if not known.counts_consumed or not on_second_runner(architecture, known):
        return 0
    return chosen.max_num_seqs * (architecture.vocab_size * 4 + ceil_div(architecture.vocab_size, 32) * 4)


def _embeddings(architecture: Architecture, chosen: Resolved) -> int:
    """Of the second model runner, and from before the profile as above: a step's embeddings where there are
    pictures (EncoderRunner in v1/worker/gpu/mm/encoder_runner.py), on the first stage, and the hidden states
    that a draft is given (v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py), on the last."""
    known = rules(chosen.version)
    if not known.counts_consumed or not on_second_runner(architecture, known):
        return 0
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
    """Data centre GPUs from Hopper on, and those nothing is known of that are as large."""
    found = capability_of(flags.gpu)
    return flags.gpu is None or (found is not None and (9, 0) <= found < (12, 0))


def fused_all_reduce(architecture: Architecture, chosen: Resolved) -> int:
    """vLLM fuses all-reduce and norm on Hopper and Blackwell GPUs (config/vllm.py enable_allreduce_rms_fusion).
    FlashInfer's TensorRT-LLM workspace is the ranks' inputs once, flags, and the inputs three times
    (trtllm_create_ipc_workspace_for_all_reduce_fusion); its MNNVL workspace one allocation."""
    flags, known = chosen.flags, rules(chosen.version)
    ranks, size = flags.tensor_parallel_size, DTYPE_BYTES[flags.dtype]
    largest = _FUSED_MIB.get(capability_of(flags.gpu) or (0, 0), {}).get(ranks)
    if "pcie" in (flags.gpu or ""):  # no multicast memory without NVSwitch: vLLM warns and does without
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
