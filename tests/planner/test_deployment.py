"""Tests of flags whose meaning depends on model and engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.planner import plan
from tonnage.planner.api import plan_or_advise
from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices import host
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.source.resolve import ModelSource

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def source(name: str, **changes) -> ModelSource:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return ModelSource("m", "m", {**config, **changes}, "folder")


@pytest.mark.parametrize(("features", "size"), [(("avx512_bf16",), 4), ((), 2)])
def test_plan_with_gpu_cpu_uses_the_instruction_sets_of_this_machine(features, size, monkeypatch):
    """With AVX-512 BF16, vLLM keeps recurrent states in float32 (platforms/cpu.py)."""
    monkeypatch.setattr(host, "cpu_features", lambda: frozenset(features))
    found = [
        plan_source(
            source("transformers-default__qwen3_next"),
            Deployment(engine="vllm", engine_version="0.32.0", gpu=gpu, kv_cache_memory_bytes=8 << 30,
                       max_model_len=2048, device_memory=1 << 42),
        ).kv_cache.layout.block_size
        for gpu in (None, "cpu")
    ]  # fmt: skip
    heads, key, value = 32, 128, 128
    state = heads * key * value * size + 3 * (2 * 16 * key + heads * value) * 2
    token = 2 * 2 * 256 * 2
    assert found == [-(-state // (128 * token)) * 128] * 2


@pytest.mark.parametrize(
    ("version", "length", "flags", "tokens"),
    [
        ("0.7.3", 8192, {}, 8192),  # V0 does not chunk prompts
        ("0.7.3", 1024, {}, 2048),
        ("0.7.3", 65536, {}, 2048),  # but chunks prompts of a long context
        ("0.7.3", 65536, {"enable_lora": True}, 65536),
        ("0.6.3", 8192, {"max_num_batched_tokens": 4096}, 4096),
        ("0.8.0", 8192, {}, 2048),  # V1
    ],
)
def test_default_max_num_batched_tokens_equals_that_of_the_planned_vllm_version(version, length, flags, tokens):
    """SchedulerConfig of 0.7 uses max(max_model_len, 2048) unless prompts are chunked (vllm/config.py)."""
    made = Deployment(engine="vllm", engine_version=version, gpu="a100-80g", max_model_len=length, **flags)
    found = plan_source(source("meta-llama__Meta-Llama-3.1-8B"), made)
    assert found.deployment.max_num_batched_tokens == tokens


def test_llama_cpp_plan_notes_a_context_longer_than_the_model_supports():
    """llama.cpp allocates the requested length and starts; other engines reject it."""
    long = Deployment(engine="llama.cpp", max_model_len=16384, device_memory=1 << 40)
    found = plan_source(source("meta-llama__Llama-2-7b-hf"), long)
    assert found.kv_cache.tokens == 16384
    assert any("16,384 tokens are above the model's own 4,096" in note for note in found.notes)
    with pytest.raises(DeploymentError, match="above the model's own 4096"):
        plan_source(source("meta-llama__Llama-2-7b-hf"), Deployment(max_model_len=16384))


def test_model_unsupported_by_default_engine_is_planned_for_vllm(tmp_path, capsys):
    model = source("Qwen__Qwen3.5-27B")
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    found = plan(str(tmp_path), device_memory=1 << 40, max_model_len=4096)
    assert found.deployment.engine == "vllm"
    assert "the hf engine, the default, does not serve this model" in found.notes[0]
    assert run([str(tmp_path), "--device-memory", "1TiB", "--max-model-len", "4096"]) == 0
    assert "planned for vllm" in capsys.readouterr().out
    assert run([str(tmp_path), "--device-memory", "1TiB", "--engine", "hf"]) == 2  # asked for by name
    assert "hf engine's pool" in capsys.readouterr().err
    with pytest.raises(UnsupportedArchitecture, match="'nothing' is not supported"):  # by neither engine
        plan_or_advise(
            ModelSource("m", "m", {"model_type": "nothing"}, "folder"), deployment_of({}), engine_given=False
        )


def test_pooling_runner_has_no_lm_head_and_no_sampler():
    """vLLM's pooling classes omit the head (model_executor/models/adapters.py); the KV cache stays."""
    config = {"tie_word_embeddings": False}
    flags = {"engine": "vllm", "engine_version": "0.19.0", "gpu": "h100-80g", "max_model_len": 8192}
    generates, pools = (
        plan_source(source("Qwen__Qwen3-0.6B", **config), Deployment(runner=runner, **flags))
        for runner in ("generate", "pooling")
    )
    head = 151_936 * 1024 * 2
    assert generates.rank.weights_bytes - pools.rank.weights_bytes == head
    assert pools.rank.activation_bytes < generates.rank.activation_bytes
    assert pools.kv_cache.layout == generates.kv_cache.layout
    assert "--runner pooling" in " ".join(_lines(pools))


def _lines(found) -> tuple[str, ...]:
    from tonnage.planner.planning.advice import serve_lines

    return serve_lines(found)
