"""Models that read pictures, as their files have them, and what is planned of their profile under vLLM."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tonnage.planner.families.registry import architecture_of
from tonnage.planner.planning.deployment import complete, deployment_of

QWEN2 = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12_845_056,
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
}  # fmt: skip
THINKERS = {
    "Qwen/Qwen2.5-Omni-7B": {
        "model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "enable_audio_output": True, "thinker_config": {
            "text_config": {
                "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
                "max_position_embeddings": 32_768,
            },
            "vision_config": {
                "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3,
                "out_hidden_size": 3584,
            },
            "audio_config": {"d_model": 1280, "encoder_layers": 32, "output_dim": 3584, "num_mel_bins": 128},
        },
    },
    "Qwen/Qwen3-Omni-30B-A3B": {
        "model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "thinker_config": {
            "text_config": {
                "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 48, "head_dim": 128,
                "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 152_064, "num_experts": 128,
                "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 65_536,
            },
            "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 2048},
            "audio_config": {"d_model": 1280, "encoder_layers": 32, "output_dim": 2048},
        },
    },
}  # fmt: skip
GEMMA4_SOUND = {
    "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma4_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
        "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 18, "sliding_window": 512, "max_position_embeddings": 131_072,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    },
    "vision_config": {"model_type": "gemma4_vision", "use_clipped_linears": True},
    "audio_config": {"model_type": "gemma4_audio"}, "vision_soft_tokens_per_image": 280,
}  # fmt: skip


MISTRAL = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131_072,
    "max_position_embeddings": 131_072, "sliding_window": None,
}  # fmt: skip
CLIP_LARGE = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
SEES = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_channels": 3, "image_size": 1024, "patch_size": 16,
}  # fmt: skip
MADE = {
    "mistralai/Mistral-Small-3.1-24B": {
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10, "text_config": MISTRAL,
        "vision_config": {**SEES, "image_size": 1540, "patch_size": 14},
        "spatial_merge_size": 2, "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    "mistral-community/pixtral-12b": {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 10,
        "text_config": {**MISTRAL, "intermediate_size": 14336}, "vision_config": SEES,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "dtype": "bfloat16",
    },
    "llava-hf/llava-v1.6-mistral-7b-hf": {
        "model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"],
        "text_config": {
            **MISTRAL, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "vocab_size": 32_064, "max_position_embeddings": 32_768,
        },
        "vision_config": CLIP_LARGE, "image_token_index": 32_000, "dtype": "bfloat16",
    },
}  # fmt: skip


def configured(model: str, config_of) -> dict:
    return MADE.get(model) or config_of(model)


def needs_torchvision() -> None:
    if find_spec("torchvision") is None:
        pytest.skip("vLLM asks torchvision for its processors, which the tests' environment does without")


def planned(config: dict, flags: dict):
    """Return the architecture and the completed deployment for a config with the given vLLM flags."""
    given = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in flags.items()}
    asked = deployment_of({"engine": "vllm", "engine_version": "0.32.0", "gpu": "h100-80g", **given})
    architecture = architecture_of(config)
    chosen = complete(asked, architecture, "bfloat16")
    return architecture, chosen
