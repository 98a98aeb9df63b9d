"""Tests of vLLM's memory with steps larger than those of the logs to which the planner is fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.gpu import coefficients
from tonnage.planner.planning.size import Sizer
from tonnage.planner.source.resolve import ModelSource

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
GIB = 1 << 30

# Start-up logs in public repositories: model, flags, printed GiB of weights and KV pool. What remains of the
# configured share is activations, memory outside PyTorch and the estimate of CUDA graphs.
PRINTED = [
    (
        "nvidia__Qwen3.6-35B-A3B-NVFP4",
        {"engine_version": "0.20.0", "gpu": "gb10", "gpu_memory_utilization": 0.85, "max_num_seqs": 8,
         "max_num_batched_tokens": 65536, "max_cudagraph_capture_size": 1, "max_model_len": 262144},
        21.86, 66.93,
    ),
    (
        "nvidia__Qwen3.6-27B-NVFP4",
        {"engine_version": "0.23.1", "gpu": "gb10", "gpu_memory_utilization": 0.7, "max_num_seqs": 8,
         "max_num_batched_tokens": 65536, "max_model_len": 262144},
        19.78, 47.84,
    ),
    (
        "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
        {"engine_version": "0.20.1", "gpu": "rtx5090", "device_memory": int(31.84 * GIB),
         "gpu_memory_utilization": 0.85, "max_num_seqs": 128, "max_num_batched_tokens": 32768,
         "max_model_len": 256000},
        18.54, 3.72,
    ),
    (
        "Qwen__Qwen2.5-0.5B",
        {"engine_version": "0.26.0", "device_memory": int(15.55 * GIB), "gpu": "rtx4080",
         "gpu_memory_utilization": 0.9, "max_num_batched_tokens": 32768, "dtype": "float16",
         "max_model_len": 32768},
        0.93, 11.94,
    ),
]  # fmt: skip


def runtime_of(model, **flags):
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    size = Sizer(ModelSource(model, model, config, "folder")).size(Deployment(engine="vllm", **flags))
    part, chosen = size.parts[size.place], size.chosen
    return engine_of("vllm").gpu_terms(part, chosen, coefficients()), chosen


@pytest.mark.parametrize(("model", "flags", "weights", "pool"), PRINTED)
def test_interval_of_the_activation_peak_covers_logs_with_large_steps(model, flags, weights, pool):
    """Before, the first start was 1 GiB outside."""
    runtime, chosen = runtime_of(model, kv_cache_dtype="auto", **flags)
    low, high = runtime.bounds
    rest = chosen.limit - (weights + pool) * GIB
    assert low <= rest <= high


def test_interval_of_the_activation_peak_grows_only_for_steps_with_more_tokens_than_any_log():
    def width(tokens):
        low, high = runtime_of(
            "Qwen__Qwen3-8B", gpu="h100-80g", engine_version="0.19.0", max_num_batched_tokens=tokens
        )[0].bounds
        return high - low

    assert width(2048) == width(8192) < width(16384) < width(65536)
