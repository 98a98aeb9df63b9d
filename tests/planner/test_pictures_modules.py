"""Tests that vision models have the parameters of transformers' modules (stored answers), also per rank."""

from __future__ import annotations

import json

import pytest
from oracle import Oracle
from pictures import GEMMA4_SOUND, MADE, THINKERS, planned

from tonnage.planner.engines.parallel import Parallel, rank_architecture
from tonnage.planner.engines.vllm.multimodal import profiled
from tonnage.planner.families.registry import architecture_of

COUNTS = Oracle("families_pictures", "transformers", "torch")


@pytest.mark.oracle
@pytest.mark.parametrize("model", MADE)
def test_planned_vision_model_parameters_equal_transformers(model):
    def ask():
        import torch
        import transformers

        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(MADE[model])))
        with torch.device("meta"):
            made = getattr(transformers, MADE[model]["architectures"][0])._from_config(config)
        first = {
            name: list(tensor.shape)
            for name, tensor in made.named_parameters()
            if ".layers." not in name or ".layers.0." in name
        }
        return first | {"parameters": sum(tensor.numel() for tensor in made.parameters())}

    said = COUNTS.says(model, MADE[model], ask)
    architecture = architecture_of(MADE[model])
    assert architecture.parameters == said.pop("parameters")
    shapes = {t.name: list(t.shape) for t in architecture.tensors if t.is_parameter and t.tied_to is None}
    assert {name: shapes.get(name) for name in said} == said


@pytest.mark.oracle
@pytest.mark.parametrize("model", THINKERS)
def test_plan_of_an_omni_model_includes_only_its_thinker(model):
    def ask():
        import torch
        import transformers

        whole = json.loads(json.dumps(THINKERS[model]))
        config = transformers.AutoConfig.for_model(**whole).thinker_config
        name = whole["architectures"][0].replace("ForConditional", "ThinkerForConditional")
        with torch.device("meta"):
            made = getattr(transformers, name)._from_config(config)
        return {
            part: sum(tensor.numel() for name, tensor in made.named_parameters() if name.startswith(prefix))
            for part, prefix in (("all", ""), ("audio", "audio_tower."), ("vision", "visual."))
        }

    architecture = architecture_of(THINKERS[model])
    said = COUNTS.says(model, THINKERS[model], ask)
    held = {
        part: sum(t.elements for t in architecture.tensors if t.is_parameter and t.name.startswith(prefix))
        for part, prefix in (("all", ""), ("audio", "audio_tower."), ("vision", "visual."))
    }
    assert held == said


def test_kimi_vl_parameters_include_tower_and_patch_embedding():
    """moonshotai/Kimi-VL-A3B has Moonlight's 16 B language model.

    The tower's sizes are the defaults of its class (transformers_utils/configs/moonvit.py in vLLM 0.32.0).
    """
    text = {
        "model_type": "deepseek_v3", "vocab_size": 163_840, "hidden_size": 2048, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "first_k_dense_replace": 1, "max_position_embeddings": 131_072,
        "tie_word_embeddings": False, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    config = {
        "model_type": "kimi_vl", "architectures": ["KimiVLForConditionalGeneration"], "text_config": text,
        "vision_config": {"model_type": "moonvit"}, "media_placeholder_token_id": 163_605,
    }  # fmt: skip
    architecture = architecture_of(config)
    hidden, inner, layers = 1152, 4304, 27
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 2 * 2 * hidden
    patches = hidden * 3 * 14 * 14 + hidden + 64 * 64 * hidden
    assert architecture.tower_parameters["vision"] == layers * layer + patches + 2 * hidden
    wide = 4 * hidden
    assert architecture.tower_parameters["projector"] == 2 * hidden + wide * (wide + 1) + 2048 * (wide + 1)
    assert 16.3e9 < architecture.parameters < 16.5e9
    found = profiled(*planned(config, {"max_model_len": 8192}))
    assert (found.tokens, found.patches, found.count, found.budget) == (33 * 33, 66 * 66, 7, 8192)


@pytest.mark.oracle
def test_planned_tensors_of_gemma_4_with_audio_equal_transformers():
    """The small models (E2B, E4B) have audio."""

    def ask():
        import torch
        import transformers

        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(GEMMA4_SOUND)))
        with torch.device("meta"):
            made = transformers.Gemma4ForConditionalGeneration._from_config(config)
        found = {name: list(tensor.shape) for name, tensor in made.named_parameters() if "audio" in name}
        found |= {name: list(tensor.shape) for name, tensor in made.named_buffers() if "audio" in name}
        return {
            name: shape for name, shape in found.items() if ".layers." not in name or ".layers.0." in name
        } | {"parameters": sum(tensor.numel() for tensor in made.parameters())}

    said = COUNTS.says("gemma4-sound", GEMMA4_SOUND, ask)
    architecture = architecture_of(GEMMA4_SOUND)
    assert architecture.parameters == said.pop("parameters")
    shapes = {t.name: list(t.shape) for t in architecture.tensors if "audio" in t.name and t.tied_to is None}
    assert {n: s for n, s in shapes.items() if ".layers." not in n or ".layers.0." in n} == said


def test_tensor_parallelism_divides_keys_and_values_of_a_vision_tower():
    """Keys and values have as many heads as queries (QKVParallelLinear in vLLM's towers)."""
    for model in MADE:
        whole = architecture_of(MADE[model])
        part = rank_architecture(whole, Parallel(tensor=4), 0)
        shapes = {tensor.name: tensor.shape for tensor in whole.tensors}
        for tensor in part.tensors:
            if tensor.role == "vision" and tensor.name.endswith(
                ("q_proj.weight", "k_proj.weight", "v_proj.weight")
            ):
                assert tensor.shape[0] * 4 == shapes[tensor.name][0], tensor.name
