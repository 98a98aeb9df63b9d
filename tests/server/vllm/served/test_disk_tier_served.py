"""A plain vLLM on a CPU with the disk tier: a prompt is answered from the folder after a restart."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
from plain_vllm import plain_vllm
from prometheus_client.parser import text_string_to_metric_families
from serving import PATIENCE

from tonnage.server.demo.model import ensure_demo

PROMPT = [random.Random(0).randrange(1000, 40_000) for _ in range(700)]


def flags(folder: Path, size: str) -> list[str]:
    tier = {
        "type": "tonnage", "module_path": "tonnage.server.engines.vllm.disk_tier", "path": str(folder),
        "size": size,
    }  # fmt: skip
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tonnage.server.engines.vllm.cpu_offloading",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier],
        },
    }
    return [
        "--kv-transfer-config", json.dumps(transfer), "--kv-cache-memory-bytes", str(64 << 20),
        "--max-model-len", "1024", "--enforce-eager", "--dtype", "float32",
        "--max-num-seqs", "4", "--enable-prompt-tokens-details", "--served-model-name", "demo",
    ]  # fmt: skip


def ask(url: str) -> tuple[str, int]:
    """Return the answer to the prompt, and how many of its tokens were cached."""
    body: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status().json()
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


def metric(url: str, name: str) -> float:
    """Return the value of a metric without labels of its own, or 0 if it is not exported yet."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                return sample.value
    return 0.0


def test_vllm_loads_a_known_prompt_from_the_disk_tier_after_a_restart(tmp_path: Path) -> None:
    kept = tmp_path / "kv"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with plain_vllm(tmp_path / "first", str(ensure_demo()), *flags(kept, "1GiB")) as url:
        first, cached = ask(url)
        assert cached == 0
        until = time.monotonic() + PATIENCE
        while len(list(kept.rglob("*.kv"))) < len(PROMPT) // 128:
            assert time.monotonic() < until
            time.sleep(0.1)
    with plain_vllm(tmp_path / "second", str(ensure_demo()), *flags(kept, "1GiB")) as url:
        second, cached = ask(url)
        assert cached >= 512
        assert second == first
        until = time.monotonic() + PATIENCE
        while metric(url, "tonnage_tier_loaded_total") == 0:  # vLLM logs its statistics every few steps
            ask(url)
            assert time.monotonic() < until
        assert metric(url, "tonnage_tier_size") == 1 << 30
        assert 0 < metric(url, "tonnage_tier_used") < 1 << 30
        assert metric(url, "tonnage_tier_lost_total") == 0
