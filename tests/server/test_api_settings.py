"""Settings: flags win over the environment; an error names the field."""

from __future__ import annotations

import pytest

from tonnage.planner.errors import DeploymentError
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
def test_settings_name_the_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        load_settings(**({} if field == "model" else {"model": "demo"}), **given)
    assert caught.value.field == field


def test_settings_come_from_flags_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_MODEL", "demo")
    monkeypatch.setenv("TONNAGE_KV_CACHE_MEMORY_BYTES", "512MiB")
    monkeypatch.setenv("TONNAGE_PORT", "9000")
    settings = load_settings(port=9001)
    assert (settings.model_name, settings.port, settings.kv_cache_memory_bytes) == ("demo", 9001, 512 << 20)
    assert settings.deployment().kv_cache_memory_bytes == 512 << 20
    assert load_settings(served_model_name="x").model_name == "x"
