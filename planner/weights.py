"""Weight bytes of a rank: every tensor under the quantization, summed and explained."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.dtypes import ELEMENT_BYTES
from tonnage.planner.engine_tensors import tensors_of
from tonnage.planner.plan import Deployment, Term
from tonnage.planner.quantization import Quantization

_FIELDS = {
    "embedding": "vocab_size, hidden_size",
    "attention": "num_attention_heads, num_key_value_heads, head_dim, hidden_size",
    "mlp": "hidden_size, intermediate_size",
    "norm": "hidden_size",
    "head": "vocab_size, hidden_size, tie_word_embeddings",
    "buffer": "rope_parameters",
}


@dataclass(frozen=True, slots=True)
class Weights:
    """``total`` bytes after load, and one Term per kind of tensor."""

    total: int
    terms: tuple[Term, ...]


def sum_weights(architecture: Architecture, quantization: Quantization, deployment: Deployment) -> Weights:
    """Bytes the process holds for the model after load (parameters, buffers, quantization state)."""
    dtype = deployment.dtype
    total = 0
    kinds: dict[tuple[str, tuple[int, ...]], list[TensorSpec]] = {}
    for tensor in tensors_of(architecture, deployment):
        total += quantization.bytes_after_load(tensor, dtype)
        kinds.setdefault((re.sub(r"\.\d+\.", ".*.", tensor.name), tensor.shape), []).append(tensor)
    terms = tuple(_term(pattern, tensors, quantization, dtype) for (pattern, _), tensors in kinds.items())
    return Weights(total, terms)


def _term(pattern: str, tensors: list[TensorSpec], quantization: Quantization, dtype: str) -> Term:
    first = tensors[0]
    value = sum(quantization.bytes_after_load(tensor, dtype) for tensor in tensors)
    shape = " x ".join(f"{size:,}" for size in first.shape) or "1"
    if first.tied_to is not None:
        formula = f"tied to {first.tied_to}"
    elif quantization.converts(first):
        parts = " + ".join(f"{name} {size:,}" for name, size in quantization.parts(first).items())
        formula = f"{len(tensors)} x ({parts}); {quantization.describe()} of [{shape}]"
    else:
        kept = first.dtype or dtype
        formula = f"{len(tensors)} x {shape} x {ELEMENT_BYTES[kept]} ({kept})"
    return Term(f"weights.{pattern}", value, formula, _FIELDS[first.role])
