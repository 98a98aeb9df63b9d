"""Memory of vLLM's processes on a CPU, besides weights and KV pool.

The table shows the RssAnon of each process in MiB, measured after a full batch and a grammar-constrained answer
(benchmarks/memory_terms.py, 2026-11-22). The system was vLLM 0.32.0, torch 2.13.0, transformers 5.19 and Python
3.11 on x86_64 with 2 cores. The settings were bf16, enforce_eager, a pool of 512 MiB and max_model_len 4096.
The worker's figures exclude weights and pool.

        model                            vocabulary   API   EngineCore   worker
        Llama of 4 layers, 256 wide           1,024   430          409      489
        SmolLM2-135M, 30 layers              49,152   469          488      746
        Gemma-3-270M, 18 layers             262,144   817          925    1,321

384 MiB of the API process and of EngineCore are imported modules, half of it torch. Compiled models need more.
"""

from __future__ import annotations

from tonnage.planner.engines.runtime.api import framework
from tonnage.planner.engines.runtime.estimate import Estimate
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.units import MiB

# Memory of the API process, which has two tokenizers, this project's and vLLM's. 7 MiB of it are Python's
# multiprocessing resource tracker.
VLLM_API_BYTES = 437 * MiB
VLLM_API_TOKEN_BYTES = 1550
# Memory of the EngineCore process without grammars, measured as 408 MiB with a vocabulary of 1,024 tokens, 465
# MiB with 49,152 tokens and 757 MiB with 262,144 tokens.
VLLM_CORE_BYTES = 408 * MiB
VLLM_CORE_TOKEN_BYTES = 1400
VLLM_WORKER_BYTES = 480 * MiB
VLLM_LAYER_BYTES = 4 * MiB
VLLM_INTERVAL = (0.85, 1.6)


def api_bytes(vocab_size: int) -> int:
    """Return the memory of vLLM's API process in bytes, while no large requests are in flight."""
    return VLLM_API_BYTES + vocab_size * VLLM_API_TOKEN_BYTES


def framework_bytes(architecture: Architecture, dtype: str) -> Estimate:
    """Estimate the memory of vLLM's processes without weights and KV pool, with client buffers and grammars.

    ``dtype`` is the dtype of the weights.
    """
    vocabulary = architecture.vocab_size
    packed = _packed_bytes(architecture, dtype)
    core = VLLM_CORE_BYTES + vocabulary * VLLM_CORE_TOKEN_BYTES
    worker = VLLM_WORKER_BYTES + architecture.layers * VLLM_LAYER_BYTES + packed
    return framework(
        api_bytes(vocabulary) + core + worker,
        vocabulary,
        VLLM_INTERVAL,
        f"API process {VLLM_API_BYTES:,} + {VLLM_API_TOKEN_BYTES:,} each "
        f"+ EngineCore {VLLM_CORE_BYTES:,} + {VLLM_CORE_TOKEN_BYTES:,} each + worker {VLLM_WORKER_BYTES:,} "
        f"+ {architecture.layers} layers x {VLLM_LAYER_BYTES:,} + packed embedding and head {packed:,}",
        "RssAnon of vLLM 0.32.0 on a CPU, measured",
    )


def _packed_bytes(architecture: Architecture, dtype: str) -> int:
    """Return the bytes of oneDNN's packed copies of embedding and output head, which 16-bit weights need.

    vLLM packs them like linear layers, whether tied or not, and keeps the original weights
    (vocab_parallel_embedding.py, and dispatch_cpu_unquantized_gemm with ``remove_weight`` false, vLLM 0.32).
    """
    if DTYPE_BYTES[dtype] != 2:
        return 0
    copies = 1 if architecture.kind == "encoder" else 2
    return copies * architecture.vocab_size * architecture.hidden_size * DTYPE_BYTES[dtype]
