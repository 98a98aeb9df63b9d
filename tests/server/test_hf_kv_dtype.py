"""``--kv-cache-dtype``: each stored dtype takes the planned bytes and gives nearly the model's own output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hf_steps import finish, publish_and_fork

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.dtypes import HF_KV_DTYPE_BYTES
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import self_check
from tonnage.server.engines.hf.pool import STORED, PagedPool
from tonnage.server.engines.hf.sampling.draw import sample
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.request import GenerationRequest, SamplingParams

# Largest error of a stored value: half a step of the format, relative to the value (floats) or, for int8, to
# the largest of its head. fp8 e4m3 has 3 bits of mantissa, and 2^-9 is its smallest step.
ERROR = {
    "float32": 0.0,
    "float16": 2**-11,
    "bfloat16": 2**-8,
    "fp8": 2**-4,
    "fp8_e4m3": 2**-4,
    "fp8_per_token_head": 2**-4,
    "int8_per_token_head": 0.5 / 127,
}


def plan_for(kv_cache_dtype: str, **changes: Any) -> Plan:
    ensure_demo()
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 24 << 20,
        **changes,
    }
    return make_plan("demo", Deployment(kv_cache_dtype=kv_cache_dtype, **settings))


def test_hf_engine_stores_every_kv_cache_dtype_of_the_planner() -> None:
    assert set(STORED) == set(HF_KV_DTYPE_BYTES) == set(ERROR)
    assert all(STORED[name].itemsize == size for name, size in HF_KV_DTYPE_BYTES.items())


@pytest.mark.parametrize("name", ERROR)
def test_stored_kv_values_survive_read_and_block_copy(name: str) -> None:
    layout = plan_for(name).kv_cache.layout
    pool = PagedPool(layout, 4, torch.device("cpu"))
    assert pool.nbytes == 4 * layout.bytes_per_block
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(layout.block_size, layout.kv_heads, layout.head_size, generator=draw) * 20
    values[3] = 0.0
    rows = torch.from_numpy(pool.row_index(np.arange(layout.block_size) + layout.block_size))  # block 1
    pool.write(rows, values)
    found = pool.read(rows, torch.float32)
    scale = values.abs().amax(-1, keepdim=True) if name.startswith("int8") else values.abs()
    assert bool(((found - values).abs() <= ERROR[name] * scale + 2**-10 * (values != 0) * (scale + 1)).all())
    assert bool((found[3] == 0).all())
    pool.copy_blocks(np.array([1]), np.array([3]))
    again = torch.from_numpy(pool.row_index(np.arange(layout.block_size) + 3 * layout.block_size))
    assert torch.equal(pool.read(again, torch.float32), found)


def test_kv_values_beyond_the_fp8_range_are_clamped() -> None:
    pool = PagedPool(plan_for("fp8").kv_cache.layout, 2, torch.device("cpu"))
    huge = torch.full((1, pool.layout.kv_heads, pool.layout.head_size), 1e5)
    pool.write(torch.tensor([0]), huge)
    assert bool((pool.read(torch.tensor([0]), torch.float32) == 448.0).all())


@pytest.mark.parametrize("name", ["auto", "float32", "fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_pool_of_each_kv_cache_dtype_has_the_planned_bytes_and_the_model_generates(name: str) -> None:
    plan = plan_for(name)
    runner = ModelRunner(plan)
    assert runner.pool.nbytes == plan.rank.kv_pool_bytes
    assert runner.attention == ("in place" if name == "auto" else "gather")
    self_check(runner)
    scheduler = HFScheduler(plan)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    prompt = (504, 3575, 282, 4649, 314)  # "The capital of France is"
    scheduler.add(GenerationRequest("a", prompt, params, n=2))  # n: a block is copied before it is written
    said: list[int] = []
    while not scheduler.idle:
        batch, picked, _ = scheduler.schedule()
        assert batch is not None
        logits = runner.forward(batch)
        draws = publish_and_fork(scheduler, picked)
        if len(draws) > len(logits):
            logits = logits.expand(len(draws), -1)
        sequences = [draw.sequence for draw in draws]
        tokens = sample(logits, [s.params for s in sequences], [s.random for s in sequences])
        said += [t for chunk in finish(scheduler, draws, tokens) if chunk.index == 0 for t in chunk.token_ids]
    assert 7042 in said  # " Paris"
    assert runner.pool.nbytes == plan.rank.kv_pool_bytes  # no scale was added on the way


@pytest.mark.parametrize("name", ["fp8_e5m2", "int8", "int3"])
def test_unsupported_kv_dtype_error_lists_supported_dtypes(name: str) -> None:
    with pytest.raises(DeploymentError, match="int8_per_token_head") as refused:
        plan_for(name)
    assert refused.value.field == "--kv-cache-dtype"
