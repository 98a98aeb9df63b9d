"""Tensors as vLLM and SGLang hold them: padded vocabularies, and one cos/sin table per rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.units import ceil_div

# vLLM pads a vocabulary to a multiple of this many rows (DEFAULT_VOCAB_PADDING_SIZE in
# model_executor/layers/vocab_parallel_embedding.py, 0.32.0).
VOCABULARY_PADDING = 64


def padded_rows(tensor: TensorSpec) -> TensorSpec:
    """Return a vocabulary's tensor with its number of rows rounded up to a multiple of 64."""
    rows = ceil_div(tensor.shape[0], VOCABULARY_PADDING) * VOCABULARY_PADDING
    return replace(tensor, shape=(rows, *tensor.shape[1:]))


def rotary_tables(architecture: Architecture, positions: int) -> list[TensorSpec]:
    """Return one cos/sin table per distinct rotary embedding.

    Its shape is [positions, rotated dimensions], as vLLM's and SGLang's get_rope caches it.
    """
    if architecture.rotary is None:
        return []
    shape = (positions, architecture.rotary.dim)
    return [
        TensorSpec(f"rotary_emb.{i}.cos_sin_cache", shape, "buffer", "RotaryEmbedding")
        for i in range(architecture.rotary.tables)
    ]


def merged_tensors(architecture: Architecture, position_factor: int = 1) -> tuple[TensorSpec, ...]:
    """Return a decoder's tensors as vLLM and SGLang hold them, in merged modules.

    Vocabularies are padded to 64 rows. Each rotary table has ``position_factor`` x the model's maximum length
    rows.
    """
    out = []
    for tensor in architecture.tensors:
        if tensor.role == "buffer":
            continue
        if tensor.role in ("embedding", "head") and tensor.shape[0] == architecture.vocab_size:
            tensor = padded_rows(tensor)
        out.append(tensor)
    return (*out, *rotary_tables(architecture, architecture.max_model_len * position_factor))
