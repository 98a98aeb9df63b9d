"""Tests of families without an adapter, which are planned from transformers' modules.

The same modules check Gemma's shared KV layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmark_modules import module

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.families.meta import meta_architecture
from tonnage.planner.families.registry import architecture_of, build_architecture
from tonnage.planner.planning.build import make_plan
from tonnage.planner.planning.weights import sum_weights
from tonnage.planner.quantization.scheme import Quantization

REFUSAL = UnsupportedArchitecture("not reached", field="model_type")
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "vocab_size": 128, "head_dim": 16, "max_position_embeddings": 512,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
# Families of transformers 5.19 that no adapter builds: rotary, sliding layers, tied and not, learned positions
UNKNOWN = {
    "nanochat": SMALL,
    "biogpt": {**SMALL, "num_key_value_heads": 4},
    "gpt_neox_japanese": SMALL,
    "xglm": {"d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96, "vocab_size": 128},
}
# Image-text models, which another auto class builds
SEES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14}  # fmt: skip


def beside(text: str, **given: Any) -> dict[str, Any]:
    return {"text_config": {"model_type": text, **SMALL}, **given}


TOWERS = {
    "aya_vision": beside("cohere2", vision_config={"model_type": "siglip_vision_model", **SEES}),
    "vipllava": beside("llama", vision_config={"model_type": "clip_vision_model", **SEES}),
}
GEMMA = {
    **SMALL, "num_hidden_layers": 8, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96, "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
SHARED = {
    "gemma3n_text": {**GEMMA, "laurel_rank": 4, "intermediate_size": [96] * 5 + [160] * 3},
    "gemma4_text": {**GEMMA, "global_head_dim": 32, "use_double_wide_mlp": True},
}


def auto_class(model_type: str) -> Any:
    name = "AutoModelForImageTextToText" if model_type in TOWERS else "AutoModelForCausalLM"
    return getattr(transformers, name)


def config_of(model_type: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers writes it for its text-generation class."""
    config = transformers.AutoConfig.for_model(model_type, **given)
    with torch.device("meta"):
        name = type(auto_class(model_type).from_config(config)).__name__
    config.architectures, config.dtype = [name], "bfloat16"
    return json.loads(config.to_json_string(use_diff=False))


def folder(config: dict[str, Any], tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("model_type", UNKNOWN | TOWERS)
def test_weights_and_kv_cache_planned_from_the_meta_device_equal_the_loaded_model(
    model_type, tmp_path, held_bytes
):
    """All storages are compared, and the KV cache after 40 tokens, which is more than the window."""
    config = config_of(model_type, (UNKNOWN | TOWERS)[model_type])
    architecture = architecture_of(config)
    assert architecture.via == "meta"
    real = transformers.AutoConfig.for_model(**config)
    auto_class(model_type).from_config(real, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    model = auto_class(model_type).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).eval()
    assert bool(architecture.tower_parameters) == (model_type in TOWERS)
    assert architecture.parameters == sum(p.numel() for p in model.parameters())
    plan = make_plan(folder(config, tmp_path), Deployment(device_memory=1 << 34))
    assert plan.model.via == "meta"
    assert any("via: meta" in note for note in plan.notes)
    assert plan.rank.weights_bytes == held_bytes(model)
    cache = transformers.DynamicCache(config=real)
    with torch.no_grad():
        model(torch.ones((1, 40), dtype=torch.long), past_key_values=cache, use_cache=True)
    kept = 0
    for layer in cache.layers:
        tokens = layer.keys.shape[2]  # of a sliding layer one less than the window, which counts the query
        kept += (layer.keys.nbytes + layer.values.nbytes) // tokens * (tokens + (tokens < 40))
    assert module("kv_bytes").by_plan(plan, 40) == kept


@pytest.mark.parametrize("model_type", SHARED)
def test_layers_that_share_the_kv_cache_of_earlier_layers_match_transformers_modules(model_type):
    """The adapter and transformers' modules have equal parameters and cache layers."""
    config = config_of(model_type, SHARED[model_type])
    ours, oracle = build_architecture(config), meta_architecture(config, REFUSAL)

    def shapes(architecture):
        return {t.name: (t.shape, t.tied_to) for t in architecture.tensors if t.is_parameter}

    assert shapes(ours) == shapes(oracle)
    own = [layer for layer in ours.cache_layers if layer.shares is None]
    assert [(layer.kind, layer.window, layer.kv_heads, layer.head_size) for layer in own] == [
        (layer.kind, layer.window, layer.kv_heads, layer.head_size) for layer in oracle.cache_layers
    ]
    assert {layer.layer: layer.shares for layer in ours.cache_layers if layer.shares is not None} == {
        5: 3, 6: 4, 7: 3,
    }  # fmt: skip
    flags = Deployment(dtype="bfloat16")
    assert sum_weights(ours, Quantization(), flags).total == sum_weights(oracle, Quantization(), flags).total


def test_model_that_transformers_cannot_build_is_rejected(tmp_path):
    config = config_of("nanochat", UNKNOWN["nanochat"])
    for changed, word in (
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"architectures": ["NanoChatForSequenceClassification"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"architectures": ["NanoChatForCausalLM"], "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "clip_vision_model"}, "clip_vision_model that generates text"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "nanochat"),
    ):
        with pytest.raises(UnsupportedArchitecture, match=word):
            architecture_of({**config, **changed})
    where = folder(config, tmp_path)
    with pytest.raises(DeploymentError, match="not known how the layers of nanochat are divided"):
        make_plan(where, Deployment(engine="vllm", device_memory=1 << 34, tensor_parallel_size=2))
    states = config_of("olmo_hybrid", SMALL)
    with pytest.raises(UnsupportedArchitecture, match="LinearAttentionLayer"):
        architecture_of(states)


def test_plan_of_an_unknown_family_without_transformers_names_the_package_to_install(tmp_path):
    """An installation without extras prints one line that names the package, and exits with 2."""
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'transformers' else found(name, *a)\n"
        "from tonnage.server.cli import main; sys.exit(main())"
    )
    where = folder(config_of("nanochat", UNKNOWN["nanochat"]), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", where], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'nanochat' is not supported" in done.stderr
    assert "tonnage[hf]" in done.stderr
