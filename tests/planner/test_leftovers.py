"""Tests that unused config fields are accepted and unknown switches widen the weight interval.

The files are reconstructions: what transformers 5.19 writes for the class with the published sizes, plus the
extra fields of the published files.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture, families, known_model_types
from tonnage.planner.planning.build import make_plan

_SPEC = importlib.util.spec_from_file_location("single_changes", Path(__file__).with_name("single_changes.py"))
single_changes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(single_changes)

FLAGS = Deployment(device_memory=1 << 36, dtype="bfloat16")
# model -> (model_type, class, sizes, fields that the class lacks)
RELEASED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM3-3B": (
        "smollm3", "SmolLM3ForCausalLM", {"max_position_embeddings": 65_536}, {"max_window_layers": 28},
    ),
    "google/gemma-2-9b": (
        "gemma2", "Gemma2ForCausalLM",
        {"hidden_size": 3584, "intermediate_size": 14_336, "num_hidden_layers": 42, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256},
        {"cache_implementation": "hybrid", "sliding_window_size": 4096},
    ),
    "microsoft/Phi-4-mini-instruct": (
        "phi3", "Phi3ForCausalLM",
        {"vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
         "num_key_value_heads": 8, "tie_word_embeddings": True, "sliding_window": 262_144, "pad_token_id": 0},
        {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
         "attention_bias": False},
    ),
    "bigcode/starcoder2-3b": (
        "starcoder2", "Starcoder2ForCausalLM", {},
        {"attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-05, "mlp_type": "default",
         "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True},
    ),
    "tencent/HY-MT": (
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
        {"vocab_size": 128_256, "head_dim": 128, "intermediate_size": 14_336, "num_key_value_heads": 8},
        {"add_classification_head": False, "anyres_pooling_size": 2, "anyres_vit_max_image_size": None,
         "attention_head_dim": 128, "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0],
         "group_limited_greedy": False, "kv_lora_rank": None, "moe_drop_tokens": False,
         "moe_intermediate_size": 3072, "moe_layer_num_skipped": 1, "moe_topk": 1, "norm_type": "rms",
         "num_experts": 1, "num_media_embeds": 257, "num_shared_expert": 1, "org_vocab_size": 128_167,
         "position_embedding_xdrope": False, "q_lora_rank": None, "qk_nope_head_dim": None,
         "qk_rope_head_dim": None, "use_cla": False, "use_mixed_mlp_moe": False, "use_qk_norm": True,
         "v_head_dim": None, "vit_input_resolution": 224, "vit_norm_type": "fused", "vit_patch": 1,
         "vit_token": 64, "vit_used_rms_norm": False},
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": (
        "cohere2", "Cohere2ForCausalLM", {},
        {"layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0,
         "position_embedding_type": "rope_gptj", "sliding_window_pattern": 4, "use_embedding_sharing": True,
         "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False,
         "use_qk_norm": False},
    ),
}  # fmt: skip
# Sizes that a class leaves open, or whose heads do not divide its width
NEEDED = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "qwen3_omni_moe": {"thinker_config": {"text_config": {"num_attention_heads": 32}}},
}


def written(model_type: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the config with every field of its class."""
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("name", RELEASED)
def test_config_with_unused_fields_is_planned(name, folder_with):
    model_type, class_name, sizes, beside = RELEASED[name]
    config = {**written(model_type, sizes), **beside, "architectures": [class_name], "num_hidden_layers": 4}
    config.pop("layer_types", None)
    assert single_changes.built(class_name, config) is not None
    assert single_changes.difference(class_name, config) is None
    plan = make_plan(folder_with(config), FLAGS)
    assert "weights_bytes" not in plan.intervals
    assert not any("not known" in note for note in plan.notes)


@pytest.mark.parametrize("model_type", [name for name in known_model_types() if name in CONFIG_MAPPING])
def test_config_with_all_default_fields_is_planned(model_type):
    assert build_architecture(written(model_type, NEEDED.get(model_type, {}))).parameters > 0


def test_deepseek_v4_layer_kinds_written_by_transformers_are_read():
    config = written("deepseek_v4", {"num_hidden_layers": 5, "n_routed_experts": 4, "hidden_size": 256})
    assert "compress_ratios" not in config
    assert single_changes.built("DeepseekV4ForCausalLM", config) is not None
    assert single_changes.difference("DeepseekV4ForCausalLM", config) is None
    ratios = [layer.compression for layer in build_architecture(config).cache_layers if layer.kind == "mla"]
    assert ratios == [128, 128, 128, 4, 128]
    with pytest.raises(UnsupportedArchitecture, match="compress_rates"):
        build_architecture({**config, "compress_rates": {"compressed_sparse_attention": 8}})


def test_smollm3_layers_without_rotary_embedding_use_sliding_window():
    config = written("smollm3", {"num_hidden_layers": 8, "use_sliding_window": True, "sliding_window": 512})
    listed = config.pop("layer_types")
    assert listed[3] == "sliding_attention"
    for nope in (config.pop("no_rope_layers"), [0, 1] * 4):
        found = build_architecture({**config, "no_rope_layers": nope}).cache_layers
        assert [layer.kind == "sliding" for layer in found] == [not rotary for rotary in nope]
    assert build_architecture(config).cache_layers[3].window == 512


def sources(model_type: str) -> str:
    """Return the code that reads a config of this type: transformers' module and vLLM's model.

    vLLM's transformers backend stands in for a model without a class of its own.
    """
    found = (Path(transformers.__file__).parent / "models" / model_type).glob("*.py")
    models = Path(importlib.util.find_spec("vllm").origin).parent / "model_executor" / "models"
    own = {"cohere2": ("commandr",), "gemma2": ("gemma2",), "phi3": ("phi3", "llama")}.get(model_type)
    vllm = [models / f"{name}.py" for name in own] if own else (models / "transformers").glob("*.py")
    return "\n".join(path.read_text() for path in (*found, *vllm))


@pytest.mark.parametrize("model_type", [name for name, family in families().items() if family.leftovers])
def test_config_fields_listed_as_unused_are_read_by_no_transformers_code(model_type):
    code = sources(model_type)
    assert re.search(r"\bnum_attention_heads\b", code)
    read = re.compile(r"config\.(\w+)|getattr\(\w*config, \"(\w+)\"")
    names = {name for pair in read.findall(code) for name in pair}
    assert not names & set(families()[model_type].leftovers)


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("gemma2", "sliding_window_size", 512),
        ("hunyuan_v1_dense", "num_experts", 8),
        ("hunyuan_v1_dense", "attention_head_dim", 64),
        ("hunyuan_v1_dense", "kv_lora_rank", 512),
        ("phi3", "full_attn_mod", 2),
        ("starcoder2", "norm_type", "rms"),
        ("cohere2", "layer_switch", 2),
        ("llama", "max_window_layers", 28),
        ("llama", "norm_groups", 8),
        ("llama", "relative_attention_bias", True),
        ("llama", "use_relative_bias", True),
        ("llama", "use_shared_norm", True),
    ],
)
def test_config_field_that_one_family_ignores_is_rejected_in_other_families_or_with_other_values(
    model_type, field, value, folder_with
):
    with pytest.raises(UnsupportedArchitecture) as caught:
        make_plan(folder_with({**written(model_type, {}), field: value}), FLAGS)
    assert caught.value.field == field


@pytest.mark.parametrize(("engine", "ranks"), [("hf", 1), ("vllm", 1), ("vllm", 2)])
def test_unknown_config_switch_widens_the_interval_of_weight_bytes(engine, ranks, tiny_llama, folder_with):
    """The interval covers the models that have the biases and norms."""
    flags = Deployment(
        engine=engine, dtype="bfloat16", gpu="h100-80g", max_model_len=128, tensor_parallel_size=ranks
    )
    plan = make_plan(folder_with({**tiny_llama, "use_qk_norm": True, "dense_bias": True}), flags)
    assert any(note.startswith("use_qk_norm, dense_bias: not known for llama") for note in plan.notes)
    low, high = plan.intervals["weights_bytes"]
    assert low == plan.rank.weights_bytes == make_plan(folder_with(tiny_llama), flags).rank.weights_bytes
    for other in (
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen3", "architectures": None, "head_dim": 16, "attention_bias": True},
        {"model_type": "phi", "architectures": None, "qk_layernorm": True},
    ):
        real = make_plan(folder_with({**tiny_llama, **other}), flags).rank.weights_bytes
        assert real <= high
    assert low < make_plan(folder_with({**tiny_llama, "attention_bias": True}), flags).rank.weights_bytes
    # training and drafts have no such interval
    with pytest.raises(UnsupportedArchitecture) as caught:
        build_architecture({**tiny_llama, "use_qk_norm": True})
    assert caught.value.field == "use_qk_norm"
