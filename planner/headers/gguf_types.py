"""Tensors of the GGUF file that llama.cpp would create from a model, for a file type such as Q4_K_M.

A file type mixes tensor types, because some matrices keep more bits. The rules are those of src/llama-quant.cpp
(llama.cpp, 2026-11: tensor_allows_quantization, llama_tensor_get_type_impl, tensor_type_fallback) without an
importance matrix and without overrides. Published files made with an importance matrix or overrides may differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.headers.ggml_types import GGML_TYPES
from tonnage.planner.headers.gguf_config import gguf_name
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TOWER_ROLES, HeaderTensor, TensorSpec

# File type -> tensor type of most of its matrices (llama_ftype_get_default_type). Other types, such as IQ types
# of up to three bits and ternary types, are not planned: they need an importance matrix or other rules.
FILE_TYPES = {
    "F32": "F32", "F16": "F16", "BF16": "BF16", "Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K",
    "Q5_K_S": "Q5_K", "Q5_1": "Q5_1", "Q5_0": "Q5_0", "Q4_K_M": "Q4_K", "Q4_K_S": "Q4_K", "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS", "Q4_1": "Q4_1", "Q4_0": "Q4_0", "Q3_K_L": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_S": "Q3_K",
    "Q2_K": "Q2_K",
}  # fmt: skip
# Short name of a file type -> its full name (tools/quantize/quantize.cpp of llama.cpp).
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_SIZES = {name: (values, size) for name, values, size in GGML_TYPES.values()}
_FALLBACK = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
# Last part of a matrix's name in the state dict -> its category in llama-quant.cpp.
_CATEGORIES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "qkv_proj": "v", "o_proj": "output", "out_proj": "output",
    "gate_proj": "gate", "up_proj": "up", "gate_up_proj": "up", "down_proj": "down",
}  # fmt: skip
_CACHES = ("full", "sliding", "chunked")


def file_type(name: str) -> str | None:
    """Return the GGUF file type with a name such as q4_k_m, in capitals (Q4_K_M), or None if it is unknown."""
    plain = name.upper().replace("-", "_")
    plain = _ALIASES.get(plain, plain)
    return plain if plain in FILE_TYPES else None


def gguf_tensors(architecture: Architecture, kind: str) -> tuple[HeaderTensor, ...]:
    """Return the tensors of the GGUF file of type ``kind`` that llama.cpp creates from a model.

    Args:
        architecture: the model.
        kind: a GGUF file type such as Q4_K_M, a key of FILE_TYPES.

    Raises:
        UnsupportedArchitecture: the tensors of the model's GGUF file are not known.
    """
    _check(architecture)
    return tuple(_tensors(architecture, kind))


def _check(architecture: Architecture) -> None:
    if any(tensor.role in TOWER_ROLES for tensor in architecture.tensors):
        raise UnsupportedArchitecture(
            "this model has a vision or audio tower, which is not in the GGUF file of the language model",
            field="--quantization",
            hint="give the .gguf file as the model",
        )
    kinds = {layer.kind for layer in architecture.cache_layers}
    if architecture.kind != "decoder" or not kinds or not kinds <= {*_CACHES}:
        raise UnsupportedArchitecture(
            f"the tensors of a GGUF file of {architecture.model_type} are not known: give the .gguf file",
            field="--quantization",
        )


def _tensors(architecture: Architecture, kind: str) -> Iterator[HeaderTensor]:
    tied = {tensor.tied_to for tensor in architecture.tensors if tensor.tied_to is not None}
    for tensor in architecture.tensors:
        if not tensor.is_parameter or tensor.tied_to is not None:
            continue
        columns = tensor.shape[-2] if tensor.transposed else tensor.shape[-1]
        chosen = _type_of(tensor, architecture, kind, columns, tied=tensor.name in tied)
        values, size = _SIZES[chosen]
        name = gguf_name(tensor.name, architecture.model_type)
        yield HeaderTensor(name, chosen, tensor.shape, prod(tensor.shape) // values * size)


def _type_of(tensor: TensorSpec, architecture: Architecture, kind: str, columns: int, *, tied: bool) -> str:
    """Return the ggml type of one tensor in a file of type `kind`.

    Args:
        tensor: the tensor.
        architecture: the model.
        kind: the type of the GGUF file, such as Q4_K_M.
        columns: number of values per row.
        tied: whether this tensor is also the output head.
    """
    if len(tensor.shape) < 2 or tensor.role in ("norm", "router"):
        return "F32"
    usual = FILE_TYPES[kind]
    if usual in ("F32", "F16", "BF16"):
        return usual
    if tensor.role == "head" or (tensor.role == "embedding" and tied):
        whole = columns % _SIZES[usual][0] == 0 and architecture.model_type != "falcon"
        chosen = usual if usual == "Q8_0" else "Q6_K" if whole else "Q8_0"
    elif tensor.role == "embedding":
        chosen = usual
    else:
        chosen = _mixed(_category(tensor, architecture), tensor.layer or 0, architecture, kind) or usual
    if columns % _SIZES[chosen][0]:
        chosen = _FALLBACK.get(chosen, "F16")
        chosen = chosen if columns % _SIZES[chosen][0] == 0 else "F16"
    return chosen


def _category(tensor: TensorSpec, architecture: Architecture) -> str:
    stem = re.sub(r"\.weight$", "", tensor.name).rpartition(".")[2]
    if stem not in _CATEGORIES:
        raise UnsupportedArchitecture(
            f"{tensor.name[:80]} of {architecture.model_type} has no known name in a GGUF file",
            field="--quantization",
            hint="give the .gguf file",
        )
    return _CATEGORIES[stem]


def _mixed(category: str, layer: int, architecture: Architecture, kind: str) -> str | None:
    """Return the ggml type of a matrix if it differs from the usual type in a GGUF file of type `kind`.

    Returns None for a matrix of the usual type.
    """
    layers, falcon = architecture.layers, architecture.model_type == "falcon"
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    # n_gqa in llama-quant.cpp: at least 4 query heads share a KV head
    shared = architecture.heads // max(1, architecture.kv_heads) >= 4
    eight = architecture.experts == 8
    if category == "v":
        return _values(layer, architecture, kind, more=more, shared=shared)
    if category == "k":
        return "Q8_0" if eight else None
    if category == "down" and falcon and kind in ("Q3_K_M", "Q3_K_L", "Q4_K_M", "Q4_K_S"):
        raise UnsupportedArchitecture(
            f"the GGUF type {kind} is not planned for {architecture.model_type}", field="--quantization"
        )
    if category == "down":
        found = {"Q2_K": "Q3_K", "Q3_K_L": "Q5_K", "Q3_K_M": "Q5_K" if layer < layers // 16 else "Q4_K"}
        if more:
            found |= {"Q4_K_M": "Q6_K", "Q5_K_M": "Q6_K"}
        if layer < layers // 8:
            found |= {"IQ4_NL": "Q5_K", "IQ4_XS": "Q5_K", "Q4_K_S": "Q5_K"}
        return found.get(kind)
    if category == "output" and eight:
        return "Q5_K" if kind in ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS") else None
    if category == "output":
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(kind)
    return None


def _values(layer: int, architecture: Architecture, kind: str, *, more: bool, shared: bool) -> str | None:
    """Return the ggml type of a layer's matrix attn_v if it differs from the GGUF file type's usual type.

    Returns None for the usual type. In models with 80 layers and grouped KV heads (70B) the matrix has more
    bits.

    Args:
        layer: index of the layer.
        architecture: the model.
        kind: the type of the GGUF file, such as Q4_K_M.
        more: whether the layer is one of those to which llama.cpp gives more bits.
        shared: whether at least four query heads share a KV head.
    """
    found = {"Q2_K": "Q4_K" if shared else "Q3_K", "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K", "Q3_K_L": "Q5_K"}
    if shared:
        found |= {"IQ4_NL": "Q5_K", "IQ4_XS": "Q5_K"}
    if more:
        found |= {"Q4_K_M": "Q6_K", "Q5_K_M": "Q6_K"}
    if layer < 4:
        found["Q4_K_S"] = "Q5_K"
    chosen = found.get(kind)
    if architecture.layers == 80 and architecture.heads != architecture.kv_heads:
        chosen = "Q5_K" if (chosen or FILE_TYPES[kind]) in ("Q3_K", "Q4_K") else chosen
    return "Q8_0" if architecture.experts == 8 else chosen


def refuse_unknown(name: str, field: str) -> None:
    """Raise DeploymentError for a name that looks like a GGUF file type but is not supported."""
    if re.fullmatch(r"(?:UD[-_])?(?:I?Q\d|TQ\d|MXFP4_MOE)\w*", name, re.IGNORECASE) and file_type(name) is None:
        raise DeploymentError(
            f"{name[:40]!r} is no GGUF file type that the planner supports", field=field,
            hint="one of " + ", ".join(FILE_TYPES) + "; for others give the .gguf file",
        )  # fmt: skip
