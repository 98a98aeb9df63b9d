"""Tests that a real config with one broken field gives an answer or a named error, and no other exception."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest

from tonnage.planner.engines.vllm.pool import VLLMDeployment, build_pool
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.quantization.read import read_quantization

FOLDER = Path(__file__).parents[1] / "data" / "configs"
VLLM = VLLMDeployment(
    device="cuda", version=(0, 32, 0), dtype_bytes=2, kv_dtype="bfloat16", block_size=None,
    max_num_batched_tokens=2048, prefix_caching=None,
)  # fmt: skip
VALUES = [None, -1, 0, "x", [], {}, True, 1.5, 10**30, 3, [1], ["a"], {"a": 1}, "", 7]


def fields_of(config) -> list[tuple[str, ...]]:
    own = [(key,) for key in config]
    return own + [(key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value]


@pytest.mark.parametrize("seed", range(3))
def test_config_with_one_broken_field_gives_a_plan_or_an_error_naming_the_field(seed):
    rng = random.Random(seed)
    answered = refused = 0
    for path in sorted(FOLDER.glob("*__*.json")):
        if path.stem.endswith(".quant") or path.stat().st_size > 50_000:
            continue
        config = json.loads(path.read_text())
        for key in rng.sample(fields_of(config), 4):
            broken = copy.deepcopy(config)
            inner = broken if len(key) == 1 else broken[key[0]]
            inner[key[-1]] = rng.choice(VALUES)
            try:
                architecture = build_architecture(broken)
                quantization = read_quantization(broken, None)
                held = sum(quantization.bytes_after_load(t, "bfloat16") for t in architecture.tensors)
                cached = (
                    build_pool(architecture, VLLM).sequence_blocks(1000) if architecture.cache_layers else 0
                )
            except TonnageError:
                refused += 1
                continue
            assert held > 0
            assert cached >= 0
            answered += 1
    assert answered > 100
    assert refused > 100
