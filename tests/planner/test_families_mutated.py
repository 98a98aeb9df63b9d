"""Tests of random small configs of every family that transformers has, against its modules on the meta device.

Names, shapes and parameter counts must be equal. Published configs do not cover every combination of sizes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tonnage.planner.families.registry as registry
from tonnage.planner.families.registry import build_architecture, known_model_types

# Families whose classes take only consistent sets of sizes: given by hand. Not in this transformers, or only as
# remote code: their published configs are in test_families_truth.py.
EXTRA = {
    "diffllama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "mimo_v2_flash": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "gpt_neo": {"num_layers": 4, "num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_hidden_layers": 4},
    "gemma3n_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 2, "intermediate_size": 96},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16, "num_attention_heads": 4, "num_hidden_layers": 3},
}
# Their auto class is the encoder itself, not a language model built on it.
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "modernbert")
LEFT_OUT = {
    "falcon": "test_families_real.py mutates it",
    "gemma3n": "its class wants timm; test_gemma3n_towers.py builds its parts",
    "dbrx": "its config class of 5.19 cannot be built from sizes",
    "mistral4": "its config class demands a rope of a fixed shape",
    "zamba": "ties by a pattern that its small variants break",
    "zamba2": "wants as many layers as its pattern",
    "xlstm": "its sizes are properties without setters",
    "musicgen_decoder": "has no automatic class",
    "mllama_text_model": "is built below mllama",
    "step3p5": "has no automatic class; test_families_vllm.py compares it with vLLM's",
    "qwen2_5_omni": "its thinker alone is planned: test_pictures_modules.py",
    "qwen3_omni_moe": "its thinker alone is planned: test_pictures_modules.py",
    **dict.fromkeys(ENCODERS, "test_families_encoders.py"),
    "deepseek_v4": "its class derives compress_ratios from another field",
}

SIZES = {
    "hidden_size": lambda r, h: 16 * h, "n_embd": lambda r, h: 16 * h, "d_model": lambda r, h: 16 * h,
    "num_attention_heads": lambda r, h: h, "n_head": lambda r, h: h, "n_heads": lambda r, h: h,
    "num_heads": lambda r, h: h, "head_dim": lambda r, h: 16,
    "num_key_value_heads": lambda r, h: r.choice([k for k in (1, 2, 4) if h % k == 0]),
    "intermediate_size": lambda r, h: 8 * r.randint(4, 20), "ffn_dim": lambda r, h: 64,
    "moe_intermediate_size": lambda r, h: 8 * r.randint(2, 9),
    "num_hidden_layers": lambda r, h: r.randint(2, 7),
    "n_layer": lambda r, h: r.randint(2, 5), "num_layers": lambda r, h: 4, "n_layers": lambda r, h: 3,
    "vocab_size": lambda r, h: r.randint(100, 300), "num_experts": lambda r, h: 4,
    "num_local_experts": lambda r, h: 4, "n_routed_experts": lambda r, h: 8,
    "num_experts_per_tok": lambda r, h: 2,
    "moe_num_experts": lambda r, h: 4, "shared_expert_intermediate_size": lambda r, h: 24,
    "shared_intermediate_size": lambda r, h: 32, "max_position_embeddings": lambda r, h: 64,
    "n_positions": lambda r, h: 64, "q_lora_rank": lambda r, h: 24, "kv_lora_rank": lambda r, h: 32,
    "qk_nope_head_dim": lambda r, h: 16, "qk_rope_head_dim": lambda r, h: 8, "v_head_dim": lambda r, h: 12,
    "n_shared_experts": lambda r, h: 1, "tie_word_embeddings": lambda r, h: r.random() < 0.5,
    "attention_bias": lambda r, h: r.random() < 0.5, "encoder_layers": lambda r, h: 2,
    "decoder_layers": lambda r, h: 3, "encoder_attention_heads": lambda r, h: h,
    "decoder_attention_heads": lambda r, h: h, "encoder_ffn_dim": lambda r, h: 40,
    "decoder_ffn_dim": lambda r, h: 48, "d_ff": lambda r, h: 40, "d_kv": lambda r, h: 8,
}  # fmt: skip

# Transformers would store these buffers, but the published files lack them.
STORES_OTHERS = {"minimax": "decay tables computed from sizes"}
AUDIO = ("voxtral", "qwen2_audio", "qwen3_asr", "glmasr", "audioflamingo3")


def class_name(model_type: str) -> str:
    if model_type in ENCODERS:
        return auto.MODEL_MAPPING_NAMES[model_type]
    seq2seq = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
        or (seq2seq.get(model_type) if model_type.endswith(("t5", "t5gemma", "flamingo3")) else None)
        or auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        or (auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type) if model_type in AUDIO else None)
        or auto.MODEL_MAPPING_NAMES[model_type]
    )


def config_of_sizes(model_type: str, seed: int):
    rng = random.Random(seed)
    heads = rng.choice([4, 8])
    default = CONFIG_MAPPING[model_type]()
    known = default.to_dict()
    sizes = {k: f(rng, heads) for k, f in SIZES.items() if k in known or hasattr(default, k)}
    if model_type in ("bamba", "falcon_h1", "granitemoehybrid", "mamba2"):
        sizes.pop("num_heads", None)
        sizes.pop("head_dim", None)
    if model_type in ("bailing_hybrid", "nemotron_h", "kimi_linear"):
        sizes["tie_word_embeddings"] = False  # 5.19's classes never tie, whatever the config says
    if known.get("pad_token_id"):
        sizes["pad_token_id"] = 0
    return CONFIG_MAPPING[model_type](**{**sizes, **EXTRA.get(model_type, {})})


COVERED = [m for m in known_model_types() if m in CONFIG_MAPPING and m not in LEFT_OUT]


def test_random_configs_of_the_tests_cover_95_model_families():
    assert len(COVERED) >= 95


@pytest.mark.parametrize("model_type", COVERED)
def test_parameter_names_and_shapes_of_random_config_match_transformers(model_type):
    for seed in range(2):
        config = config_of_sizes(model_type, seed)
        name = class_name(model_type)
        with torch.device("meta"):
            model = getattr(transformers, name)._from_config(config)
        fields = {**config.to_dict(), "model_type": model_type, "architectures": None}
        architecture = build_architecture(fields)
        real = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
        assert {t.name: t.shape for t in architecture.tensors if t.is_parameter} == real
        assert architecture.parameters == sum(p.numel() for p in model.parameters())
        if model_type not in STORES_OTHERS:
            stored = {t.name for t in architecture.tensors if t.stored and not t.is_parameter}
            assert stored == set(model.state_dict()) - set(real)


def test_default_sizes_equal_those_of_transformers_config_classes():
    """planner/families/config_defaults.json, for fields that a config.json leaves out."""
    stored = json.loads((Path(registry.__file__).parent / "config_defaults.json").read_text())["defaults"]
    assert len(stored) > 90
    for model_type, sizes in stored.items():
        config = CONFIG_MAPPING[model_type]()
        assert sizes == {name: getattr(config, name) for name in sizes}, model_type


def test_sizes_missing_in_a_text_config_are_the_defaults_of_its_transformers_config_class():
    """The text_config of llava-v1.6-mistral-7b has neither hidden_size nor a number of layers."""
    text = {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_key_value_heads": 8, "sliding_window": None, "vocab_size": 32064,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
    }  # fmt: skip
    config = {
        "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next", "text_config": text,
        "vision_config": vision, "vision_feature_layer": -2, "image_grid_pinpoints": [[336, 672], [672, 336]],
    }  # fmt: skip
    found = build_architecture(config)
    assert (found.hidden_size, found.layers, found.heads, found.kv_heads) == (4096, 32, 32, 8)
    assert "hidden_size 4,096 of mistral" in found.assumed


@pytest.mark.parametrize("model_type", ["ernie4_5", "ernie4_5_moe"])
def test_missing_max_position_embeddings_gets_the_default_of_the_transformers_config_class(model_type):
    config = CONFIG_MAPPING[model_type]().to_dict()
    config.pop("max_position_embeddings")
    assert build_architecture(config).max_model_len == 131072


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [("phi", "rotary_dim", 32), ("phi", "activation_function", "gelu_new"),
     ("starcoder2", "activation_function", "gelu")],
)  # fmt: skip
def test_config_field_that_only_the_models_original_code_reads_is_accepted(model_type, field, value):
    config = CONFIG_MAPPING[model_type]().to_dict()
    assert build_architecture({**config, field: value}).parameters == build_architecture(config).parameters
