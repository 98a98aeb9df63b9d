"""Families that the installed transformers does not have: against stored answers of transformers 5.23.0.

``make test-oracles`` unpacks that version beside the environment and asks it again (TRANSFORMERS_NEW names the
folder). Small configs are compared name by name, cache layer by cache layer; the classes' own defaults, which
are the sizes of the published model, by their number of parameters.
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
from tonnage.planner.model.architecture import Architecture, CacheLayer

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
}  # fmt: skip
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
    "architectures": ("bailing_hybrid", {"architectures": ["BailingMoeV2_5ForCausalLM"]}),
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return {**SMALL[name][1], "model_type": name.partition("-")[0], "architectures": [SMALL[name][0]]}


def asked() -> list[dict[str, Any]]:
    whole = [{"class": SMALL[name][0], "config": config_of(name), "whole": True} for name in SMALL]
    classes = {name.partition("-")[0]: SMALL[name][0] for name in SMALL}
    return whole + [
        {"class": made, "config": {"model_type": name}, "whole": False} for name, made in classes.items()
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
def test_tensors_and_cache_are_those_of_transformers(name: str, says: dict[str, dict[str, Any]]) -> None:
    real, ours = says[name], build_architecture(config_of(name))
    assert {t.name: list(t.shape) for t in ours.tensors if t.is_parameter} == real["shapes"]
    assert ours.parameters == real["parameters"]
    buffers = {t.name: list(t.shape) for t in ours.tensors if not t.is_parameter}
    assert buffers == {key: shape[:-1] for key, shape in real["buffers"].items()}
    assert sorted(t.name for t in ours.tensors if t.stored and not t.is_parameter) == real["stored"]
    wide = {t.name for t in ours.tensors if t.is_parameter and t.dtype == "float32"}
    assert wide == {n for n in real["shapes"] if any(piece in n for piece in real["float32"])}
    assert [kept(ours, layer) for layer in ours.cache_layers] == [held(*layer) for layer in real["cache"]]


def kept(model: Architecture, layer: CacheLayer) -> tuple[Any, ...]:
    """What the planner says of a layer, as :func:`held` says it of transformers'."""
    if layer.kind == "state":
        # of a convolution transformers keeps the newest input too, engines the ones before it
        return ("state", *(
            (s.shape[1], s.shape[0] + 1) if s.name == "conv" else (*s.shape, s.dtype) for s in layer.states
        ))  # fmt: skip
    if layer.kind == "mla":
        return ("full", None, 1, layer.head_size)
    return (layer.kind, layer.window, layer.kv_heads, 2 * layer.head_size)


def held(kind: str, window: int | None, tensors: dict[str, list[list[Any]]]) -> tuple[Any, ...]:
    if kind == "LinearAttentionLayer":
        conv = [tuple(shape[1:-1]) for shape in tensors["conv_states"]]
        return ("state", *conv, *(tuple(shape[1:]) for shape in tensors.get("recurrent_states", [])))
    keys, values = tensors["keys"][0], tensors["values"][0]
    return ("full" if window is None else "sliding", window, keys[1], keys[3] + values[3])


@pytest.mark.parametrize("name", dict.fromkeys(name.partition("-")[0] for name in SMALL))
def test_the_classes_own_sizes_give_as_many_parameters(name: str, says: dict[str, dict[str, Any]]) -> None:
    stored = says[f"{name}-default"]
    assert build_architecture(stored["config"]).parameters == stored["parameters"]


@pytest.mark.parametrize("field", REFUSED)
def test_what_transformers_does_not_build_is_refused_by_name(field: str) -> None:
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
def test_files_of_the_first_class_say_the_same(name: str, class_name: str, change: dict[str, Any]) -> None:
    """Fields and class of the code that the models were first published with."""
    config = config_of(name)
    first = build_architecture({**config, **change, "architectures": [class_name]})
    assert first.tensors == build_architecture(config).tensors


def test_a_type_that_nobody_knows_is_named() -> None:
    with pytest.raises(UnsupportedArchitecture, match="brand_new"):
        build_architecture({"model_type": "brand_new"})
