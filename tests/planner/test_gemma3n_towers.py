"""Tests of Gemma 3n's towers: audio and projections against transformers, vision against timm's count.

timm is not installed here, because its wheel requires torchvision.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from transformers.models.gemma3n import modeling_gemma3n as modeling

from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture

# timm 1.0.31, sum(p.numel() for p in timm.create_model("mobilenetv5_300m_enc").parameters()), and how many
TIMM_PARAMETERS, TIMM_TENSORS = 294_126_912, 548


def config_of(**audio):
    config = transformers.Gemma3nConfig(audio_config=audio)
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": None}


@pytest.mark.parametrize(
    "audio",
    [
        {},
        {"hidden_size": 64, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 3, "input_feat_size": 41,
         "conf_conv_kernel_size": 7, "conf_attention_chunk_size": 6, "conf_attention_context_left": 5,
         "conf_attention_context_right": 2, "vocab_size": 48},
    ],
)  # fmt: skip
def test_planned_gemma3n_audio_tower_and_projections_match_transformers(audio):
    config = config_of(**audio)
    architecture = build_architecture(config)
    real = transformers.Gemma3nConfig(**config)
    with torch.device("meta"):
        modules = {
            "model.audio_tower": modeling.Gemma3nAudioEncoder._from_config(
                real.audio_config, dtype=torch.bfloat16
            ),
            "model.embed_audio": modeling.Gemma3nMultimodalEmbedder(real.audio_config, real.text_config),
            "model.embed_vision": modeling.Gemma3nMultimodalEmbedder(real.vision_config, real.text_config),
        }
    for at, module in modules.items():
        ours = [t for t in architecture.tensors if t.name.startswith(f"{at}.")]
        parameters = {f"{at}.{n}": tuple(p.shape) for n, p in module.named_parameters()}
        assert {t.name: t.shape for t in ours if t.is_parameter} == parameters
        buffers = {f"{at}.{n}": (tuple(b.shape), b.element_size()) for n, b in module.named_buffers()}
        sizes = {None: 2, "bool": 1, "float32": 4}
        assert {t.name: (t.shape, sizes[t.dtype]) for t in ours if not t.is_parameter} == buffers


def test_gemma3n_vision_tower_parameter_count_equals_timm():
    architecture = build_architecture(config_of())
    assert architecture.tower_parameters["vision"] == TIMM_PARAMETERS
    names = [t.name for t in architecture.tensors if t.name.startswith("model.vision_tower.")]
    assert len(set(names)) == len(names) == TIMM_TENSORS
    assert architecture.class_name == "Gemma3nForConditionalGeneration"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("vision_config", {"architecture": "mobilenetv5_base"}),
        ("vision_config", {"model_args": {"width": 2}}),
        ("audio_config", {"conf_num_attention_heads": 7}),
        ("audio_config", {"sscp_conv_channel_size": [64, 32]}),
    ],
)
def test_gemma3n_config_with_an_unsupported_vision_or_audio_tower_is_rejected(part, change):
    config = config_of()
    with pytest.raises(TonnageError) as caught:
        build_architecture(config | {part: config[part] | change})
    assert caught.value.field.startswith(part)
