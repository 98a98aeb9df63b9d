"""The tensors of engines that load a model into modules of their own: vocabulary rows padded, one cos/sin table
for each rope instead of frequencies."""

from __future__ import annotations

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.records import replace

VOCABULARY_PADDING = 64
"""vLLM: DEFAULT_VOCAB_PADDING_SIZE, model_executor/layers/vocab_parallel_embedding.py."""


def padded_rows(tensor: TensorSpec) -> TensorSpec:
    rows = -(-tensor.shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
    return replace(tensor, shape=(rows, *tensor.shape[1:]))


def rotary_tables(architecture: Architecture, positions: int) -> list[TensorSpec]:
    """get_rope caches one table per distinct rope, [positions, rotated dimensions]."""
    if architecture.rotary is None:
        return []
    shape = (positions, architecture.rotary.dim)
    return [
        TensorSpec(f"rotary_emb.{i}.cos_sin_cache", shape, "buffer", "RotaryEmbedding")
        for i in range(architecture.rotary.tables)
    ]


def merged_tensors(architecture: Architecture, position_factor: int = 1) -> tuple[TensorSpec, ...]:
    """Tensors of a decoder; its rotary tables are ``position_factor`` times as long as its context."""
    out = []
    for tensor in architecture.tensors:
        if tensor.role == "buffer":
            continue
        if tensor.role in ("embedding", "head") and tensor.shape[0] == architecture.vocab_size:
            tensor = padded_rows(tensor)
        out.append(tensor)
    return (*out, *rotary_tables(architecture, architecture.max_model_len * position_factor))
