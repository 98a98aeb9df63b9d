"""Every supported decoder family, as a random model of a few layers, against transformers' own code.

Families with stricter tests in test_hf_runner.py are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import check_logits_in_parts, check_tokens_of_generate, tiny_plan, write_tiny
from transformers import AutoConfig

from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import TOLERANCE, self_check
from tonnage.server.engines.hf.model.support import served

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a family wants beside SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "ctrl": {},
    "cwm": {},
    "doge": {},
    "ernie4_5": {},
    "exaone4": {},
    "flex_olmo": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": {},
    "granite": {},
    "helium": {},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hyperclovax": {},
    "jais2": {},
    "ministral": {"head_dim": 16, "sliding_window": 24},
    "ministral3": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
    "vaultgemma": {"query_pre_attn_scalar": 16},
}
ELSEWHERE = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_bigcode",
}  # fmt: skip


def tiny(folder: Path, model_type: str) -> Path:
    known = AutoConfig.for_model(model_type)
    settings = {name: value for name, value in SIZES.items() if getattr(known, name, None) is not None}
    return write_tiny(folder, AutoConfig.for_model(model_type, **{**settings, **FAMILIES[model_type]}))


def test_every_supported_model_family_has_a_test_of_equal_tokens() -> None:
    assert FAMILIES.keys() | ELSEWHERE == set(served())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_of_each_model_family_equal_transformers_and_weights_equal_the_plan(
    model_type: str, tmp_path: Path
) -> None:
    folder = tiny(tmp_path, model_type)
    runner = ModelRunner(tiny_plan(folder))
    assert self_check(runner) < 1e-4
    check_logits_in_parts(runner)
    check_tokens_of_generate(runner, folder, (1, 17, 33, 120), 8)
    served = ModelRunner(tiny_plan(folder, "bfloat16"))  # through the kernels, on a CPU that has them
    assert served.weights_bytes == served.plan.rank.weights_bytes
    # Random weights of 0.15 amplify rounding more than a trained model does.
    assert self_check(served) < TOLERANCE[torch.bfloat16]
