"""Tests of a plan's text: figures of a token, of one GPU and of all replicas, and short serve commands."""

from __future__ import annotations

import re

import pytest

from tonnage.planner import plan
from tonnage.planner.command import run
from tonnage.planner.planning.advice import serve_lines


@pytest.fixture
def folder(config_of, folder_with):
    return lambda name: folder_with(config_of(name))


def lines_of(capsys, *arguments: str) -> list[str]:
    assert run(list(arguments)) in (0, 1)
    return capsys.readouterr().out.splitlines()


def test_plan_text_prints_kv_bytes_per_token_and_max_num_batched_tokens(folder, capsys):
    lines = lines_of(capsys, folder("Qwen/Qwen3-8B"), "--gpu", "h100-80g", "--engine-version", "0.33.0")
    assert "max_num_batched_tokens 8,192" in lines[1]
    # 36 layers x 8 KV heads x 128 x K and V x 2 bytes
    assert any("(bfloat16, 147,456 a token)" in line for line in lines)
    assert next(line for line in lines if line.startswith("device")).endswith("79.18 GiB")


def test_plan_text_for_several_gpus_says_which_figures_are_per_gpu_and_the_total(folder, capsys):
    flags = [folder("Qwen/Qwen3-8B"), "--gpu", "h100-80g", "--engine-version", "0.33.0"]
    lines = lines_of(capsys, *flags, "-tp", "2", "-dp", "3")
    assert next(line for line in lines if line.startswith("device")).endswith("each of 6 GPUs")
    tokens = int(re.search(r"usable; about ([\d,]+) tokens", "\n".join(lines))[1].replace(",", ""))
    assert f"All 3 replicas, 6 GPUs: about {3 * tokens:,} tokens, " in "\n".join(lines)
    lines = lines_of(capsys, *flags, "-pp", "3")
    assert next(line for line in lines if line.startswith("device")).endswith("the fullest of 3 GPUs")


def test_plan_text_prints_bounds_that_round_to_equal_values_once(folder, capsys, monkeypatch):
    found = plan(folder("Qwen/Qwen3-8B"), gpu="h100-80g", engine_version="0.33.0")
    found.intervals["weights_bytes"] = (29_710_000_000, 29_711_048_576)
    (row,) = (row for row in found.memory_rows() if row[0] == "weights")
    assert row[2] == "27.67 GiB, within 1.0 MiB"


def test_printed_serve_commands_contain_only_the_given_flags(folder):
    name = folder("Qwen/Qwen3-8B")
    flags = {"gpu": "h100-80g", "engine_version": "0.33.0"}
    ours, theirs = serve_lines(plan(name, **flags))
    assert theirs == f"vllm serve {name}"
    assert "--max-num-seqs" not in ours
    _, theirs = serve_lines(plan(name, max_num_seqs=64, kv_cache_dtype="fp8", **flags))
    assert theirs == f"vllm serve {name} --max-num-seqs 64 --kv-cache-dtype fp8"
    _, theirs = serve_lines(plan(name, max_model_len=8192, gpu_memory_utilization=0.95, **flags))
    assert theirs == f"vllm serve {name} --max-model-len 8192 --gpu-memory-utilization 0.95"


def test_weight_bytes_have_an_interval_if_the_engine_chooses_the_kernel_at_load_time(folder, capsys):
    """A start-up log of gpt-oss-120b on an H100 has 65.97 GiB with Marlin (vllm-project/vllm issue 23278)."""
    name = folder("openai/gpt-oss-120b")
    found = plan(name, gpu="h100-80g", engine_version="0.10.1", max_model_len=8192)
    low, high = found.intervals["weights_bytes"]
    assert low == found.rank.weights_bytes
    assert low <= 65.9651 * (1 << 30) <= high * 1.001
    lines = lines_of(capsys, name, "--gpu", "h100-80g", "--engine-version", "0.10.1", "--max-model-len", "8192")
    assert next(line for line in lines if line.startswith("weights")).endswith("64.35 GiB to 65.91 GiB")
    assert "weights_bytes" not in plan(name, gpu="a100-80g", engine_version="0.33.0").intervals


def test_request_of_a_model_with_compressed_kv_layers_counts_as_a_full_sequence(folder, capsys):
    flags = [folder("deepseek-ai/DeepSeek-V4-Flash"), "--gpu", "h200", "-tp", "8", "--engine-version", "0.32.0"]
    lines = lines_of(capsys, *flags, "--request", "4000+500")
    (line,) = (line for line in lines if line.startswith("Requests of 4,000+500 tokens: about "))
    count = int(re.search(r"about (\d+) at once", line)[1])
    same = plan(flags[0], gpu="h200", tensor_parallel_size=8, engine_version="0.32.0", max_model_len=4500)
    assert count == pytest.approx(same.kv_cache.max_concurrency, rel=0.05)
    assert any("requests count as sequences of their whole length" in line for line in lines)
