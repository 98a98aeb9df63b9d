"""Tests of families that the installed transformers lacks, against stored answers of transformers 5.23.0.

``make test-oracles`` unpacks that version beside the environment and computes them again (TRANSFORMERS_NEW
names the folder). Small configs are compared tensor by tensor and cache layer by cache layer. The classes'
default configs, which have the published sizes, are compared by parameter count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle

from tonnage.planner.errors import TonnageError, UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.architecture import CacheLayer

pytestmark = pytest.mark.oracle

CHILD = Path(__file__).with_name("transformers_child.py")
ORACLE = Oracle("families_transformers", "torch", transformers="5.23.0")

_SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {
    **_SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "sliding_window": 5,
}  # fmt: skip
_LING = {
    **_SMALL, "num_hidden_layers": 6, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "n_group": 2, "topk_group": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24,
}  # fmt: skip
_TOWER = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "patch_size": 8,
}  # fmt: skip
_MOLMO: dict[str, Any] = {
    "vision_config": {**_TOWER, "num_key_value_heads": 4, "head_dim": 16, "image_size": [64, 48]},
    "adapter_config": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
        "intermediate_size": 96, "text_hidden_size": 128, "vision_feature_layer": [2, 1],
    },
}  # fmt: skip
_LATER = {key: value for key, value in _TOWER.items() if key != "patch_size"}
_ADAPTER = {k: v for k, v in _MOLMO["adapter_config"].items() if k != "vision_feature_layer"}
_LFM = {**_SMALL, "model_type": "lfm3", "sliding_window": 5, "num_hidden_layers": 5}
_GRANITE = {key: value for key, value in _SMALL.items() if key != "head_dim"}
_DELTA = {
    **_SMALL, "model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_hidden_layers": 4,
}  # fmt: skip
_LARGE = {
    **{key: value for key, value in _SMALL.items() if key != "head_dim"}, "model_type": "mistral_large4_text",
    "num_hidden_layers": 4, "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4,
}  # fmt: skip
_BIASED = {"attention_bias": True, "tie_word_embeddings": True}
# model_type (-variant) -> (class, config)
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm3": ("LlamaForCausalLM", _SMALL),
    "internlm3-biased": ("LlamaForCausalLM", {**_SMALL, "qkv_bias": True, "bias": True}),
    "iquestcoder": ("LlamaForCausalLM", {**_SMALL, **_BIASED, "mlp_bias": True, "head_dim": 24}),
    "kolibri1": (
        "Kolibri1ForCausalLM", {**_MOE, "num_hidden_layers": 5, "shared_expert_intermediate_size": 40},
    ),
    "kolibri1-listed": (
        "Kolibri1ForCausalLM",
        {**_MOE, "layer_types": ["full_attention", "sliding_attention", "full_attention"], "head_dim": 24,
         "tie_word_embeddings": True, "shared_expert_intermediate_size": 72},
    ),
    "flint": ("FlintForCausalLM", {**_MOE, "num_hidden_layers": 8, "shared_expert_intermediate_size": 40}),
    "flint-other": (
        "FlintForCausalLM",
        {**_MOE, **_BIASED, "num_hidden_layers": 4, "mlp_only_layers": [], "decoder_sparse_step": 2,
         "shared_expert_intermediate_size": 40},
    ),
    "beam": ("BeamForCausalLM", {**_MOE, "num_hidden_layers": 7, "n_group": 2, "topk_group": 1}),
    "beam-other": (
        "BeamForCausalLM",
        {**_MOE, **_BIASED, "n_group": 2, "topk_group": 1, "mlp_layer_types": ["sparse", "dense", "sparse"],
         "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                             for kind in ("full_attention", "sliding_attention")}},
    ),
    "lfm3": ("Lfm3ForCausalLM", {**_SMALL, "num_hidden_layers": 7, "sliding_window": 5}),
    "lfm3-plain": (
        "Lfm3ForCausalLM",
        {**_SMALL, "attention_bias": True, "conv_bias": True, "use_sandwich_norm": False,
         "use_attention_gate": False, "conv_L_cache": 4, "tie_word_embeddings": False,
         "layer_types": ["full_attention", "conv", "conv"]},
    ),
    "bailing_hybrid": ("BailingHybridForCausalLM", _LING),
    "bailing_hybrid-other": (
        "BailingHybridForCausalLM",
        {**_LING, "num_hidden_layers": 4, "layer_group_size": 2, "attention_bias": True, "n_shared_experts": 2,
         "first_k_dense_replace": 0, "short_conv_kernel_size": 3, "head_dim": 24},
    ),
    "bailing_hybrid-written": (
        "BailingHybridForCausalLM",
        {**_LING, "head_dim": 8, "linear_head_dim": 24, "linear_num_heads": 4, "linear_conv_kernel_dim": 5},
    ),
    "molmo2": ("Molmo2ForConditionalGeneration", {"text_config": _SMALL, **_MOLMO}),
    "molmo2-olmo": (
        "Molmo2ForConditionalGeneration",
        {**_MOLMO,
         "text_config": {**_SMALL, "qk_norm_type": "olmo", "qkv_bias": True, "additional_vocab_size": 0},
         "vision_config": {**_LATER, "num_key_value_heads": 2, "head_dim": 10, "image_num_pos": 9,
                           "attention_bias": False, "image_patch_size": 7},
         "adapter_config": {**_ADAPTER, "vit_layers": [1], "mlp_bias": True}},
    ),
    "lfm3_vl": (
        "Lfm3VlForConditionalGeneration",
        {"text_config": _LFM, "vision_config": {**_TOWER, "num_key_value_heads": 2},
         "projector_hidden_size": 72},
    ),
    "lfm3_vl-other": (
        "Lfm3VlForConditionalGeneration",
        {"text_config": {**_LFM, "tie_word_embeddings": False}, "projector_bias": False,
         "tie_word_embeddings": False,
         "vision_config": {**_TOWER, "num_key_value_heads": 4, "spatial_merge_size": 3, "conv_kernel_size": 5,
                           "layer_types": ["full_attention", "conv", "conv"]}},
    ),
    "granite_docling": (
        "GraniteDoclingForConditionalGeneration",
        {"text_config": _GRANITE, "vision_config": {**_TOWER, "image_size": 64, "out_hidden_size": 128}},
    ),
    "granite_docling-routed": (
        "GraniteDoclingForConditionalGeneration",
        {"text_config": {**_GRANITE, "mlp_bias": True}, "density_router_hidden_size": 24,
         "vision_config": {**_TOWER, "image_size": 64, "out_hidden_size": 128, "scale_factor": 2,
                           "deepstack_visual_indexes": [1]}},
    ),
    "granite_docling-coarse": (
        "GraniteDoclingForConditionalGeneration",
        {"text_config": {**_GRANITE, "tie_word_embeddings": False}, "tie_word_embeddings": False,
         "vision_config": {**_TOWER, "image_size": 64, "out_hidden_size": 128, "use_fine_route": False}},
    ),
    "minicpm_ocr": ("MiniCPMOcrForConditionalGeneration", {"text_config": _DELTA, "vision_config": _TOWER}),
    "minicpm_ocr-twice": (
        "MiniCPMOcrForConditionalGeneration",
        {"text_config": _DELTA, "merger_times": 2, "vision_config": {**_TOWER, "window_kernel_size": [1, 3]}},
    ),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration",
        {"text_config": _LARGE, "vision_config": {**_TOWER, "image_size": 64, "model_type": "pixtral"}},
    ),
    "mistral_large4-shared": (
        "MistralLarge4ForConditionalGeneration",
        {"multimodal_projector_bias": True, "spatial_merge_size": 3,
         "text_config": {**_LARGE, "no_rope_layers": [0, 1, 1, 1], "kv_source_layers": [0, 1, 1, 3],
                         "index_topk_pattern": "FFSF", "attention_bias": True, "first_k_dense_replace": 2,
                         "n_shared_experts": 2},
         "vision_config": {**_TOWER, "image_size": 64, "model_type": "pixtral"}},
    ),
}  # fmt: skip
# Configs whose class defaults contradict each other
_FITTING = {"molmo2": {"adapter_config": {"text_hidden_size": 4096}}}
# Reasons to refuse: what transformers refuses too, or builds only one form of
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "qkv_bias": ("internlm3", {"qkv_bias": True, "bias": False}),
    "clip_qkv": ("iquestcoder", {"clip_qkv": 8.0}),
    "use_sliding_window": ("iquestcoder", {"use_sliding_window": True, "sliding_window": 64}),
    "sliding_window": ("kolibri1", {"sliding_window": None}),
    "rope_parameters": ("beam", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "layer_types": ("lfm3", {"layer_types": ["conv"] * 6 + ["mamba"]}),
    "no_kda_lora": ("bailing_hybrid", {"no_kda_lora": False}),
    "gated_attention_proj_granularity_type": (
        "bailing_hybrid", {"gated_attention_proj_granularity_type": "element_wise"},
    ),
    "moe_shared_expert_intermediate_size": ("bailing_hybrid", {"moe_shared_expert_intermediate_size": 96}),
    "layer_group_size": ("bailing_hybrid", {"layer_group_size": 4}),
    "q_lora_rank": ("mistral_large4", {"text_config": {**_LARGE, "q_lora_rank": 32}}),
    "kv_source_layers": ("mistral_large4", {"text_config": {**_LARGE, "kv_source_layers": [0, 0, 2, 3]}}),
    "text_config.model_type": ("lfm3_vl", {"text_config": {**_LFM, "model_type": "lfm2"}}),
    "merge_kernel_size": ("minicpm_ocr", {"merge_kernel_size": [4, 4]}),
    "tie_word_embeddings": ("molmo2", {"tie_word_embeddings": True}),
    "adapter_config.text_hidden_size": (
        "molmo2", {"adapter_config": {**_MOLMO["adapter_config"], "text_hidden_size": 64}},
    ),
    "architectures": ("bailing_hybrid", {"architectures": ["BailingMoeV2_5ForCausalLM"]}),
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return {**SMALL[name][1], "model_type": name.partition("-")[0], "architectures": [SMALL[name][0]]}


def asked() -> list[dict[str, Any]]:
    whole = [{"class": SMALL[name][0], "config": config_of(name), "whole": True} for name in SMALL]
    classes = {name.partition("-")[0]: SMALL[name][0] for name in SMALL}
    return whole + [
        {"class": made, "config": {"model_type": name, **_FITTING.get(name, {})}, "whole": False}
        for name, made in classes.items()
    ]


def ask() -> list[dict[str, Any]]:
    folder = os.environ.get("TRANSFORMERS_NEW")
    assert folder, "TRANSFORMERS_NEW names no folder with transformers 5.23.0: make test-oracles makes one"
    done = subprocess.run(
        [sys.executable, str(CHILD)], input=json.dumps(asked()), capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": folder, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(asked()), done.stderr[-2000:]
    return found


@pytest.fixture(scope="module")
def says() -> dict[str, dict[str, Any]]:
    found: list[dict[str, Any]] = ORACLE.says("all", asked(), ask)
    names = [*SMALL, *(f"{name}-default" for name in dict.fromkeys(n.partition("-")[0] for n in SMALL))]
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_tensors_and_kv_cache_of_new_model_families_equal_transformers(
    name: str, says: dict[str, dict[str, Any]]
) -> None:
    real, ours = says[name], build_architecture(config_of(name))
    assert {t.name: list(t.shape) for t in ours.tensors if t.is_parameter} == real["shapes"]
    assert ours.parameters == real["parameters"]
    buffers = {t.name: list(t.shape) for t in ours.tensors if not t.is_parameter}
    assert buffers == {key: shape[:-1] for key, shape in real["buffers"].items()}
    assert sorted(t.name for t in ours.tensors if t.stored and not t.is_parameter) == real["stored"]
    wide = {t.name for t in ours.tensors if t.is_parameter and t.dtype == "float32"}
    assert wide == {n for n in real["shapes"] if any(piece in n for piece in real["float32"])}
    assert [kept(layer) for layer in ours.cache_layers] == [held(*layer) for layer in real["cache"]]
    for layer, (_, _, tensors) in zip(ours.cache_layers, real["cache"], strict=True):
        for state in layer.states:  # a dtype of its own where the planner says so
            assert state.dtype in (None, tensors[f"{state.name}_states"][0][-1])


def kept(layer: CacheLayer) -> tuple[Any, ...]:
    """Return the planned cache of a layer in the form that ``held`` returns for transformers."""
    if layer.shares is not None:
        return ("shared",)
    if layer.kind == "state":
        # transformers' convolution state includes the newest input, the engines' does not
        conv = [[s.shape[1], s.shape[0] + 1] for s in layer.states if s.name == "conv"]
        return ("state", conv, [[*sorted(s.shape)] for s in layer.states if s.name == "recurrent"])
    if layer.kind == "mla":
        return ("full", None, 1, layer.head_size, layer.index_size)
    return (layer.kind, layer.window, layer.kv_heads, 2 * layer.head_size, layer.index_size)


def held(kind: str, window: int | None, tensors: dict[str, list[list[Any]]]) -> tuple[Any, ...]:
    if kind == "DummyLayer":
        return ("shared",)
    if kind == "LinearAttentionLayer":
        states = (
            [shape[1:-1] for shape in tensors.get(f"{name}_states", [])] for name in ("conv", "recurrent")
        )
        conv, recurrent = states
        return ("state", conv, [sorted(shape) for shape in recurrent])
    keys, values = tensors["keys"][0], tensors["values"][0]
    index = tensors.get("indexer_keys", [[1, 8, 0, ""]])[0][2]
    return ("full" if window is None else "sliding", window, keys[1], keys[3] + values[3], index)


@pytest.mark.parametrize("name", dict.fromkeys(name.partition("-")[0] for name in SMALL))
def test_default_config_parameter_count_matches_transformers(
    name: str, says: dict[str, dict[str, Any]]
) -> None:
    stored = says[f"{name}-default"]
    assert build_architecture(stored["config"]).parameters == stored["parameters"]


@pytest.mark.parametrize("field", REFUSED)
def test_config_that_transformers_cannot_build_is_rejected(field: str) -> None:
    name, change = REFUSED[field]
    with pytest.raises(TonnageError) as caught:
        build_architecture({**config_of(name), **change})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "class_name", "change"),
    [
        ("internlm3", "InternLM3ForCausalLM", {"qkv_bias": False, "bias": False}),
        ("iquestcoder", "IQuestCoderForCausalLM", {"clip_qkv": None, "use_sliding_window": False}),
        (
            "bailing_hybrid", "BailingMoeV3ForCausalLM",
            {"no_kda_lora": True, "q_lora_rank": None, "gated_attention_proj_granularity_type": "head_wise",
             "use_qk_norm": True, "use_bias": False, "num_nextn_predict_layers": 1, "max_window_layers": 20,
             "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 48},
        ),
    ],
)  # fmt: skip
def test_config_with_the_fields_and_class_name_of_the_first_release_gives_the_same_tensors_as_today(
    name: str, class_name: str, change: dict[str, Any]
) -> None:
    """The config has the fields and class name of the code that the model was first published with."""
    config = config_of(name)
    first = build_architecture({**config, **change, "architectures": [class_name]})
    assert first.tensors == build_architecture(config).tensors


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("brand_new", "'brand_new' is not supported"), ("dots3_note", "latents of another width"),
     ("inkling2_text", "four convolution states"), ("pp_doclayout_v4", "generates no text")],
)  # fmt: skip
def test_error_for_an_unsupported_model_type_states_the_reason(model_type: str, why: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=why):
        build_architecture({"model_type": model_type})
