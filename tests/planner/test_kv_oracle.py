"""Tests of KV bytes per sequence against a second implementation over all real configs, and of their laws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_modules import module
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.dtypes import HF_KV_DTYPE_BYTES
from tonnage.planner.planning.build import plan_source
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    path.stem for path in (ROOT / "tests/data/configs").glob("*__*.json") if ".quant" not in path.name
)
REFUSED = {"deepseek-ai__Janus-1.3B", "deepseek-ai__deepseek-vl2-tiny", "moonshotai__Kimi-K3"}
NOT_PLANNED = {"transformers-default__dots1"}
# The memory is enough for any model; the tests compare bytes per sequence.
FLAGS = Deployment(
    engine="vllm", dtype="bfloat16", max_model_len=512, kv_cache_memory_bytes=1 << 33, device_memory=1 << 44
)


oracle, kept = module("kv_oracle"), module("kv_bytes")


def _config(name: str):
    return json.loads((ROOT / "tests/data/configs" / (name.replace("/", "__", 1) + ".json")).read_text())


def plan(config, **changes) -> Plan:
    """Return the config's plan without its weight quantization."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return plan_source(ModelSource("m", "m", plain, "folder"), replace(FLAGS, **changes))


@pytest.mark.parametrize("tokens", [1, 1000, 40_000])
def test_kv_bytes_per_sequence_equal_a_second_independent_implementation(tokens, config_of):
    """The cache layers are compared too, because they give the bytes of states without block padding."""
    planned = by_layers = 0
    for name in CONFIGS:
        if name.startswith("transformers-default") or name in REFUSED:
            continue
        config = config_of(name)
        truth = oracle.expected(config, tokens)
        assert truth is not None, name
        architecture = build_architecture(config)
        assert kept.by_layers(architecture, tokens) == truth, name
        by_layers += 1
        if architecture.model_type not in kept.OWN_LAYOUT:
            growing, _ = oracle.expected(config, tokens, oracle.vllm_index_bytes)
            found = kept.by_plan(plan(config), tokens)
            assert found == growing, name
            planned += 1
    assert by_layers > 150
    assert planned > 145


@pytest.mark.parametrize("name", sorted(REFUSED | NOT_PLANNED))
def test_error_for_an_unsupported_config_names_the_field(name, config_of):
    with pytest.raises(TonnageError) as caught:
        build_architecture(config_of(name))
    assert caught.value.field


@pytest.mark.parametrize("name", [c for c in CONFIGS if c not in REFUSED | NOT_PLANNED])
def test_kv_bytes_never_fall_with_length_and_never_rise_with_ranks_or_fp8(name, config_of):
    """A longer sequence never takes fewer bytes, and fp8 never takes more than bf16.

    One rank never holds more than the whole model; all ranks together never hold less.
    """
    config = config_of(name)
    longest = build_architecture(config).max_model_len
    before = 0
    for tokens in sorted({15, 16, longest // 2, longest}):
        now = plan(config, max_model_len=tokens).kv_cache.bytes_per_sequence
        assert now >= before
        before = now
    assert plan(config, max_model_len=longest, kv_cache_dtype="fp8").kv_cache.bytes_per_sequence <= before
    for ranks in (2, 8):
        try:
            share = plan(config, max_model_len=longest, tensor_parallel_size=ranks)
        except DeploymentError as error:  # the rank count does not divide the heads
            if error.field != "--tensor-parallel-size":
                raise
            continue
        assert share.kv_cache.bytes_per_sequence <= before <= ranks * share.kv_cache.bytes_per_sequence


def test_kv_bytes_per_sequence_equal_known_values(config_of):
    """8,192 tokens take 549 MiB in DeepSeek-V3, 1,056 in Gemma-3-27B and 4,096 in Llama-2-7B.

    gpt-oss-20b takes 195 MiB.
    """
    for name, mib in (
        ("deepseek-ai/DeepSeek-V3", 549), ("google/gemma-3-27b-it", 1056), ("openai/gpt-oss-20b", 195),
        ("meta-llama/Llama-2-7b-hf", 4096), ("Qwen/Qwen2.5-72B", 2560),
    ):  # fmt: skip
        assert round(kept.by_plan(plan(config_of(name)), 8192) / 2**20) == mib, name


def test_kv_bytes_per_further_token_exclude_full_windows_and_recurrent_states(config_of):
    """The sequences are longer than every window."""
    for name, per_token in (
        ("Qwen/Qwen3.5-27B", 65_536), ("google/gemma-3-27b-it", 10 * 16 * 128 * 4),
        ("transformers-default/mamba2", 0),
    ):  # fmt: skip
        found = plan(config_of(name))
        assert kept.by_plan(found, 2 << 20) - kept.by_plan(found, 1 << 20) == per_token << 20, name


def test_int8_and_fp8_kv_cache_includes_scales(config_of):
    """K and V of a token and head take a byte per element and a 4-byte scale (2 heads of 64, 24 layers)."""
    config = config_of("Qwen/Qwen2.5-0.5B")
    for dtype, per_head in (("int8_per_token_head", 64 + 4), ("fp8_per_token_head", 64 + 4), ("bfloat16", 128)):
        assert dtype in HF_KV_DTYPE_BYTES
        found = plan(config, engine="hf", kv_cache_dtype=dtype).kv_cache
        assert found.layout.bytes_per_token == 24 * 2 * 2 * per_head
    with pytest.raises(DeploymentError, match="int3"):
        plan(config, kv_cache_dtype="int3")


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(
        ["Qwen/Qwen3.5-27B", "google/gemma-3-27b-it", "LiquidAI/LFM2-1.2B", "deepseek-ai/DeepSeek-V3"]
    ),
    st.integers(1 << 28, 1 << 36), st.sampled_from(["bfloat16", "fp8"]),
)  # fmt: skip
def test_longest_sequence_of_a_plan_fits_its_pool_and_one_more_token_does_not(name, pool, dtype):
    """The longest sequence fits the usable blocks alone, and a sequence one token longer does not."""
    config = _config(name)
    flags = {"kv_cache_memory_bytes": pool, "kv_cache_dtype": dtype}
    cache = plan(config, **flags).kv_cache
    room = cache.usable_blocks * cache.layout.bytes_per_block

    def takes(tokens):
        return plan(config, max_model_len=tokens, **flags).kv_cache.bytes_per_sequence

    assert cache.longest is not None
    if cache.longest:
        assert takes(cache.longest) <= room
    if cache.longest < build_architecture(config).max_model_len:
        assert takes(cache.longest + 1) > room


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 32_768), st.sampled_from([32, 64, 128]), st.sampled_from(["vllm", "hf"]))
def test_max_concurrency_is_the_pool_divided_by_whole_blocks_per_sequence(tokens, block, engine):
    """A sequence takes whole blocks, and the concurrency is the number of sequences that fit."""
    found = plan(_config("Qwen/Qwen2.5-0.5B"), max_model_len=tokens, block_size=block, engine=engine).kv_cache
    assert found.layout.bytes_per_block == block * found.layout.bytes_per_token
    assert found.bytes_per_sequence == -(-tokens // block) * found.layout.bytes_per_block
    counted = found.num_blocks if engine == "vllm" else found.usable_blocks
    whole = int(found.max_concurrency)
    assert whole * found.bytes_per_sequence <= counted * found.layout.bytes_per_block
    assert (whole + 1) * found.bytes_per_sequence > counted * found.layout.bytes_per_block
