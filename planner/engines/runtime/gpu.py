"""Activation peak and non-torch memory on GPUs, for engines whose own rules the planner does not know.

The activation peak is the bytes of the tensors alive in the widest layer, in a forward pass of
max_num_batched_tokens tokens. Non-torch memory is fitted to published start-up logs. The fitted coefficients
and interval widths are in fitted.json, written by benchmarks/fit_runtime.py. vLLM's own rules are in
engines/vllm/budget.py.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tonnage.planner.engines.runtime.estimate import NOTHING, Coefficients, Estimate, Runtime
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.model.tensor import TOWER_ROLES
from tonnage.planner.plans import Resolved
from tonnage.planner.units import GiB

# Minimum half-width of the interval around a GPU memory estimate. The largest error on GPUs of 16 and 24 GiB is
# 0.32002 GiB, in report 41 of tests/data/field_reports.jsonl, an RTX 3090 (benchmarks/accuracy_page.py).
_LEAST = GiB // 3
SOURCE = "fitted to published start-up logs by benchmarks/fit_runtime.py"


@cache
def coefficients() -> Coefficients:
    """Return the shipped coefficients of the GPU memory formulas, from fitted.json."""
    return Coefficients(**json.loads((Path(__file__).parent / "fitted.json").read_text())["coefficients"])


def activation(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> Estimate:
    """Estimate the activations of one engine step from the tensors alive in the forward pass of a layer.

    These are four tensors of the hidden size (the residual, the norm's output, and the input and output of
    attention or MLP), and the MLP's gate, up and product.
    """
    tokens = chosen.max_num_batched_tokens
    inner = architecture.intermediate_size // chosen.flags.tensor_parallel_size
    # Fused MoE kernels run in chunks of tokens. A chunk holds the values of all experts selected for its
    # tokens.
    if architecture.experts:
        inner = max(inner, architecture.hidden_size)
    width = inner * (3 if architecture.gated_mlp else 2) + 4 * architecture.hidden_size
    forward = tokens * width * DTYPE_BYTES[chosen.flags.dtype]
    return _bounded(forward, chosen, fitted.spread, f"forward pass of {tokens:,} tokens {forward:,}")


def terms(architecture: Architecture, chosen: Resolved, fitted: Coefficients, activation: Estimate) -> Runtime:
    """Return the estimates of framework memory and activations of one rank, with bounds of their sum.

    CUDA graphs count as 0 bytes.
    """
    held = fitted.non_torch_parallel if chosen.flags.tensor_parallel_size > 1 else fitted.non_torch
    framework = _bounded(held, chosen, fitted.spread, f"non-torch memory {held:,}")
    total = framework.value + activation.value
    # The interval around the estimate is wider than for vLLM, because other engines' logs print no activation
    # or non-torch memory with which the estimate could be compared.
    more = 3 if has_towers(architecture) else 2
    below, above = reach((fitted.spread, more * fitted.spread), chosen.device_memory)
    return Runtime(framework, activation, NOTHING, (max(0, total - below), total + above))


def reach(shares: tuple[float, float], memory: int) -> tuple[int, int]:
    """Return the bytes by which an estimate's interval extends below and above the estimate.

    Both are ``shares`` of the device's ``memory`` bytes. They are at least 1/3 GiB, because libraries and
    kernels take as much memory on a small device as on a large one.
    """
    return max(_LEAST, int(shares[0] * memory)), max(_LEAST, int(shares[1] * memory))


def has_towers(architecture: Architecture) -> bool:
    """Return whether the model has vision or audio towers, which the engine's profile run executes as well."""
    return any(tensor.role in TOWER_ROLES for tensor in architecture.tensors)


def _bounded(value: int, chosen: Resolved, share: float, formula: str) -> Estimate:
    """Return an estimate of ``value`` bytes, plus or minus ``share`` of the device's memory.

    The lower bound is at least half of ``value``.
    """
    spread = int(share * chosen.device_memory)
    return Estimate(value, value - min(spread, value // 2), value + spread, formula, SOURCE)
