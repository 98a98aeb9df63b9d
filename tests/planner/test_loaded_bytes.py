"""Tests of small models that transformers saves and loads: file bytes and loaded bytes equal the plan's.

Not every tensor has the model's dtype. Some families keep routers and their biases in float32, by their
constructor or by ``_keep_in_fp32_modules_strict``, and some buffers are stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import BitsAndBytesConfig

from tonnage.planner.families.registry import architecture_of
from tonnage.planner.planning.checkpoint import checkpoint_size
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.source.resolve import resolve_model

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 256,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
HEAD = {"head_dim": 16}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "apertus": SMALL,  # two stored constants per layer
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 128,
        "n_positions": 64,
    },  # Conv1D, which bitsandbytes replaces
    "ernie4_5_moe": {**SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},  # fp32 by class
    "hunyuan_v1_moe": {**SMALL, **HEAD, "num_experts": 4, "moe_topk": 2},  # fp32 by constructor
    "glm4_moe": {**SMALL, **HEAD, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**SMALL, **MOE, "shared_expert_intermediate_size": 32},
    "granitemoe": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "exaone_moe": {**SMALL, **HEAD, **MOE},  # no adapter: transformers' own modules
    "afmoe": {**SMALL, **HEAD, **MOE},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "vocab_size": 128},
}


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path) -> Path:
    """Return the folder that save_pretrained writes for a model loaded in bfloat16."""
    config = transformers.AutoConfig.for_model(request.param, **FAMILIES[request.param])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "first")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    again.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def four_bits(code: str, double: bool = False) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=code, bnb_4bit_use_double_quant=double)


FORMATS = {
    "none": None,
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "nf4": four_bits("nf4"),
    "nf4-double": four_bits("nf4", True),
    "fp4": four_bits("fp4"),
    "fp4-double": four_bits("fp4", True),
}


def test_planned_weight_bytes_equal_the_file_and_the_loaded_model_and_the_quantized_model(saved, held_bytes):
    source = resolve_model(str(saved))
    architecture = architecture_of(source.config)
    size = checkpoint_size(architecture, Quantization(), source.config, "bfloat16")
    assert size.low == size.high == sum(tensor.nbytes for tensor in source.tensors)
    for scheme, options in FORMATS.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            saved, dtype=torch.bfloat16, quantization_config=options
        )
        stored = read_quantization({}, None if scheme == "none" else scheme)
        planned = sum(stored.bytes_after_load(t, "bfloat16") for t in architecture.tensors)
        assert held_bytes(model) == planned, scheme


def test_minimax_m2_routers_are_float32_in_the_file_and_bfloat16_after_load():
    """The files hold routers and biases in float32; transformers 5.19 loads them in bfloat16."""
    config = {**SMALL, **HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "minimax_m2"}
    architecture = architecture_of(json.loads(json.dumps(config)))
    none = Quantization()
    loaded = sum(none.bytes_after_load(t, "bfloat16") for t in architecture.tensors if t.role != "buffer")
    router = 4 * 64
    bias = 4 * 4
    in_file = sum(none.bytes_in_file(t, "bfloat16") for t in architecture.tensors)
    assert in_file == loaded + 3 * (2 * router + bias)
