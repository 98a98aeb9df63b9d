"""Estimates of the GPU memory that vLLM's KV pool cannot use, other than the weights; each has an interval."""

from __future__ import annotations

from math import isqrt

from tonnage.planner.devices.catalogue import capability_of, is_amd, shares_memory
from tonnage.planner.engines.runtime.estimate import NOTHING, Coefficients, Estimate, Runtime
from tonnage.planner.engines.runtime.gpu import SOURCE, coefficients, has_towers, reach
from tonnage.planner.engines.vllm import activation, flashinfer, framework, graphs
from tonnage.planner.engines.vllm.versions import rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved
from tonnage.planner.units import GiB

_UNLOGGED = (0, 20, 0)  # first vLLM version without a start-up log that prints every memory term

# First vLLM version without a published start (published.jsonl). In the 13 starts of 0.24 to 0.29, the KV pool
# is smaller than planned by at most 0.5 % of the GPU's memory.
_UNPUBLISHED = (0, 30, 0)

# The interval of a vision tower's peak extends below and above it by these shares of the peak, because the
# planner assumes an attention kernel and fused activations.
_ENCODER = 0.15, 0.3
# For a compute capability without a measured start, the interval extends below the sum by this assumed factor
# times the fitted spread.
#
# Published starts that were not used in the fit (published.jsonl) cover three capabilities. On 8.0, the errors
# of twelve starts on A100s of two sizes are within 1.3 % of the GPU's memory. On 8.6, those of six starts on
# RTX 3090 and A5000 are within 0.6 %. On 12.0, those of twelve starts on RTX 5090 and RTX PRO 6000 (vLLM 0.12
# to 0.27) are within 0.7 %. The fitted spread exceeds all of them.
#
# If the fit leaves out the GPU type of one source, the largest error over eight sources is 2.2 % of the GPU's
# memory (benchmarks/planner_accuracy.py, pool_from_flags).
_UNKNOWN = 1.5
_PUBLISHED = ((8, 0), (8, 6), (12, 0))
# Start-up logs with every memory term have at most this many tokens per step. For more tokens, the upper bound
# grows by a share of the planned activation peak.
#
# For dense decoders, starts with 32,768 and 131,072 tokens are within 0.15 of the peak (Qwen2.5-0.5B;
# Llama-3.1-8B on an MI300X). Kernels of experts, recurrent states and images hold more tensors than the plan
# counts. Starts of vLLM 0.20 to 0.23 with 65,536 tokens print up to 0.61 of the peak more. The interval around
# small steps covers a part of this excess (tests/planner/test_large_steps.py).
#
# The lower bound falls by half the share, because the plan adds tensors of attention and MLP that are not all
# alive at once.
_LOGGED_STEP = 8192
_BEYOND_DENSE, _BEYOND = 0.15, 0.5
# If PCIe connects the GPUs, start-up logs print for each rank 0.18 to 0.21 GiB of memory outside PyTorch on
# eight L40S (Qwen3-235B-A22B-FP8), and 0.63 GiB on four A30. Without NVLink, vLLM's own all-reduce runs on at
# most two GPUs (custom_all_reduce.py, 0.9.2 to 0.32). With more GPUs, NCCL does every all-reduce, and the
# memory of its channels depends on the topology. Before 0.11, vLLM takes its first snapshot before it sets up
# NCCL, whose buffers are up to 1 GiB (framework.py).
_PCIE, _NCCL = 4 * GiB // 10, GiB
# Memory outside PyTorch on AMD GPUs that no source explains: on one day, four starts on an R9700 had 1.7 to 1.9
# GiB more than seven later starts with the same flags (tests/data/startups/published.jsonl). Compilation does
# not explain it, because two of the later starts also compile, with the same build of vLLM. Between the four
# and the seven starts, the Linux kernel of the machine got another argument. Before 0.10, AMD GPUs ran on V0,
# which does not compile. The upper bound includes 1.7 GiB, and the interval around the sum covers the rest.
_UNEXPLAINED_ON_AMD = 17 * GiB // 10
_DERIVED = "derived from vLLM's sources (planner/engines/vllm/{}.py)"


def terms(architecture: Architecture, chosen: Resolved, fitted: Coefficients | None = None) -> Runtime:
    """Estimate vLLM's memory besides weights and KV pool on one rank of a GPU deployment.

    ``architecture`` is the rank's share of one pipeline stage. ``fitted`` replaces the shipped coefficients
    of the memory formulas.
    """
    fitted = fitted or coefficients()
    below, above = reach(spread(architecture, chosen, fitted), chosen.device_memory)
    held = framework.non_torch_memory(architecture, chosen, fitted)
    sources = (
        SOURCE if held.total == held.rest else f"{_DERIVED.format('framework')}; non-torch memory {SOURCE}"
    )
    # Half of the fitted non-torch memory is uncertain, and all of it from 0.33 on. Since that version, vLLM no
    # longer counts the memory of cuBLAS's handles, which no available log separates from the rest.
    unsure = held.rest if rules(chosen.version).cublas_first else held.rest // 2
    links = _communication(chosen)
    most = held.total + held.rest + above // 4 + links
    outside = Estimate(held.total, held.total - unsure, most, held.formula, sources)
    peak = activation.peak(architecture, chosen, fitted)
    # A vision tower's memory is derived from vLLM's source code alone, because no log prints it.
    if peak.encoder is not None:
        below = max(below, int(_ENCODER[0] * peak.encoder.peak))
        above = max(above, int(_ENCODER[1] * peak.encoder.peak))
    # Some vLLM versions sample from probabilities with FlashInfer. Without FlashInfer they sort the logits.
    if rules(chosen.version).sampler == "probabilities" and peak.sampler:
        above = max(above, activation.sorting(architecture, chosen, fitted) - peak.sampler)
    above += links
    saved = 0
    if rules(chosen.version).unsorted_if_installed and not is_amd(chosen.flags.gpu):
        saved = activation.unsorted(peak, architecture, chosen, fitted)
        below = max(below, saved)
    # The plan assumes a start that finds the compiled model in its cache. The pool's lower bound is for a
    # start that compiles the model.
    compiling = activation.compiling(architecture, chosen)
    above += max(0, compiling - peak.total)
    if is_amd(chosen.flags.gpu) and activation.compiles(chosen):
        above += _UNEXPLAINED_ON_AMD
    unseen = int(_unseen_step(architecture, chosen) * peak.total)
    below, above = below + unseen // 2, above + unseen
    inside = Estimate(
        peak.total, peak.total - min(below, max(saved, peak.total // 10 + unseen // 2)), peak.total + above,
        peak.formula + (f"; while a first start compiles {compiling:,}" if compiling > peak.total else ""),
        _DERIVED.format("activation"),
    )  # fmt: skip
    size, count = graphs.estimated(architecture, chosen, fitted)
    captured, off = NOTHING, graphs.subtracted(architecture, chosen)
    if size:
        each = graphs.per_size(architecture, fitted)
        first = graphs.first(chosen, fitted)
        formula = f"{count} batch sizes: the first {first:,} + {count - 1} x {each:,}"
        more = flashinfer.charged(architecture, chosen)
        if more:
            formula += f", and FlashInfer's workspace {more:,}"
        low, high = graphs.bounds(chosen, size)
        captured = Estimate(size + more, low + more, high + more, formula, f"sizes derived, bytes {SOURCE}")
        if off:
            below, above = _with_graphs(below, above, size, (low, high), small=graphs.is_small(chosen))
    taken = captured if off else NOTHING
    later = _later(NOTHING if off else captured, flashinfer.uncounted(architecture, chosen))
    total = outside.value + inside.value + taken.value
    return Runtime(outside, inside, taken, (max(0, total - below), total + above), later)


def _communication(chosen: Resolved) -> int:
    """Return the bytes that all-reduce buffers add to the upper bound of the memory outside PyTorch.

    The result is 0 in two cases: with one rank, or if vLLM sets up NCCL before its first memory snapshot and
    the GPUs are not connected by PCIe. Only data centre GPUs from Hopper on, and GPUs that share the host's
    memory, are assumed not to be connected by PCIe.
    """
    flags = chosen.flags
    if flags.tensor_parallel_size == 1:
        return 0
    late = rules(chosen.version).late_communicators
    slow = 0 if framework.is_hopper(flags) or shares_memory(flags.gpu) else _PCIE
    return max(slow, _NCCL if late else 0)


def _unseen_step(architecture: Architecture, chosen: Resolved) -> float:
    """Return the share of the activation peak that is uncertain because no start-up log has such a large step.

    The share is 0 up to the largest logged step, and grows with max_num_batched_tokens beyond it.
    """
    dense = (
        not architecture.experts
        and not has_towers(architecture)
        and all(layer.kind != "state" for layer in architecture.cache_layers)
    )
    share = _BEYOND_DENSE if dense else _BEYOND
    return share * max(0.0, 1 - _LOGGED_STEP / chosen.max_num_batched_tokens)


def _with_graphs(
    below: int, above: int, size: int, bounds: tuple[int, int], *, small: bool
) -> tuple[int, int]:  # fmt: skip
    """Return the interval (below, above) around the sum of all memory terms, widened for CUDA graphs.

    ``size`` is the estimated bytes of the graphs, ``bounds`` their (low, high) bounds. The GPU driver decides
    the bytes of a graph. In one start of ten, graphs take several times the estimate. If few graphs are
    captured (``small``), their bounds are wide and independent of the other terms. The half-widths are then
    combined as the root of the sum of squares.
    """
    low, high = bounds
    if small:
        return isqrt(below**2 + (size - low) ** 2), isqrt(above**2 + (high - size) ** 2)
    return below + size // 4, above + size // 2


def _later(captured: Estimate, workspace: int) -> Estimate | None:
    """Return the memory that vLLM allocates after it sized the KV pool, or None if there is none.

    This memory is outside the share that --gpu-memory-utilization sets.

    ``captured`` is the estimate of CUDA graphs, ``workspace`` the bytes of FlashInfer's attention workspace.
    """
    parts = [captured.formula] if captured.value else []
    parts += [f"FlashInfer's workspace {workspace:,}"] if workspace else []
    if not parts:
        return None
    formula = f"{', and '.join(parts)}; taken after the pool was sized, outside the share that is used"
    return Estimate(
        captured.value + workspace, captured.low + workspace, captured.high + workspace, formula,
        captured.source or _DERIVED.format("flashinfer"),
    )  # fmt: skip


def spread(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> tuple[float, float]:
    """Return how far the interval extends below and above the sum of the memory terms.

    Both values are shares of the device's memory. The interval is narrow if start-up logs cover every part of
    the plan. It extends further above the sum if unknown allocations may add memory. The factors that multiply
    the fitted spread are assumptions.
    """
    if shares_memory(chosen.flags.gpu):
        return fitted.spread_unified, fitted.spread_unified
    if has_towers(architecture) and architecture.vision is None:
        return fitted.spread, 2 * fitted.spread
    if chosen.flags.gpu is not None and capability_of(chosen.flags.gpu) is None:
        # The GPU is not one of NVIDIA's. Seven starts on an R9700 differ from the plan by at most 0.7 % of the
        # GPU's memory, if the copies that compilation makes are counted. Memory that no source explains is
        # added to the upper bound (_UNEXPLAINED_ON_AMD).
        return fitted.spread, fitted.spread
    if not _is_known(chosen, fitted):
        return _UNKNOWN * fitted.spread, 2 * fitted.spread
    if chosen.version >= _UNPUBLISHED:
        return fitted.spread, 1.5 * fitted.spread
    if not _is_counted(architecture, chosen):
        return fitted.spread, fitted.spread
    if architecture.experts or any(layer.kind == "mla" for layer in architecture.cache_layers):
        return fitted.spread_seen * 2 / 3, fitted.spread_seen * 2
    return fitted.spread_seen, fitted.spread_seen


def _is_known(chosen: Resolved, fitted: Coefficients) -> bool:
    """Return whether start-up logs cover the GPU's compute capability; True if the plan names no GPU."""
    major, minor = capability_of(chosen.flags.gpu) or (0, 0)
    known = f"{major}.{minor}" in fitted.capabilities.split() or (major, minor) in _PUBLISHED
    return chosen.flags.gpu is None or known


def is_seen(architecture: Architecture, chosen: Resolved) -> bool:
    """Return whether start-up logs that print every memory term cover the plan's model, GPU and version.

    These logs are in tests/data/startups.
    """
    return _is_counted(architecture, chosen) and not architecture.experts


def _is_counted(architecture: Architecture, chosen: Resolved) -> bool:
    """Return whether the start-up logs in tests/data/startups cover the plan's model, GPUs and version.

    The logs are of decoders without towers and recurrent states, on one to four Hopper GPUs.
    """
    return (
        capability_of(chosen.flags.gpu) == (9, 0)
        and (0, 13, 0) <= chosen.version < _UNLOGGED
        and chosen.flags.tensor_parallel_size <= 4
        and not has_towers(architecture)
        and all(layer.kind in ("full", "sliding", "mla") for layer in architecture.cache_layers)
    )
