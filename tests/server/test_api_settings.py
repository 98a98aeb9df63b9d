"""Settings: flags win over the environment; an error names the field."""

from __future__ import annotations

import pytest

from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan
from tonnage.server.settings import load_settings


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "model"),
        ({"port": 70000}, "port"),
        ({"backend": "sglang"}, "backend"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"kv_cache_memory_bytes": "512 bananas"}, "kv_cache_memory_bytes"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_length": 5}, "max_model_length"),
    ],
)
def test_invalid_setting_error_names_the_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        load_settings(**({} if field == "model" else {"model": "demo"}), **given)
    assert caught.value.field == field


COUNTS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size",
    "pipeline_parallel_size", "data_parallel_size", "max_loras", "max_lora_rank",
)  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, 10**12])
@pytest.mark.parametrize("name", [*COUNTS, "gpu_memory_utilization"])
def test_out_of_range_numbers_are_rejected_before_loading(name: str, value: int) -> None:
    def plan() -> None:
        given = {"model": "demo", "backend": "vllm", "device_memory": 1 << 36, name: value}
        make_plan("demo", load_settings(**given).deployment())

    with pytest.raises(DeploymentError) as caught:
        plan()
    assert (caught.value.field or "").lstrip("-").replace("-", "_") == name


def test_lora_rank_unsupported_by_vllm_is_rejected() -> None:
    settings = load_settings(model="demo", backend="vllm", enable_lora=True, max_lora_rank=7)
    with pytest.raises(DeploymentError, match="one of 1, 8, 16") as caught:
        make_plan("demo", settings.deployment())
    assert caught.value.field == "--max-lora-rank"


def test_flags_override_environment_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_MODEL", "demo")
    monkeypatch.setenv("TONNAGE_KV_CACHE_MEMORY_BYTES", "512MiB")
    monkeypatch.setenv("TONNAGE_PORT", "9000")
    settings = load_settings(port=9001)
    assert (settings.model_name, settings.port, settings.kv_cache_memory_bytes) == ("demo", 9001, 512 << 20)
    assert settings.deployment().kv_cache_memory_bytes == 512 << 20
    assert load_settings(served_model_name="x").model_name == "x"
