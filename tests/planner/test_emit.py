"""Tests of ``tonnage plan --emit``: the values that chart and Compose read, and rejected plans."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, DoesNotFit
from tonnage.planner.output.emit import FORMS, SCRATCH_BYTES, emit, memory_limit_bytes, shared_memory_bytes
from tonnage.planner.planning.build import make_plan, plan_source
from tonnage.planner.source.resolve import ModelSource

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "tonnage"
FILES = ("compose.yaml", "compose.gpu.yaml", "vllm/compose.yaml")
MIB = 2**20


@pytest.fixture(scope="module")
def plan():
    return make_plan("demo", Deployment(kv_cache_memory_bytes=512 * MIB, max_model_len=2048))


def test_emitted_container_memory_limit_covers_the_upper_bound_of_planned_bytes(plan) -> None:
    low, high = plan.intervals["used_bytes"]
    assert low <= plan.rank.used_bytes <= high
    limit = memory_limit_bytes(plan)
    assert limit % MIB == 0
    assert 0 <= limit - 1.03 * high < MIB


def test_helm_values_match_chart_schema(plan) -> None:
    values = yaml.safe_load(emit(plan, "helm-values"))
    jsonschema.validate(
        yaml.safe_load((CHART / "values.yaml").read_text()) | values,
        json.loads((CHART / "values.schema.json").read_text()),
    )
    assert values["plan"]["id"] == plan.plan_id
    assert (
        values["settings"]["kv_cache_memory_bytes"] == values["plan"]["kvPoolBytes"] == plan.rank.kv_pool_bytes
    )
    assert values["resources"]["memoryBytes"] >= values["plan"]["usedBytes"] == plan.rank.used_bytes


def test_emitted_helm_settings_reproduce_the_plan(plan) -> None:
    settings = yaml.safe_load(emit(plan, "helm-values"))["settings"]
    again = make_plan("demo", Deployment(**settings))
    assert again.fits
    assert again.kv_cache == plan.kv_cache
    assert again.rank.used_bytes == plan.rank.used_bytes


def test_compose_env_variables_exist_in_compose_file(plan) -> None:
    lines = [line for line in emit(plan, "compose-env").splitlines() if not line.startswith("#")]
    env = dict(line.split("=", 1) for line in lines)
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    assert all(f"${{{name}:-" in text for name in env), env
    assert int(env["POOL"]) == plan.rank.kv_pool_bytes
    assert "GPUS" not in env
    assert int(env["MEMORY_LIMIT"]) == int(env["MEMORY"]) == memory_limit_bytes(plan)


def test_emitted_kubernetes_resources_match_cpu_and_gpu_plans(plan) -> None:
    limit = f"{memory_limit_bytes(plan) // MIB}Mi"
    assert yaml.safe_load(emit(plan, "k8s-resources")) == {
        "resources": {"requests": {"memory": limit}, "limits": {"memory": limit}}
    }
    gpu = make_plan("demo", Deployment(device="cuda", device_memory=80 * 2**30, max_model_len=2048))
    memory = memory_limit_bytes(gpu)
    assert memory is not None
    assert memory % MIB == 0 <= memory - 1.03 * gpu.host.high < MIB
    assert yaml.safe_load(emit(gpu, "k8s-resources")) == {
        "resources": {
            "requests": {"memory": f"{memory // MIB}Mi"},
            "limits": {"memory": f"{memory // MIB}Mi", "nvidia.com/gpu": 1},
        }
    }
    values = yaml.safe_load(emit(gpu, "helm-values"))
    assert values["resources"] == {"gpus": 1, "memoryBytes": memory}
    assert "sharedMemoryBytes" not in values
    assert values["plan"]["gpus"] == 1
    assert values["plan"]["hostBytes"] == gpu.host.value < memory


def test_compose_env_passes_pipeline_parallel_size_to_vllm() -> None:
    flags = Deployment(engine="vllm", device="cuda", device_memory=80 * 2**30, pipeline_parallel_size=2)
    env = emit(make_plan("demo", flags), "compose-env")
    assert "\nOPTIONS=--dtype bfloat16 --kv-cache-dtype bfloat16 --pipeline-parallel-size 2\n" in env
    assert "\nDEVICES=2\n" in env


def test_compose_env_passes_tensor_parallel_size_to_engine() -> None:
    flags = Deployment(
        engine="vllm", device="cuda", device_memory=80 * 2**30, max_model_len=2048, tensor_parallel_size=3
    )
    three = make_plan("demo", flags)
    env = emit(three, "compose-env")
    assert "\nGPUS=3\n" in env
    (file,) = re.findall(r"-f (\S+gpu\S+)", env)
    assert (ROOT / file).exists()
    variables = dict(line.split("=", 1) for line in env.splitlines() if not line.startswith("#"))
    texts = "".join((ROOT / "deploy" / name).read_text() for name in FILES)
    assert all(f"${{{name}:-" in texts for name in variables), variables
    # the container's /tmp and home are in memory
    assert int(variables["MEMORY_LIMIT"]) == memory_limit_bytes(three) + SCRATCH_BYTES
    values = yaml.safe_load(emit(three, "helm-values"))
    jsonschema.validate(
        yaml.safe_load((CHART / "values.yaml").read_text()) | values,
        json.loads((CHART / "values.schema.json").read_text()),
    )
    assert values["sharedMemoryBytes"] == int(variables["SHM_SIZE"]) == shared_memory_bytes(three) >= 1 << 30
    assert values["sharedMemoryBytes"] < values["resources"]["memoryBytes"] == memory_limit_bytes(three)
    assert (values["settings"]["tensor_parallel_size"], values["resources"]["gpus"]) == (3, 3)


def test_compose_env_passes_model_revision_to_vllm() -> None:
    """vLLM gets the revision as an option, Tonnage's server as a suffix of the model name."""
    config = json.loads((ROOT / "tests/data/configs/Qwen__Qwen2.5-7B.json").read_text())
    source = ModelSource("Qwen/Qwen2.5-7B@abc123", "Qwen/Qwen2.5-7B", config, "hub")
    flags = Deployment(engine="vllm", gpu="h100-80g", max_model_len=8192)
    env = emit(plan_source(source, flags), "compose-env")
    assert "\nMODEL=Qwen/Qwen2.5-7B@abc123\nREPO=Qwen/Qwen2.5-7B\n" in env
    assert "\nOPTIONS=--revision abc123 --dtype bfloat16 " in env
    env = emit(plan_source(source, replace(flags, engine="hf")), "compose-env")
    assert "\nMODEL=Qwen/Qwen2.5-7B@abc123\n" in env
    assert "REPO" not in env


def test_emit_rejects_an_unknown_format_and_a_plan_that_does_not_fit(plan) -> None:
    with pytest.raises(DeploymentError, match="helm-values"):
        emit(plan, "terraform")
    small = make_plan("demo", Deployment(device_memory=256 * MIB))
    for form in FORMS:
        with pytest.raises(DoesNotFit, match="bytes"):
            emit(small, form)


def test_helm_chart_example_values_equal_the_output_of_emit() -> None:
    command = [sys.executable, "-m", "tonnage.server.cli", "plan", "demo", "--max-model-len", "2048"]
    command += ["--kv-cache-memory-bytes", "512MiB", "--emit", "helm-values"]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    example = (CHART / "ci" / "plan-cpu-values.yaml").read_text()
    volatile = (
        "id:",
        "# ",
        "device_memory",
        "memoryBytes",
        "usedBytes",
    )  # follow planner constants

    def stable(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.strip().startswith(volatile)]

    assert stable(written) == stable(example)


def test_serve_rejects_a_kv_pool_larger_than_the_device_memory_when_both_come_from_the_environment() -> None:
    """Compose passes less memory to the server than the pool needs."""
    env = {
        "TONNAGE_DEVICE_MEMORY": "256MiB",
        "TONNAGE_KV_CACHE_MEMORY_BYTES": "512MiB",
        "PATH": "/usr/bin:/bin",
    }
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "256.0 MiB" in done.stderr
    assert "Traceback" not in done.stderr
