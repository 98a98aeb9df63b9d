"""Memory that vLLM subtracts from the KV pool's budget on a GPU, besides the weights, with intervals."""

from __future__ import annotations

from math import isqrt

from tonnage.planner.devices.catalogue import capability_of, shares_memory
from tonnage.planner.engines.runtime.estimate import NOTHING, Coefficients, Estimate, Runtime
from tonnage.planner.engines.runtime.gpu import SOURCE, coefficients, has_towers, reach
from tonnage.planner.engines.vllm import activation, flashinfer, framework, graphs
from tonnage.planner.engines.vllm.versions import rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved

_UNLOGGED = (0, 20, 0)  # from this version on, no available start-up log prints every memory term
# The interval of a vision tower's peak extends by these shares of it below and above, because the attention
# kernel and fused activations are assumed.
_ENCODER = 0.15, 0.3
# On a compute capability without a measured start, the interval below the sum is wider by this assumed factor.
# When the fit leaves out a source's GPU type, the worst of eight sources is 1.5 % off. The other predictions
# are within 1.8 % (pool_from_flags).
_UNKNOWN = 1.5
_DERIVED = "derived from vLLM's sources (planner/engines/vllm/{}.py)"


def terms(architecture: Architecture, chosen: Resolved, fitted: Coefficients | None = None) -> Runtime:
    """Estimate the memory terms besides weights and pool on one rank of a GPU deployment.

    ``architecture`` is the rank's share of one pipeline stage. ``fitted`` replaces the shipped coefficients.
    """
    fitted = fitted or coefficients()
    below, above = reach(spread(architecture, chosen, fitted), chosen.device_memory)
    held = framework.non_torch_memory(architecture, chosen, fitted)
    sources = (
        SOURCE if held.total == held.rest else f"{_DERIVED.format('framework')}; non-torch memory {SOURCE}"
    )
    # From 0.33 on, the memory of cuBLAS's handles no longer counts. No available log separates its bytes from
    # the fitted rest, so half of the rest is uncertain.
    unsure = held.rest if rules(chosen.version).cublas_first else held.rest // 2
    outside = Estimate(
        held.total, held.total - unsure, held.total + held.rest + above // 4, held.formula, sources
    )
    peak = activation.peak(architecture, chosen, fitted)
    # A vision tower's memory is derived from sources alone, because no log prints it.
    if peak.encoder is not None:
        below = max(below, int(_ENCODER[0] * peak.encoder.peak))
        above = max(above, int(_ENCODER[1] * peak.encoder.peak))
    # Without FlashInfer, the sampler of these versions sorts the logits.
    if rules(chosen.version).sampler == "probabilities" and peak.sampler:
        above = max(above, activation.sorting(architecture, chosen, fitted) - peak.sampler)
    inside = Estimate(
        peak.total, peak.total - min(below, peak.total // 10), peak.total + above, peak.formula,
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
            below, above = _with_graphs(below, above, size, (low, high))
    taken = captured if off else NOTHING
    later = _later(NOTHING if off else captured, flashinfer.uncounted(architecture, chosen))
    total = outside.value + inside.value + taken.value
    return Runtime(outside, inside, taken, (max(0, total - below), total + above), later)


def _with_graphs(below: int, above: int, size: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the interval around the sum of all terms, with an estimate of CUDA graphs among them.

    The driver decides the bytes of a graph: one start in ten takes several times as many. The bounds of few
    graphs are wide and independent of the other terms, so their squares are added.
    """
    low, high = bounds
    if high > 2 * size:
        return isqrt(below**2 + (size - low) ** 2), isqrt(above**2 + (high - size) ** 2)
    return below + size // 4, above + size // 2


def _later(captured: Estimate, workspace: int) -> Estimate | None:
    """Return the memory that is taken after the pool was sized, outside the configured share, or None.

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
    """Return the interval below and above the sum of the memory terms, as shares of the device's memory.

    The interval is narrow if start-up logs cover every part of the plan. The upper side is wider where unknown
    consumers can add memory. The multiples of the fitted spread are assumed.
    """
    if shares_memory(chosen.flags.gpu):
        return fitted.spread_unified, fitted.spread_unified
    if (has_towers(architecture) and architecture.vision is None) or _is_other_vendor(chosen):
        return fitted.spread, 2 * fitted.spread
    if not _is_known(chosen, fitted):
        return _UNKNOWN * fitted.spread, 2 * fitted.spread
    if chosen.version >= _UNLOGGED:
        return fitted.spread, 1.5 * fitted.spread
    if not _is_counted(architecture, chosen):
        return fitted.spread, fitted.spread
    if architecture.experts or any(layer.kind == "mla" for layer in architecture.cache_layers):
        return fitted.spread_seen * 2 / 3, fitted.spread_seen * 2
    return fitted.spread_seen, fitted.spread_seen


def _is_other_vendor(chosen: Resolved) -> bool:
    """Return whether the GPU is not NVIDIA's; one source has starts of such a GPU."""
    gpu = chosen.flags.gpu
    return gpu is not None and capability_of(gpu) is None


def _is_known(chosen: Resolved, fitted: Coefficients) -> bool:
    """Return whether measured starts cover the GPU's compute capability; an unnamed GPU counts as covered."""
    major, minor = capability_of(chosen.flags.gpu) or (0, 0)
    return chosen.flags.gpu is None or f"{major}.{minor}" in fitted.capabilities.split()


def is_seen(architecture: Architecture, chosen: Resolved) -> bool:
    """Return whether logs that print every memory term cover each part of the plan (tests/data/startups)."""
    return _is_counted(architecture, chosen) and not architecture.experts


def _is_counted(architecture: Architecture, chosen: Resolved) -> bool:
    """Return whether the logged starts cover the model, the GPUs and the version.

    The logged starts are of decoders without towers and recurrent states, on one to four Hopper GPUs.
    """
    return (
        capability_of(chosen.flags.gpu) == (9, 0)
        and (0, 13, 0) <= chosen.version < _UNLOGGED
        and chosen.flags.tensor_parallel_size <= 4
        and not has_towers(architecture)
        and all(layer.kind in ("full", "sliding", "mla") for layer in architecture.cache_layers)
    )
