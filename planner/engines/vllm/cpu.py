"""vLLM on a CPU: memory beside weights and pool. Each of its processes has its own framework term.

RssAnon of vLLM 0.32.0's three processes after load and 8 short requests (SmolLM2-135M bf16, enforce_eager,
pool 256 MiB; x86_64, 2 cores; benchmarks/memory_terms.py), pool and weights taken off the worker's. Compiled
models need more.
"""

from __future__ import annotations

from tonnage.planner.engines.runtime.estimate import Estimate, scaled
from tonnage.planner.units import MiB

VLLM_API_BYTES = 400 * MiB
VLLM_CORE_BYTES = 390 * MiB
VLLM_WORKER_BYTES = 630 * MiB
VLLM_INTERVAL = (0.8, 1.6)


def framework_bytes() -> Estimate:
    value = VLLM_API_BYTES + VLLM_CORE_BYTES + VLLM_WORKER_BYTES
    formula = f"API process {VLLM_API_BYTES:,} + EngineCore {VLLM_CORE_BYTES:,} + worker {VLLM_WORKER_BYTES:,}"
    return scaled(value, VLLM_INTERVAL, formula, "RssAnon of vLLM 0.32.0 on a CPU, measured")
