"""Memory beside weights and KV pool: the framework's own, and the activations of one step.

Small functions with named constants; each returns a value with an interval and its source.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.architecture import Architecture
from tonnage.planner.deployment import Resolved
from tonnage.planner.dtypes import DTYPE_BYTES
from tonnage.planner.plan import Deployment
from tonnage.planner.units import GiB, MiB

# hf engine on cpu. Measured by benchmarks/memory_terms.py on Linux x86_64, Python 3.11, torch 2.13.0+cpu,
# transformers 5.19: API process 64 to 67 MiB; engine process 282 to 285 MiB when ready and 308 after its
# first small batches (kernels load lazily), weights and pool taken off. The interval covers other allocators.
API_PROCESS_BYTES = 68 * MiB
HF_CHILD_BYTES = 290 * MiB
HF_INTERVAL = (0.85, 1.25)

# vllm engine on cpu: RssAnon of vLLM 0.32.0's three processes after load and 8 short requests (SmolLM2-135M
# bf16, enforce_eager, pool 256 MiB; x86_64, 2 cores), pool and weights taken off the worker's. Compiled models
# need more.
VLLM_API_BYTES = 400 * MiB
VLLM_CORE_BYTES = 390 * MiB
VLLM_WORKER_BYTES = 630 * MiB
VLLM_INTERVAL = (0.8, 1.6)

# GPUs, per device: nothing here is measured by this project. "Non-torch" memory in 28 published vLLM start-up
# logs: 0.02 to 0.66 GiB, 1.79 in one of 2024 (another of that build, 3.58, is left out); they leave out the
# CUDA context itself. Captured CUDA graphs in the logs of vLLM 0.7 to 0.25: 0.03 to 1.27 GiB, median 0.5.
CUDA_BYTES = GiB // 2
CUDA_INTERVAL = (0.04, 3.6)
CUDA_GRAPH_BYTES = GiB // 2
CUDA_GRAPH_INTERVAL = (0.06, 2.6)

# Copies of the logits that are alive at once: the model's own and their fp32 copy; the hf engine's sampler
# adds a few for 16 rows at a time (server/engines/hf/sampling.py). benchmarks/memory_terms.py compares.
LOGITS_COPIES = 2
ACTIVATION_INTERVAL = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """``value`` bytes, expected between ``low`` and ``high``."""

    value: int
    low: int
    high: int
    formula: str
    source: str


def _scaled(value: int, interval: tuple[float, float], formula: str, source: str) -> Estimate:
    return Estimate(value, int(value * interval[0]), int(value * interval[1]), formula, source)


def framework_bytes(deployment: Deployment) -> Estimate:
    """What the processes (on a GPU: the device) hold before weights and pool."""
    if deployment.device != "cpu":
        return _scaled(
            CUDA_BYTES, CUDA_INTERVAL, f"CUDA libraries and context {CUDA_BYTES:,}",
            "published start-up logs; not measured here",
        )  # fmt: skip
    if deployment.engine == "vllm":
        value = VLLM_API_BYTES + VLLM_CORE_BYTES + VLLM_WORKER_BYTES
        formula = (
            f"API process {VLLM_API_BYTES:,} + EngineCore {VLLM_CORE_BYTES:,} + worker {VLLM_WORKER_BYTES:,}"
        )
        return _scaled(value, VLLM_INTERVAL, formula, "RssAnon of vLLM 0.32.0 on a CPU, measured")
    value = API_PROCESS_BYTES + HF_CHILD_BYTES
    return _scaled(
        value, HF_INTERVAL, f"API process {API_PROCESS_BYTES:,} + engine process {HF_CHILD_BYTES:,}",
        "RssAnon after imports, torch 2.13 cpu",
    )  # fmt: skip


def activation_bytes(architecture: Architecture, chosen: Resolved) -> Estimate:
    """Peak beside the weights while one step of ``max_num_batched_tokens`` tokens runs.

    The widest moment of a layer (attention or MLP) plus the residual stream, and the logits of
    ``max_num_seqs`` sequences; both counted, because allocators seldom give the first back in time.
    """
    tokens = chosen.max_num_batched_tokens
    seqs = chosen.max_num_seqs
    size = DTYPE_BYTES[chosen.flags.dtype]
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    q = architecture.heads * architecture.head_size
    kv = architecture.kv_heads * architecture.head_size
    # attention: q, k, v, their rotated copies of q and k, the output; MLP: gate, up, product or in, out
    attention = tokens * (3 * q + 3 * kv) * size
    mlp = tokens * inner * (3 if architecture.gated_mlp else 2) * size
    residual = 2 * tokens * hidden * size
    logits = seqs * architecture.vocab_size * 4 * LOGITS_COPIES
    value = max(attention, mlp) + residual + logits
    formula = (
        f"max(attention {attention:,}, MLP {mlp:,}) + residual {residual:,} for {tokens:,} tokens "
        f"+ logits {seqs:,} x {architecture.vocab_size:,} x 4 x {LOGITS_COPIES} = {logits:,}"
    )
    return _scaled(value, ACTIVATION_INTERVAL, formula, "max_num_batched_tokens, max_num_seqs, vocab_size")


def cuda_graph_bytes(deployment: Deployment) -> Estimate:
    """Captured CUDA graphs: none on a CPU or in the hf engine."""
    if deployment.device == "cpu" or deployment.engine == "hf":
        return Estimate(0, 0, 0, "no CUDA graphs", "")
    return _scaled(
        CUDA_GRAPH_BYTES, CUDA_GRAPH_INTERVAL, f"captured graphs {CUDA_GRAPH_BYTES:,}",
        "published vLLM start-up logs; not measured here",
    )  # fmt: skip
