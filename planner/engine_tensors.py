"""The tensors an engine really holds for an Architecture, where it differs from transformers' modules."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.plan import Deployment
from tonnage.planner.records import replace

_VOCAB_PADDING = 64  # vLLM: DEFAULT_VOCAB_PADDING_SIZE, model_executor/layers/vocab_parallel_embedding.py


def tensors_of(architecture: Architecture, deployment: Deployment) -> tuple[TensorSpec, ...]:
    """hf: as transformers. vllm: vocabulary rows padded to 64, one cos/sin table instead of frequencies."""
    if deployment.engine == "hf":
        return architecture.tensors
    out = []
    for tensor in architecture.tensors:
        if tensor.role == "buffer":
            continue
        if tensor.role in ("embedding", "head") and tensor.shape[0] == architecture.vocab_size:
            rows = -(-tensor.shape[0] // _VOCAB_PADDING) * _VOCAB_PADDING
            tensor = replace(tensor, shape=(rows, *tensor.shape[1:]))
        out.append(tensor)
    if architecture.rotary is not None:
        # get_rope caches one table per distinct rope, [positions, rotated dimensions]
        shape = (architecture.max_model_len, architecture.rotary.dim)
        for i in range(architecture.rotary.tables):
            out.append(TensorSpec(f"rotary_emb.{i}.cos_sin_cache", shape, "buffer", "RotaryEmbedding"))
    return tuple(out)
