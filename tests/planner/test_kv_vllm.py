"""The plan against vLLM's own functions, for random hybrids of full and sliding layers."""

from __future__ import annotations

import random

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource

BLOCK, HEADS, SIZE, POOL = 32, 2, 64, 1 << 30


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    """Return a real VllmConfig for a small Llama on the CPU platform; tests set its lengths."""
    import transformers
    from vllm.engine.arg_utils import AsyncEngineArgs

    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1 << 20, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    arguments = AsyncEngineArgs(
        str(folder), dtype="bfloat16", block_size=BLOCK, max_model_len=4096, skip_tokenizer_init=True,
        enforce_eager=True, kv_cache_memory_bytes=1 << 28,
    )  # fmt: skip
    config = arguments.create_engine_config()
    # the CPU backend's only layout (v1/attention/backends/cpu_attn.py); the engine sets it at start
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def config_of(pattern: str, window: int) -> dict[str, object]:
    """Return the config of a model whose layers are full (f) or sliding (s) as in ``pattern``."""
    return {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 128, "hidden_size": 128,
        "intermediate_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": 1 << 20, "num_hidden_layers": len(pattern), "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": ["full_attention" if c == "f" else "sliding_attention" for c in pattern],
    }  # fmt: skip


def cases():
    rng = random.Random(2)
    for _ in range(60):
        full, sliding = rng.randint(1, 12), rng.randint(1, 30)
        order = ["f"] * full + ["s"] * sliding
        if rng.random() < 0.7:
            rng.shuffle(order)
        yield "".join(order), rng.randint(2, 3000), rng.randint(1, 9000), rng.choice([64, 512, 2048])


@pytest.mark.parametrize(("pattern", "window", "length", "budget"), list(cases()))
def test_planned_kv_groups_and_concurrency_equal_vllms_functions(pattern, window, length, budget, vllm_config):
    import torch
    from vllm.v1.core import kv_cache_utils as theirs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    vllm_config.model_config.max_model_len = length
    vllm_config.scheduler_config.max_num_batched_tokens = budget
    shape = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.bfloat16}
    specs = {
        str(i): FullAttentionSpec(**shape) if c == "f" else SlidingWindowSpec(**shape, sliding_window=window)
        for i, c in enumerate(pattern)
    }
    groups = theirs.get_kv_cache_groups(vllm_config, specs)
    config = theirs.get_kv_cache_config_from_groups(vllm_config, groups, POOL)
    tokens, concurrency = theirs.get_kv_cache_capacity(vllm_config, config)

    planned = plan_source(
        ModelSource("m", "m", config_of(pattern, window), "folder"),
        Deployment(
            engine="vllm", engine_version="0.32.0", dtype="bfloat16", block_size=BLOCK, max_model_len=length,
            max_num_batched_tokens=budget, max_num_seqs=1, kv_cache_memory_bytes=POOL, device_memory=1 << 40,
        ),
    ).kv_cache  # fmt: skip
    assert [g.layers for g in planned.layout.groups] == [tuple(map(int, g.layer_names)) for g in groups]
    assert planned.num_blocks == config.num_blocks
    assert (planned.tokens, planned.max_concurrency) == (tokens, concurrency)
