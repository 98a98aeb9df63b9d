"""Tests of the tensors that a rank holds: worked numbers, laws over all real configs, and named errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.planner.engines.parallel import Parallel, rank_architecture, stage_layers
from tonnage.planner.engines.pool import heads_per_rank
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.families.registry import build_architecture

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
SMALL = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

MODELS = [
    "meta-llama/Meta-Llama-3.1-8B", "Qwen/Qwen2.5-72B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b",
    "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-35B-A3B", "google/gemma-4-26B-A4B", "zai-org/GLM-4.7-FP8",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "XiaomiMiMo/MiMo-V2-Flash",
]  # fmt: skip


def shapes(architecture) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in architecture.tensors}


def test_llama_on_four_ranks_replicates_its_two_kv_heads():
    part = shapes(rank_architecture(build_architecture(SMALL), Parallel(tensor=4), 0))
    assert part["model.layers.0.self_attn.q_proj.weight"] == (16, 64)
    assert part["model.layers.0.self_attn.k_proj.weight"] == (8, 64)  # one head of eight
    assert part["model.layers.0.self_attn.o_proj.weight"] == (64, 16)
    assert part["model.layers.0.mlp.down_proj.weight"] == (64, 24)
    assert part["model.embed_tokens.weight"] == (32, 64)  # 100 rows padded to 128
    assert part["model.norm.weight"] == (64,)


@pytest.mark.parametrize(
    ("layers", "stages", "wanted"),
    [(8, 4, (2, 2, 2, 2)), (10, 4, (2, 3, 3, 2)), (61, 2, (31, 30)), (3, 3, (1, 1, 1))],
)
def test_planned_layers_of_each_pipeline_stage_equal_vllm(layers, stages, wanted):
    from vllm.distributed.utils import get_pp_indices

    assert stage_layers(layers, stages) == wanted
    real = [get_pp_indices(layers, rank, stages) for rank in range(stages)]
    assert tuple(end - begin for begin, end in real) == wanted


def test_tied_lm_head_is_copied_to_last_pipeline_stage():
    architecture = build_architecture({**SMALL, "tie_word_embeddings": True})
    first, last = (rank_architecture(architecture, Parallel(pipeline=2), stage) for stage in (0, 1))
    assert "model.embed_tokens.weight" in shapes(first)
    assert "lm_head.weight" not in shapes(first)
    assert next(t for t in last.tensors if t.role == "head").tied_to is None
    assert "model.embed_tokens.weight" not in shapes(last)


# Classes without a tensor-parallel form in any engine planned here
NEVER_DIVIDED = ("recurrent_gemma", "rwkv", "xlstm")


# vLLM builds these towers by transformers and replicates them on every rank (0.32.0, models/gemma3n_mm.py)
WHOLE_TOWERS = ("gemma3n",)


def test_each_of_two_tensor_parallel_ranks_holds_at_most_54_percent_of_the_model():
    """Only norms, routers and latents are replicated, so that no rank holds more than 54 %."""
    divided = 0
    for path in sorted(CONFIGS.glob("*__*.json")):
        config = json.loads(path.read_text())
        try:
            whole = build_architecture(config)
            part = rank_architecture(whole, Parallel(tensor=2), 0)
        except TonnageError:  # not a planned model, or heads that two ranks cannot divide
            continue
        if whole.model_type not in NEVER_DIVIDED:
            divided += 1
            twice = sum(part.tower_parameters.values()) if whole.model_type in WHOLE_TOWERS else 0
            assert part.parameters - twice < 0.54 * (whole.parameters - twice), path.name
    assert divided > 150


def test_mla_latents_are_planned_in_full_on_every_rank(config_of):
    """Kimi-K2.5 on 8 ranks has 68.626 KiB per token and rank, as published: 61 layers of 576 x 2 bytes."""
    architecture = build_architecture(config_of("nvidia/Kimi-K2.5-NVFP4"))
    part = rank_architecture(architecture, Parallel(tensor=8), 0)
    assert sum(layer.elements_per_entry * 2 for layer in part.cache_layers) == 70_272
    before, after = shapes(architecture), shapes(part)
    name = "model.language_model.layers.5.self_attn.kv_a_proj_with_mqa.weight"
    assert before[name] == after[name]
    name = "model.language_model.layers.5.self_attn.kv_b_proj.weight"
    assert before[name][0] == 8 * after[name][0]


def test_experts_are_divided_by_count_with_ep_and_by_width_with_tp(config_of):
    architecture = build_architecture(config_of("Qwen/Qwen3-30B-A3B"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert shapes(rank_architecture(architecture, Parallel(tensor=4), 0))[name] == (128, 384, 2048)
    assert shapes(rank_architecture(architecture, Parallel(tensor=4, expert=True), 0))[name] == (32, 1536, 2048)
    both = Parallel(tensor=2, data=4, expert=True)
    assert shapes(rank_architecture(architecture, both, 0))[name] == (16, 1536, 2048)


@pytest.mark.parametrize("model", MODELS)
def test_more_ranks_never_raise_bytes_per_rank(model, config_of):
    """All ranks together hold at least the whole model."""
    architecture = build_architecture(config_of(model))
    whole = architecture.parameters
    before = None
    for ranks in (1, 2, 4, 8):
        part = rank_architecture(architecture, Parallel(tensor=ranks), 0).parameters
        assert part * ranks >= whole
        assert before is None or part <= before
        before = part


@pytest.mark.parametrize("model", MODELS)
def test_pipeline_stages_hold_every_layer_once(model, config_of):
    architecture = build_architecture(config_of(model))
    for stages in (2, 3, 5):
        parts = [rank_architecture(architecture, Parallel(pipeline=stages), stage) for stage in range(stages)]
        held = [t.name for part in parts for t in part.tensors if t.role != "buffer"]
        assert sorted(held) == sorted(t.name for t in architecture.tensors if t.role != "buffer")
        assert sum((part.cache_layers for part in parts), ()) == architecture.cache_layers


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 6))
def test_kv_heads_of_all_ranks_together_cover_all_heads(kv_heads, power):
    ranks = 1 << power
    if kv_heads % ranks == 0 or ranks % kv_heads == 0:
        assert heads_per_rank(kv_heads, ranks) * ranks >= kv_heads


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 9), st.booleans())
def test_tensor_shapes_per_rank_are_positive_and_no_larger_than_the_full_shapes(kv_heads, ranks, layers, tied):
    config = {
        **SMALL,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }
    architecture = build_architecture(config)
    part = shapes(rank_architecture(architecture, Parallel(tensor=ranks), 0))
    for name, shape in shapes(architecture).items():
        assert all(
            0 < own <= whole or "embed" in name or "lm_head" in name
            for own, whole in zip(part[name], shape, strict=True)
        )


@pytest.mark.parametrize(
    ("change", "parallel", "match"),
    [
        ({}, Parallel(tensor=3), "3 does not divide 8 attention heads"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
            Parallel(tensor=6),
            "KV heads",
        ),
        ({"intermediate_size": 98}, Parallel(tensor=4), "4 does not divide model.layers.0.mlp"),
        ({}, Parallel(pipeline=4), "4 stages for 3 layers"),
    ],
)
def test_indivisible_parallel_size_is_rejected(change, parallel, match):
    with pytest.raises(DeploymentError, match=match):
        rank_architecture(build_architecture({**SMALL, **change}), parallel, 0)
