"""Tests of KV arithmetic: worked numbers, and vLLM's answers for every real config of a supported family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines import hf
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.architecture import CacheLayer
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource

GIB = 1 << 30
VLLM = Deployment(
    engine="vllm", dtype="bfloat16", max_model_len=2048, kv_cache_memory_bytes=8 * GIB, device_memory=1 << 42
)


def source(config):
    """Return the model of a config without its weight quantization, as in the table."""
    return ModelSource("m", "m", {k: v for k, v in config.items() if k != "quantization_config"}, "folder")


def test_planned_kv_blocks_and_tokens_equal_vllm_for_published_configs(kv_row, config_of):
    plan = plan_source(source(config_of(kv_row["config"])), VLLM)
    cache = plan.kv_cache
    assert cache.num_blocks == int(kv_row["num_blocks"])
    assert cache.tokens == int(kv_row["tokens"])
    assert cache.max_concurrency == pytest.approx(float(kv_row["max_concurrency"]), rel=1e-12)
    kinds = {
        "FullAttentionSpec": "full", "SlidingWindowSpec": "sliding", "MLAAttentionSpec": "mla",
        "MambaSpec": "state",
    }  # fmt: skip
    expected = json.loads(kv_row["groups (spec, layers, block_size, page_bytes)"])
    assert [(g.kind, len(g.layers)) for g in cache.layout.groups] == [(kinds[e[0]], e[1]) for e in expected]
    for group, wanted in zip(cache.layout.groups, expected, strict=True):
        if group.kind != "state":
            assert (group.block_size or cache.layout.block_size) == wanted[2]
    assert cache.layout.bytes_per_block == expected[0][3] * cache.layout.layer_slots


CONFIGS = Path(__file__).parent.parent / "data" / "configs"
SPARSE_MLA = sorted(
    path.stem
    for path in CONFIGS.glob("*.json")
    if json.loads(path.read_text()).get("model_type") in ("deepseek_v32", "glm_moe_dsa")
)


@pytest.mark.parametrize("on", [{"device": "cpu"}, {"device": "cuda", "gpu": "h100"}], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", SPARSE_MLA)
def test_tokens_of_a_sparse_mla_pool_times_bytes_per_token_equal_the_pool_bytes(name, on, config_of):
    """One group has layers of different size: latents, and the keys of layers with an indexer."""
    config = config_of(name)
    cache = plan_source(source(config), replace(VLLM, **on)).kv_cache
    (group,) = cache.layout.groups
    indexers = (config.get("indexer_types") or ["full"] * config["num_hidden_layers"]).count("full")
    assert len(group.layers) == len(set(group.layers)) + indexers
    assert indexers == {"zai-org__GLM-5.2": 21, "nvidia__DeepSeek-V3.2-NVFP4": 61}.get(name, indexers)
    pool = cache.num_blocks * cache.layout.bytes_per_block
    assert 0 <= pool - cache.tokens * cache.layout.bytes_per_token < cache.layout.bytes_per_block


def test_planned_pool_tokens_of_the_demo_model_equal_vllms_start_up_log():
    """vLLM 0.32.0 on CPU prints 93,184 tokens and 45.50x for SmolLM2-135M with a 2 GiB pool."""
    from tonnage.planner.planning.build import make_plan

    flags = Deployment(engine="vllm", max_model_len=2048, kv_cache_memory_bytes=2 * GIB, device_memory=1 << 42)
    cache = make_plan("demo", flags).kv_cache
    assert (cache.tokens, cache.max_concurrency) == (93_184, 45.5)


def test_llama_2_7b_has_524288_kv_bytes_per_token_and_1_gib_per_2048_tokens(config_of):
    """Hidden size 4096 and 32 layers in fp16 take 1 GiB for batch 1 with 2,048 tokens.

    Batch 64 takes 68,719,476,736 bytes.
    """
    config = config_of("meta-llama/Llama-2-7b-hf")
    flags = Deployment(dtype="float16", max_model_len=2048, kv_cache_memory_bytes=GIB, device_memory=1 << 42)
    cache = plan_source(source(config), flags).kv_cache
    assert cache.layout.bytes_per_token == 524_288
    assert cache.bytes_per_sequence == GIB
    assert 64 * 2048 * cache.layout.bytes_per_token == 68_719_476_736


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang", "llama.cpp"])
def test_llama_2_7b_has_equal_kv_bytes_per_token_with_every_engine(engine, config_of):
    flags = Deployment(engine=engine, dtype="float16", max_model_len=2048, max_num_seqs=1, gpu="h100-80g")
    layout = plan_source(source(config_of("meta-llama/Llama-2-7b-hf")), flags).kv_cache.layout
    assert layout.bytes_per_token == 524_288


def pool(cache_layers, block_size: int = 16, max_num_batched_tokens: int = 64) -> PoolSpec:
    """Return the hf engine's pool for a model with these cache layers."""
    architecture = replace(build_architecture(SMALL), cache_layers=cache_layers)
    return hf.build_pool(architecture, "bfloat16", block_size, max_num_batched_tokens)


def layers(pattern: str, window: int = 8) -> tuple[CacheLayer, ...]:
    return tuple(
        CacheLayer(i, "sliding" if c == "s" else "full", window if c == "s" else None, 2, 16)
        for i, c in enumerate(pattern)
    )


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("ffff", [4]),
        ("ssss", [4]),
        ("sfsf", [2, 2]),
        ("sssssf" * 2, [2, 2, 2, 2, 2, 2]),
        ("sssssfs", [1] * 7),
        ("sssff", [2, 1, 2]),  # 3 / 2 is not below 1.5: split by 2
        ("ssssfff", [4, 3]),  # 4 / 3 is: padded to 4
    ],
)
def test_hf_engine_plan_puts_full_and_sliding_layers_into_separate_kv_groups(pattern, sizes):
    groups = pool(layers(pattern)).layout.groups
    assert [len(g.layers) for g in groups] == sizes
    assert sorted(i for g in groups for i in g.layers) == list(range(len(pattern)))


def test_sliding_window_blocks_stop_growing_at_window():
    sliding = pool(layers("s", window=512))
    assert sliding.sequence_blocks(100) == 7 + 1
    assert sliding.sequence_blocks(100_000) == -(-(511 + 64) // 16) + 1
    assert pool(layers("f")).sequence_blocks(100_000) == 6250


def test_hf_engine_rejects_layers_of_different_kv_heads():
    with pytest.raises(UnsupportedArchitecture) as caught:
        pool((*layers("f"), CacheLayer(1, "full", None, 4, 16)))
    assert caught.value.field == "num_key_value_heads"


SMALL = {
    "model_type": "mistral", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def kinds(**changes) -> str:
    architecture = build_architecture({**SMALL, "num_hidden_layers": 4, **changes})
    return "".join("s" if layer.kind == "sliding" else "f" for layer in architecture.cache_layers)


def test_config_fields_decide_which_layers_have_sliding_windows():
    assert kinds(sliding_window=8) == "ssss"
    assert kinds(sliding_window=None) == "ffff"
    assert kinds() == "ssss"  # MistralConfig's default window of 4096
    qwen = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3}
    assert kinds(**qwen, use_sliding_window=True) == "fffs"  # the layers from max_window_layers on
    assert kinds(**qwen, use_sliding_window=False) == "ffff"
    listed = ["sliding_attention", "full_attention"] * 2
    assert kinds(**qwen, use_sliding_window=True, layer_types=listed) == "sfsf"
    gemma = {"head_dim": 16, "sliding_window": 8}
    assert kinds(model_type="gemma2", **gemma) == "sfsf"
    assert kinds(model_type="gemma3_text", **gemma, num_hidden_layers=7) == "sssssfs"
    assert kinds(model_type="gemma3_text", **gemma, sliding_window_pattern=2) == "sfsf"


def test_longest_sequence_for_a_pool_fits_and_one_more_token_does_not():
    found = pool(build_architecture(SMALL).cache_layers, max_num_batched_tokens=512)
    for blocks in range(40):
        longest = found.longest(blocks, 256)
        assert longest == 0 or found.sequence_blocks(longest) <= blocks
        assert longest == 256 or found.sequence_blocks(longest + 1) > blocks


def test_hf_engine_stores_mla_latents_expanded(config_of):
    """DeepSeek-V3 stores 128 heads of 192 + 128 elements instead of a latent of 576: 71 times the bytes."""
    architecture = build_architecture(config_of("deepseek-ai/DeepSeek-V3"))
    layout = hf.build_pool(architecture, "bfloat16", 16, 64).layout
    assert layout.bytes_per_token == 61 * 128 * (192 + 128) * 2
    assert [group.kind for group in layout.groups] == ["full"]
    assert layout.bytes_per_token / (61 * 576 * 2) == pytest.approx(71.1, abs=0.05)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("LiquidAI/LFM2-1.2B", r"layer 0 \(state\)"),
        ("XiaomiMiMo/MiMo-V2-Flash", "V narrower than K"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "chunked"),
        ("BAAI/bge-large-en", "an encoder generates no tokens"),
    ],
)
def test_hf_engine_rejects_unsupported_cache_layers(name, match, config_of):
    with pytest.raises(UnsupportedArchitecture, match=match):
        hf.build_pool(build_architecture(config_of(name)), "bfloat16", 16, 64)
