"""Conversion of a GGUF header to config.json fields, and a check of the file's tensors against these fields.

The fields are those that transformers 5.19 derives from a GGUF file (integrations/ggml.py).
"""

from __future__ import annotations

from typing import Any

from tonnage.planner.errors import CheckpointError, UnsupportedArchitecture
from tonnage.planner.families.registry import families, family_of
from tonnage.planner.headers.gguf import GGUFHeader
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import shown
from tonnage.planner.model.tensor import HeaderTensor

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_REFUSED = ("expert_count", "attention.value_length_mla", "attention.kv_lora_rank", "ssm.state_size")

# ggml tensor name -> state dict name, per layer (gguf package 0.19.0, gguf/tensor_mapping.py)
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NOT_WEIGHTS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


def config_from_gguf(header: GGUFHeader, where: str) -> dict[str, Any]:
    """Return the config.json fields that correspond to a GGUF file's metadata.

    Raises:
        UnsupportedArchitecture: the architecture, or a value of its metadata, is not supported.
        CheckpointError: a required value is missing.
    """
    name = header.metadata.get("general.architecture")
    found = next(((t, f.gguf) for t, f in families().items() if f.gguf and f.gguf.name == name), None)
    if found is None:
        raise UnsupportedArchitecture(
            f"{str(name)[:60]!r} is not supported",
            field="general.architecture",
            hint="known in GGUF files: " + ", ".join(f.gguf.name for f in families().values() if f.gguf),
        )
    model_type, known = found

    def get(key: str) -> Any:
        return header.metadata.get(f"{name}.{key}")

    for key in _REFUSED:
        if get(key):
            raise UnsupportedArchitecture(f"{shown(get(key))} is not supported", field=f"{name}.{key}")
    config: dict[str, Any] = {"model_type": model_type, "architectures": [known.class_name]}
    for key, field in _KEYS.items():
        value = get(key)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise UnsupportedArchitecture(
                    "differs between layers, which is not supported", field=f"{name}.{key}"
                )
            value = value[0]
        if value is None and key != "attention.head_count_kv":
            raise CheckpointError(f"{name}.{key} is missing", field=where)
        if value is not None:
            config[field] = value
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    head_size = get("attention.key_length") or (get("rope.dimension_count") if known.rotary_head else None)
    if head_size is not None:
        config["head_dim"] = head_size
    if known.window and get("attention.sliding_window") is not None:
        config["sliding_window"] = get("attention.sliding_window")
    names = {tensor.name: tensor for tensor in header.tensors}
    embedding = names.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("token_embd.weight is missing or not a matrix", field=where)
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in names
    if known.bias:
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    return config


def check_gguf(architecture: Architecture, tensors: tuple[HeaderTensor, ...]) -> None:
    """Raise CheckpointError unless a GGUF file has exactly the model's tensors, with their shapes.

    An additional tensor is an error, unlike in safetensors files. The config was derived from the GGUF file, so
    an additional tensor means that the config does not describe the model.
    """
    wanted = {
        spec.name: spec.shape for spec in architecture.tensors if spec.is_parameter and spec.tied_to is None
    }
    for tensor in tensors:
        stem = tensor.name.rpartition(".")[0]
        if stem.rpartition(".")[2] in _NOT_WEIGHTS or stem in _NOT_WEIGHTS:
            continue
        name = state_dict_name(tensor.name, architecture.model_type)
        shape = wanted.pop(name, None)
        if shape is None:
            raise CheckpointError(
                f"the file has {tensor.name[:80]}, which a {architecture.model_type} model lacks", field="gguf"
            )
        if shape != tensor.shape:
            raise CheckpointError(
                f"{tensor.name} has shape {list(tensor.shape)}, but {list(shape)} by the metadata", field="gguf"
            )
    if wanted:
        raise CheckpointError(f"{next(iter(wanted))} is not in the file ({len(wanted)} missing)", field="gguf")


def gguf_name(name: str, model_type: str) -> str:
    """Convert a tensor name in transformers' state dict to the name in a GGUF file.

    An unknown name is returned unchanged. This function is the inverse of `state_dict_name`.
    """
    stem, _, suffix = name.rpartition(".")
    for ours, theirs in _TOP_NAMES.items():
        if stem == theirs:
            return f"{ours}.{suffix}"
    if not stem.startswith("model.layers."):
        return name
    _, _, layer, inner = stem.split(".", 3) if stem.count(".") > 2 else (*stem.split("."), "")
    known = family_of(model_type).gguf
    names = {**_LAYER_NAMES, **(known.norms if known else {})}
    found = next((ours for ours, theirs in names.items() if theirs == inner), None)
    return name if found is None else f"blk.{layer}.{found}.{suffix}"


def state_dict_name(name: str, model_type: str) -> str:
    """Convert a tensor name in a GGUF file to the name in transformers' state dict; keep an unknown name."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk":
        known = family_of(model_type).gguf
        inner = _LAYER_NAMES.get(parts[2]) or (known.norms.get(parts[2]) if known else None)
        if inner is not None:
            return f"model.layers.{parts[1]}.{inner}.{suffix}"
    return name
