"""Tests of the memory outside PyTorch of ranks that PCIe connects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import GiB, MiB

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def plan_of(model, **flags):
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    return plan_source(ModelSource(model, model, config, "folder"), Deployment(engine="vllm", **flags))


@pytest.mark.parametrize(("gpu", "printed"), [("a30", 0.63), ("l40s", 0.21), ("l40s", 0.18)])
def test_interval_covers_logged_non_torch_memory_of_four_ranks_without_nvlink(gpu, printed):
    """Printed by vLLM's "Actual usage is ... GiB for non-torch memory"; 0.63 was outside before."""
    for version in ("0.10.2", "0.12.0"):
        plan = plan_of(
            "Qwen__Qwen3-8B", gpu=gpu, engine_version=version, tensor_parallel_size=4, max_model_len=8192
        )
        low, high = plan.intervals["framework_bytes"]
        assert low <= printed * GiB <= high
        pool = plan.rank.kv_pool_bytes - (printed * GiB - plan.rank.framework_bytes)
        assert plan.intervals["kv_pool_bytes"][0] <= pool <= plan.intervals["kv_pool_bytes"][1]


def test_planned_kv_pool_of_four_l40s_equals_the_logged_one():
    """Qwen2.5-72B-Instruct on vLLM 0.19.0 with four L40S (AWS g6e.12xlarge): a pool of 5.11 GiB."""
    plan = plan_of(
        "Qwen__Qwen2.5-72B", gpu="l40s", engine_version="0.19.0", tensor_parallel_size=4, max_model_len=8192
    )
    assert plan.rank.kv_pool_bytes / GiB == pytest.approx(5.11, abs=0.1)


def test_kv_pool_interval_is_wider_for_vllm_releases_that_start_nccl_after_the_snapshot():
    """init_device in v1/worker/gpu_worker.py of 0.10.2 and 0.11.0."""

    def above(version, **flags):
        plan = plan_of("Qwen__Qwen3-8B", gpu="h100-80g", engine_version=version, max_model_len=8192, **flags)
        return plan.rank.kv_pool_bytes - plan.intervals["kv_pool_bytes"][0]

    grown = above("0.10.2", tensor_parallel_size=2) - above("0.11.0", tensor_parallel_size=2)
    assert grown == pytest.approx(GiB, abs=MiB)
    assert above("0.10.2") == pytest.approx(above("0.11.0"), abs=3 * MiB)  # the pool is whole blocks
