"""GPUs: activation peak and non-torch memory of an engine whose own rules are not known here.

The widest layer of a forward pass of max_num_batched_tokens tokens, and what published start-up logs hold
outside PyTorch. Coefficients and intervals are in fitted.json, written by benchmarks/fit_runtime.py. vLLM has
its own: engines/vllm/budget.py.
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

# The worst of the starts on GPUs of 16 and 24 GiB is 0.32002 GiB off, report 41 of
# tests/data/field_reports.jsonl, an RTX 3090 (benchmarks/accuracy_page.py).
_LEAST = GiB // 3
SOURCE = "fitted to published start-up logs by benchmarks/fit_runtime.py"


@cache
def coefficients() -> Coefficients:
    return Coefficients(**json.loads((Path(__file__).parent / "fitted.json").read_text())["coefficients"])


def forward_bytes(architecture: Architecture, tokens: int, size: int, ranks: int) -> int:
    """Widest moment of a layer: residual and norm, input and output of the block (4 x hidden), and the MLP's
    gate, up and their product."""
    inner = architecture.intermediate_size // ranks
    if architecture.experts:  # fused experts run in chunks: one token's experts side by side
        inner = max(inner, architecture.hidden_size)
    width = inner * (3 if architecture.gated_mlp else 2) + 4 * architecture.hidden_size
    return tokens * width * size


def activation(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> Estimate:
    size, ranks = DTYPE_BYTES[chosen.flags.dtype], chosen.flags.tensor_parallel_size
    forward = forward_bytes(architecture, chosen.max_num_batched_tokens, size, ranks)
    formula = f"forward pass of {chosen.max_num_batched_tokens:,} tokens {forward:,}"
    return _bounded(forward, chosen, fitted.spread, formula, SOURCE)


def terms(architecture: Architecture, chosen: Resolved, fitted: Coefficients, activation: Estimate) -> Runtime:
    held = fitted.non_torch_parallel if chosen.flags.tensor_parallel_size > 1 else fitted.non_torch
    framework = _bounded(held, chosen, fitted.spread, f"non-torch memory {held:,}", SOURCE)
    total = framework.value + activation.value
    more = 3 if has_towers(architecture) else 2  # no start of these engines prints its terms
    below, above = reach((fitted.spread, more * fitted.spread), chosen.device_memory)
    return Runtime(framework, activation, NOTHING, (max(0, total - below), total + above))


def reach(shares: tuple[float, float], memory: int) -> tuple[int, int]:
    """Bytes below and above a sum by their shares of a device of ``memory`` bytes. Libraries and kernels take
    as much on a small one: never less than ``_LEAST``."""
    return max(_LEAST, int(shares[0] * memory)), max(_LEAST, int(shares[1] * memory))


def has_towers(architecture: Architecture) -> bool:
    """Vision or audio towers, whose profile run encodes the largest picture."""
    return any(tensor.role in TOWER_ROLES for tensor in architecture.tensors)


def _bounded(value: int, chosen: Resolved, share: float, formula: str, source: str) -> Estimate:
    """``value`` within ``share`` of the device, and no further below than half."""
    spread = int(share * chosen.device_memory)
    return Estimate(value, value - min(spread, value // 2), value + spread, formula, source)
