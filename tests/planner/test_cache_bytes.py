"""KV and state bytes of one sequence against a second implementation, and laws over all real configs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.planner.cache_bytes import (
    KV_BITS,
    bytes_per_token,
    element_bytes,
    longest_sequence,
    max_sequences,
    sequence_bytes,
)
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.families.registry import build_architecture

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    path.stem for path in (ROOT / "tests/data/configs").glob("*__*.json") if ".quant" not in path.name
)
REFUSED = {"deepseek-ai__Janus-1.3B", "deepseek-ai__deepseek-vl2-tiny", "moonshotai__Kimi-K3"}
NOT_PLANNED = {"transformers-default__dots1"}


@pytest.fixture(scope="module")
def oracle():
    """The benchmark's second implementation, loaded by its path."""
    spec = importlib.util.spec_from_file_location("kv_oracle", ROOT / "benchmarks/accuracy/kv_oracle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens", [1, 1000, 40_000])
def test_every_real_config_equals_the_oracle(tokens, oracle, config_of):
    compared = 0
    for name in CONFIGS:
        if name.startswith("transformers-default") or name in REFUSED:
            continue
        config = config_of(name)
        truth = oracle.expected(config, tokens)
        assert truth is not None, name
        planned = sequence_bytes(build_architecture(config), tokens, "bfloat16")
        assert (planned.growing, planned.fixed) == truth, name
        compared += 1
    assert compared > 150


@pytest.mark.parametrize("name", sorted(REFUSED | NOT_PLANNED))
def test_what_is_not_planned_is_refused_by_name(name, config_of):
    with pytest.raises(TonnageError) as caught:
        build_architecture(config_of(name))
    assert caught.value.field


@pytest.mark.parametrize("name", [c for c in CONFIGS if c not in REFUSED | NOT_PLANNED])
def test_laws(name, config_of):
    """Longer never costs less; a rank never more than the whole; fp8 never more than 16 bits."""
    architecture = build_architecture(config_of(name))
    before = 0
    for tokens in (1, 15, 16, 4096, 4097, 100_000):
        now = sequence_bytes(architecture, tokens, "bfloat16", source_tokens=100)
        assert now.total >= before
        before = now.total
        assert sequence_bytes(architecture, tokens, "fp8", source_tokens=100).total <= now.total
        for ranks in (2, 8):
            share = sequence_bytes(architecture, tokens, "bfloat16", source_tokens=100, ranks=ranks)
            assert now.total / ranks <= share.total + 1 or not architecture.cache_layers
            assert share.total <= now.total


def test_worked_numbers(config_of):
    """DeepSeek-V3 8,192 tokens: 549 MiB; Gemma-3-27B: 1,056; gpt-oss-20b: 195; Llama-2-7B: 4,096."""
    for name, mib in (
        ("deepseek-ai/DeepSeek-V3", 549), ("google/gemma-3-27b-it", 1056), ("openai/gpt-oss-20b", 195),
        ("meta-llama/Llama-2-7b-hf", 4096), ("Qwen/Qwen2.5-72B", 2560),
    ):  # fmt: skip
        planned = sequence_bytes(build_architecture(config_of(name)), 8192, "bfloat16").total
        assert round(planned / 2**20) == mib, name


def test_bytes_per_token_counts_layers_that_still_grow(config_of):
    assert bytes_per_token(build_architecture(config_of("Qwen/Qwen3.5-27B")), "bfloat16") == 65_536
    assert (
        bytes_per_token(build_architecture(config_of("google/gemma-3-27b-it")), "bfloat16") == 10 * 16 * 128 * 4
    )
    assert bytes_per_token(build_architecture(config_of("transformers-default/mamba2")), "bfloat16") == 0


def test_scales_of_narrow_caches():
    assert element_bytes(128, "nvfp4") == 64 + 8
    assert element_bytes(128, "int8") == 128 + 4
    with pytest.raises(DeploymentError, match="int3"):
        element_bytes(1, "int3")


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(
        ["Qwen/Qwen3.5-27B", "google/gemma-3-27b-it", "LiquidAI/LFM2-1.2B", "deepseek-ai/DeepSeek-V3"]
    ),
    st.integers(1 << 20, 1 << 36), st.integers(1, 64), st.sampled_from(sorted(KV_BITS)),
)  # fmt: skip
def test_solvers_stand_on_the_boundary(name, pool, sequences, dtype):
    architecture = build_architecture(_config(name))
    longest = longest_sequence(architecture, pool, sequences, dtype, 1 << 22)
    if longest:
        assert sequence_bytes(architecture, longest, dtype).total * sequences <= pool
        assert max_sequences(architecture, pool, longest, dtype) >= sequences
    if longest < 1 << 22:
        assert sequence_bytes(architecture, longest + 1, dtype).total * sequences > pool


def _config(name: str):
    import json

    return json.loads((ROOT / "tests/data/configs" / (name.replace("/", "__", 1) + ".json")).read_text())


@given(st.integers(1, 100_000), st.integers(1, 512))
def test_block_rounding_never_loses_a_token(tokens, block):
    architecture = build_architecture(_config("Qwen/Qwen2.5-0.5B"))
    pool = 1 << 34
    rounded = max_sequences(architecture, pool, tokens, "bfloat16", block)
    assert rounded <= max_sequences(architecture, pool, tokens, "bfloat16")
    each = sequence_bytes(architecture, -(-tokens // block) * block, "bfloat16").total
    assert rounded * each <= pool < (rounded + 1) * each
