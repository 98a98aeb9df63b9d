"""Tensors of engines with their own modules: padded vocabularies, and cos/sin tables for each rope."""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TensorSpec

VOCABULARY_PADDING = 64
"""Rows to which vLLM pads a vocabulary: DEFAULT_VOCAB_PADDING_SIZE, layers/vocab_parallel_embedding.py."""


def padded_rows(tensor: TensorSpec) -> TensorSpec:
    """Return ``tensor`` with its rows rounded up to a multiple of 64."""
    rows = -(-tensor.shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
    return replace(tensor, shape=(rows, *tensor.shape[1:]))


def rotary_tables(architecture: Architecture, positions: int) -> list[TensorSpec]:
    """Return one cos/sin table per distinct rope, [positions, rotated dimensions], as get_rope caches them."""
    if architecture.rotary is None:
        return []
    shape = (positions, architecture.rotary.dim)
    return [
        TensorSpec(f"rotary_emb.{i}.cos_sin_cache", shape, "buffer", "RotaryEmbedding")
        for i in range(architecture.rotary.tables)
    ]


def merged_tensors(architecture: Architecture, position_factor: int = 1) -> tuple[TensorSpec, ...]:
    """Return the tensors of a decoder; rotary tables cover ``position_factor`` times the model's context."""
    out = []
    for tensor in architecture.tensors:
        if tensor.role == "buffer":
            continue
        if tensor.role in ("embedding", "head") and tensor.shape[0] == architecture.vocab_size:
            tensor = padded_rows(tensor)
        out.append(tensor)
    return (*out, *rotary_tables(architecture, architecture.max_model_len * position_factor))
