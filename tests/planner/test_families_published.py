"""Tests of families published with their own code, against the parameters of their safetensors headers.

The counts are those of the hub's safetensors metadata (GitHub floschne/gimmick, src/gimmick/models).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource

DATA = Path(__file__).parent.parent / "data"
GPU = Deployment(engine="vllm", engine_version="0.33.0", device="cuda", gpu="a100-80g")


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "configs" / f"{name}.json").read_text())
    return found


def row(name: str) -> dict[str, Any]:
    """Return the config of a class in tests/data/registry/configs.jsonl."""
    rows = map(json.loads, (DATA / "registry" / "configs.jsonl").read_text().splitlines())
    return next(config for config in rows if config["architectures"] == [name])


INTERNLM = stored("internlm__internlm2_5-7b-chat")
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
LARGE = {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 48}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (INTERNLM, 7_737_708_544),
        ({**INTERNLM, **SMALL}, 1_889_110_016),
        ({**INTERNLM, **LARGE}, 19_861_149_696),
        (row("InternVLChatModel"), 8_075_365_376),
        (row("MiniCPMV"), 8_099_175_152),
        (row("Phi3VForCausalLM"), 4_146_621_440),
    ],
)
def test_planned_parameters_equal_published_safetensors_headers(config, parameters):
    assert build_architecture(config).parameters == parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-ai__DeepSeek-V3", 37),  # arXiv 2412.19437, abstract
        ("mistralai__Mixtral-8x7B-v0.1", 13),  # arXiv 2401.04088, abstract
        ("Qwen__Qwen3-30B-A3B", 3.3),  # the model's card
        ("meta-llama__Llama-4-Scout-17B-16E-Instruct", 17),  # the model's card
        ("meta-llama__Meta-Llama-3.1-8B", 8.03),
    ],
)
def test_planned_active_parameters_are_within_4_percent_of_published_ones(name, billions):
    assert build_architecture(stored(name)).active_parameters == pytest.approx(billions * 1e9, rel=0.04)


def test_internvl_with_the_6b_vision_tower_has_the_published_parameter_count():
    """InternVL2.5-26B: InternViT-6B, whose norms have no bias and whose Q and K are normed."""
    tower = {
        "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25,
        "norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False,
    }  # fmt: skip
    config = row("InternVLChatModel")
    text = {**config["llm_config"], **LARGE}
    whole = {**config, "vision_config": {**config["vision_config"], **tower}, "llm_config": text}
    assert build_architecture(whole).parameters == 25_514_186_112


def test_minicpm_v_config_of_an_unsupported_version_is_rejected():
    with pytest.raises(UnsupportedArchitecture, match="version"):
        build_architecture({**row("MiniCPMV"), "version": 2.0})


def test_published_and_transformers_config_of_qwen3_asr_have_equal_parameters():
    config = row("Qwen3ASRForConditionalGeneration")
    inside = {name: config[name] for name in ("audio_config", "text_config")}
    rope = {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_type": "default"}
    inside["text_config"] = {**inside["text_config"], "rope_parameters": None, "rope_scaling": rope}
    published = {"architectures": config["architectures"], "model_type": "qwen3_asr", "thinker_config": inside,
                 "support_languages": ["English"]}  # fmt: skip
    found = build_architecture(published)
    assert found.parameters == build_architecture(config).parameters
    assert found.rotary.mrope
    assert plan_source(ModelSource("a", "a", published, "folder"), GPU).fits


def test_qwen2_5_omni_config_with_enable_audio_output_is_planned():
    config = {**row("Qwen2_5OmniModel"), "enable_audio_output_": True}
    assert plan_source(ModelSource("a", "a", config, "folder"), GPU).fits


def masked(name: str, model_type: str) -> ModelSource:
    config = {
        "architectures": [name], "model_type": model_type, "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30592, "max_position_embeddings": 512,
        "pad_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    return ModelSource(name, name, config, "folder")


def test_bert_masked_lm_counts_an_untied_lm_head():
    """vLLM's BertForMaskedLM has a decoder matrix of its own; RobertaForMaskedLM is loaded without its head."""
    body = plan_source(masked("BertModel", "bert"), GPU).rank
    whole = plan_source(masked("BertForMaskedLM", "bert"), GPU).rank
    head = 2 * (768 * 30592 + 30592 + 768 * 768 + 768 + 2 * 768)
    assert abs(whole.weights_bytes - body.weights_bytes - head) < 2 << 20  # the allocator's rounding
    assert whole.activation_bytes > body.activation_bytes
    roberta = [plan_source(masked(name, "roberta"), GPU) for name in ("RobertaModel", "RobertaForMaskedLM")]
    assert roberta[0].rank.weights_bytes == roberta[1].rank.weights_bytes


def test_plan_does_not_fit_if_the_vllm_version_lacks_the_masked_lm_class():
    older = Deployment(engine="vllm", engine_version="0.20.0", device="cuda", gpu="a100-80g")
    assert not plan_source(masked("BertForMaskedLM", "bert"), older).fits


def test_rope_scaling_type_su_is_read_as_longrope():
    config = row("Phi3VForCausalLM")
    assert config["rope_scaling"]["type"] == "su"
    plan = plan_source(ModelSource("a", "a", config, "folder"), GPU)
    # CLIP's last layer and norm, which vLLM does not build
    unread = 2 * (4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024 + 2 * 1024)
    whole = 2 * build_architecture(config).parameters
    assert plan.rank.weights_bytes < whole - unread + 2 * 131072 * 96 * 2 + (2 << 20)
