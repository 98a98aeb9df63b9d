"""GPUs: activation peak, non-torch memory and CUDA graphs, as models fitted to published start-up logs.

vLLM's profile run leaves the larger of two moments as its peak: the widest layer of a forward pass of
max_num_batched_tokens tokens, or the sampler on max_num_seqs rows of the vocabulary. The sampler's bytes per
logit changed between 0.15 and 0.17 (a fused top-k/top-p kernel instead of a sort). Coefficients and
intervals are in fitted.json, written by benchmarks/fit_runtime.py from tests/data/field_reports.jsonl.
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

# Without a report, bytes per logit counted in vLLM 0.32.0: bf16 logits 2, their float32 copy 4, probabilities
# 4, exponential noise 4 (v1/sample/sampler.py, v1/sample/ops/topk_topp_sampler.py). The two 0.17.1 reports of
# one machine (qwen25-3b and Llama-3.1-8B) differ by what 15.9 +- 1.8 bytes would make.
SAMPLER_BYTES = 14
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


def sampler_bytes(architecture: Architecture, chosen: Resolved, each: float) -> int:
    """The sampler on max_num_seqs rows of logits (gathered on every rank) at ``each`` bytes per logit, and the
    hidden states beside; 0: it is not the peak."""
    if not each:
        return 0
    hidden = chosen.max_num_batched_tokens * architecture.hidden_size * DTYPE_BYTES[chosen.flags.dtype]
    return int(chosen.max_num_seqs * architecture.vocab_size * each + hidden)


def activation(architecture: Architecture, chosen: Resolved, fitted: Coefficients, each: float) -> Estimate:
    """The larger of the two moments; ``each``: as for :func:`sampler_bytes`."""
    size, ranks = DTYPE_BYTES[chosen.flags.dtype], chosen.flags.tensor_parallel_size
    forward = forward_bytes(architecture, chosen.max_num_batched_tokens, size, ranks)
    sampler = sampler_bytes(architecture, chosen, each)
    formula = (
        f"max(forward pass of {chosen.max_num_batched_tokens:,} tokens {forward:,}, sampler on "
        f"{chosen.max_num_seqs:,} x {architecture.vocab_size:,} logits {sampler:,})"
    )
    return _bounded(max(forward, sampler), chosen, fitted, formula)


def terms(
    architecture: Architecture, chosen: Resolved, fitted: Coefficients, activation: Estimate, *, graphs: bool
) -> Runtime:
    """``graphs``: whether an estimate of the CUDA graphs comes off the KV budget."""
    held = fitted.non_torch_parallel if chosen.flags.tensor_parallel_size > 1 else fitted.non_torch
    framework = _bounded(held, chosen, fitted, f"non-torch memory {held:,}")
    captured = NOTHING
    if graphs:
        captured = _bounded(fitted.graphs, chosen, fitted, f"estimate of the CUDA graphs {fitted.graphs:,}")
    total = framework.value + activation.value + captured.value
    spread = int(fitted.spread * chosen.device_memory)
    more = 2 if any(tensor.role in TOWER_ROLES for tensor in architecture.tensors) else 1
    return Runtime(framework, activation, captured, (max(0, total - spread), total + more * spread))


def _bounded(value: int, chosen: Resolved, fitted: Coefficients, formula: str) -> Estimate:
    spread = int(fitted.spread * chosen.device_memory)
    return Estimate(value, value - min(spread, value // 2), value + spread, formula, SOURCE)
