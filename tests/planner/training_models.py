"""Tiny real models of ten families, and their plans: shared by the tests that train them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training.model import TrainingModel, model_from
from tonnage.planner.training.plan import Planner

_PLAIN = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
_NO_HEADS = {k: v for k, v in _PLAIN.items() if k not in ("num_key_value_heads", "head_dim")}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma"), _PLAIN),
    "mistral": {**_PLAIN, "sliding_window": 32},
    "gemma2": {**_PLAIN, "sliding_window": 32},
    "gemma3_text": {**_PLAIN, "sliding_window": 32},
    "gpt_neox": _NO_HEADS,
    "falcon": {
        **{k: v for k, v in _NO_HEADS.items() if k != "intermediate_size"}, "ffn_hidden_size": 192,
        "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False, "bias": False,
    },
    # SDPA on the CPU has no fused kernel with dropout: attn_pdrop is 0 there, resid_pdrop stays
    "gpt_bigcode": {
        "vocab_size": 512, "n_embd": 128, "n_inner": 192, "n_layer": 3, "n_head": 8, "n_positions": 256,
        "attn_pdrop": 0.0,
    },
}  # fmt: skip
FAMILIES = tuple(CONFIGS)


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    return {"model_type": family, **json.loads(json.dumps(CONFIGS[family])), **overrides}


def training_model(family: str, **overrides: Any) -> TrainingModel:
    config = config_of(family, **overrides)
    return model_from(family, build_architecture(config))


def planner(family: str) -> Planner:
    return Planner(training_model(family))


def real_model(family: str, attention: str = "sdpa", dtype: str = "float32", **overrides: Any) -> Any:
    """The model of transformers, with random weights, in training mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**config_of(family, **overrides))
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=getattr(torch, dtype)
    ).train()


def storages(tensors: Any) -> dict[int, int]:
    """Bytes of the distinct storages of tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def saved_bytes(model: Any, batch: int, length: int, *, autocast: bool) -> int:
    """Bytes autograd keeps after one forward pass with a loss, parameters and buffers aside."""
    import torch

    own = storages([*model.parameters(), *model.buffers()])
    kept: dict[int, tuple[int, Any]] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that no address is used twice
        return tensor

    ids = torch.randint(0, 500, (batch, length))
    region = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), region:
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(size for size, _ in kept.values())
