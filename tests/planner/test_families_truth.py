"""Weights from config.json alone against public facts: parameter counts and published checkpoint sizes."""

from __future__ import annotations

import pytest

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture, known_model_types
from tonnage.planner.quantization import read_quantization

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def test_parameters_equal_the_meta_device_count(truth_row, config_of):
    architecture = build_architecture(config_of(truth_row["model"]))
    assert architecture.parameters == int(truth_row["params_unique"])
    tied = sum(t.elements for t in architecture.tensors if t.tied_to)
    assert architecture.parameters + tied == int(truth_row["params_incl_tied_copies"])
    assert architecture.class_name == truth_row["class"]


def checkpoint_bytes(config, dtype: str, *, tied_copy: bool) -> int:
    """What the checkpoint files hold: parameters as loaded, and one format byte per int8 module."""
    architecture, quantization = build_architecture(config), read_quantization(config, None)
    total = 0
    for tensor in architecture.tensors:
        if tensor.is_parameter:
            total += quantization.bytes_after_load(tensor, dtype)
            if tied_copy and tensor.tied_to:
                total += tensor.elements * BYTES[dtype]
            if quantization.scheme == "int8" and quantization.converts(tensor):
                total += 1  # weight_format
            if quantization.scheme == "nf4-double" and quantization.converts(tensor):
                total -= 4  # the offset is in the JSON text of the checkpoint
    return total


def test_bytes_equal_the_published_checkpoint(size_row, config_of):
    config = config_of(size_row["model"])
    difference = int(size_row["total_size_bytes"]) - checkpoint_bytes(
        config, size_row["torch_dtype"], tied_copy="falcon" in size_row["model"]
    )
    # What those files hold beside parameters: RedPajama's old buffers (masks 16,777,216; inv_freq and
    # masked_bias 130 per layer), the NF4 file's JSON text of 280 modules (171.6 bytes each).
    known = {"togethercomputer/RedPajama-INCITE-7B-Base": 16_777_216 + 32 * 130}
    if "nf4" in size_row["quantization"]:
        assert 280 * 160 <= difference <= 280 * 180
    else:
        assert difference == known.get(size_row["model"], 0)


def test_every_row_that_is_not_answered_is_refused_by_name(config_of):
    for name in ("google/gemma-3-27b-it", "google/medgemma-27b-it"):
        with pytest.raises(UnsupportedArchitecture, match="gemma3") as caught:
            build_architecture(config_of(name))
        assert caught.value.field == "model_type"


def test_falcon_40b_counts_eight_kv_heads_and_transformers_stores_all(config_of):
    architecture = build_architecture(config_of("tiiuae/falcon-40b"))
    assert architecture.parameters == 41_303_293_952
    layer = architecture.cache_layers[0]
    assert (layer.kv_heads, layer.head_size, layer.transformers_kv_heads) == (8, 64, 128)


def test_falcon_7b_is_multi_query():
    config = {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 4544,
        "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024, "multi_query": True,
        "parallel_attn": True, "bias": False, "alibi": False, "new_decoder_architecture": False,
    }  # fmt: skip
    architecture = build_architecture(config)
    assert architecture.parameters == 6_921_720_704
    assert architecture.attention == "MQA"
    assert architecture.cache_layers[0].kv_heads == 1


def test_known_model_types_lists_the_families_of_the_readme():
    assert {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "gpt_neox",
        "falcon",
        "gpt_bigcode",
    } <= set(known_model_types())
