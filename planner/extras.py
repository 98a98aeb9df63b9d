"""Terms a deployment adds: LoRA slots, weights in the host's memory; settings that override the plan."""

from __future__ import annotations

import os

from tonnage.planner.architecture import Architecture
from tonnage.planner.dtypes import DTYPE_BYTES
from tonnage.planner.plan import Deployment, RankPlan, Term
from tonnage.planner.units import gib

# vLLM allocates lora_a and lora_b of every linear layer of the language model for max_loras slots at
# max_lora_rank (lora/layers, 0.32.0); shapes are PEFT's: A [rank, in], B [out, rank].
_LORA_ROLES = ("attention", "mlp")


def lora_bytes(architecture: Architecture, flags: Deployment) -> int:
    """Bytes of all LoRA slots of one rank: tensor parallelism divides B (or A) with the layer it belongs to."""
    if not flags.enable_lora:
        return 0
    elements = 0
    for tensor in architecture.tensors:
        if tensor.role in _LORA_ROLES and len(tensor.shape) == 2 and tensor.module_class.endswith("Linear"):
            out, into = tensor.shape
            if tensor.shard_dim == 0:
                out = -(-out // flags.tensor_parallel_size)
            elif tensor.shard_dim == 1:
                into = -(-into // flags.tensor_parallel_size)
            elements += flags.max_lora_rank * (into + out)
    return elements * flags.max_loras * DTYPE_BYTES[flags.dtype]


def other_terms(rank: RankPlan, flags: Deployment) -> list[Term]:
    terms = []
    if rank.lora_bytes:
        terms.append(
            Term(
                "lora_bytes", rank.lora_bytes,
                f"{flags.max_loras} slots x rank {flags.max_lora_rank} x (in + out) of every linear layer",
                "--max-loras, --max-lora-rank",
            )
        )  # fmt: skip
    if rank.draft_bytes:
        terms.append(
            Term(
                "draft_bytes", rank.draft_bytes, f"weights of {flags.speculative_model}", "--speculative-model"
            )
        )
    if rank.offloaded_bytes:
        terms.append(
            Term(
                "offloaded_bytes", rank.offloaded_bytes, "weights kept in the host's memory", "--cpu-offload-gb"
            )
        )
    return terms


def environment_notes(flags: Deployment) -> tuple[str, ...]:
    """What is set on this machine and would silently win over the plan."""
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if flags.engine == "vllm" and flags.device == "cpu" and space:
        asked = flags.kv_cache_memory_bytes
        beside = f" instead of {gib(asked)}" if asked else ""
        return (
            f"VLLM_CPU_KVCACHE_SPACE={space} is set: vLLM takes {space} GiB for the KV cache{beside}; "
            "unset it to serve this plan",
        )
    return ()
