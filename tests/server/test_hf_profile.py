"""The profile run, and checks of the plan against available memory and against measured memory."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DoesNotFit
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.hf import HFEngine, engine
from tonnage.server.engines.hf.headroom import available_memory, require_available, require_fits
from tonnage.server.engines.hf.model.formats import load_options
from tonnage.server.engines.hf.model.profile import full_batch, profile
from tonnage.server.engines.hf.model.runner import ModelRunner


def plan_for(**changes: Any) -> Plan:
    ensure_demo()
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": 32 << 20,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        **changes,
    }
    return make_plan("demo", Deployment(**settings))


def test_available_memory_equals_psutil() -> None:
    found = psutil.virtual_memory().available
    assert available_memory() == pytest.approx(found, rel=0.2)


def test_error_for_a_plan_above_the_available_memory_states_both_numbers() -> None:
    plan = plan_for()
    needed = plan.rank.used_bytes
    require_available(plan, needed)
    with pytest.raises(DoesNotFit, match=f"{needed:,} bytes .* leave {needed - 1:,} bytes"):
        require_available(plan, needed - 1)


def test_error_for_measured_memory_above_the_device_total_names_every_component() -> None:
    plan = plan_for()
    measured = dataclasses.replace(plan.rank, activation_bytes=plan.rank.activation_bytes + (1 << 20))
    exact = dataclasses.replace(measured, total_bytes=measured.used_bytes)
    require_fits(plan, dataclasses.replace(plan, ranks=(exact,)))
    short = dataclasses.replace(exact, total_bytes=exact.total_bytes - 1)
    said = f"activations {measured.activation_bytes:,} bytes .*planned {plan.rank.activation_bytes:,} bytes"
    with pytest.raises(DoesNotFit, match=said):
        require_fits(plan, dataclasses.replace(plan, ranks=(short,)))


def peak_of(call: Callable[[], Any]) -> int:
    """Return the peak of the bytes that torch allocates on the CPU during a call."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held)


@pytest.mark.parametrize("tokens", [64, 512])
def test_planned_int8_activation_bytes_equal_the_peak_of_the_largest_layer(tokens: int) -> None:
    """The layers of the demo model's MLP, whose inputs have no outliers."""
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": tokens}
    quantized = plan_for(quantization="int8", **settings)
    planned = quantized.rank.activation_bytes - plan_for(**settings).rank.activation_bytes
    load_options(quantized, torch.bfloat16)  # silences the warnings of each call
    peaks = []
    for into, out in ((576, 1536), (1536, 576)):
        layer = Linear8bitLt(into, out, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = Int8Params(torch.randn(out, into) / 50, has_fp16_weights=False, requires_grad=False)
        layer = layer.to("cpu").eval()
        x = torch.rand(tokens, into).to(torch.bfloat16)
        with torch.inference_mode():
            layer(x)
            peaks.append(peak_of(lambda layer=layer, x=x: layer(x)))  # type: ignore[misc]
    # a CPU with AVX-512 needs no float32 copy of the weight, which counts where the tokens are few
    assert max(peaks) <= 1.02 * planned
    assert max(peaks) >= 0.98 * planned or tokens == 64


@pytest.mark.parametrize(
    ("dtype", "quantization", "tokens"),
    [("bfloat16", None, 512), ("float32", None, 512), ("bfloat16", "int8", 128)],
)
def test_activation_bytes_of_a_full_profile_batch_are_inside_the_planned_interval(
    dtype: str, quantization: str | None, tokens: int
) -> None:
    plan = plan_for(dtype=dtype, max_num_seqs=64, max_num_batched_tokens=tokens, quantization=quantization)
    runner = ModelRunner(plan)
    batch = full_batch(runner)
    assert len(batch.token_ids) == tokens
    assert batch.sequences == len(batch.logits_at) == 64
    assert int(batch.kv_len.max()) <= 512
    assert all(int(slots.max()) < plan.kv_cache.num_blocks * 16 for slots in batch.slots)
    assert np.array_equal(batch.positions[batch.query_start[1:] - 1] + 1, batch.kv_len)
    profile(runner)  # what libraries allocate once is the framework's
    low, high = plan.intervals["activation_bytes"]
    # Memory that an earlier step gave back to the allocator but not to the kernel is not seen a second time.
    assert 0 < profile(runner) <= high, (low, high)


async def test_loaded_plan_has_measured_bytes_and_an_engine_death_while_loading_names_the_plan() -> None:
    plan = plan_for()
    first = HFEngine(plan)
    await first.start()
    try:
        revised = first.capacity().plan
        rank = revised.rank
        assert (plan.revision, revised.revision) == (0, 1)
        assert (rank.weights_bytes, rank.kv_pool_bytes) == (plan.rank.weights_bytes, plan.rank.kv_pool_bytes)
        assert 0 < rank.activation_bytes < plan.intervals["activation_bytes"][1]
        assert 0 < rank.used_bytes <= rank.total_bytes
    finally:
        await first.stop()
    second = HFEngine(plan)
    starting = asyncio.create_task(second.start())
    while second.pid is None:  # noqa: ASYNC110  (there is no event to wait for)
        await asyncio.sleep(0.01)
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match=f"needs {plan.rank.used_bytes:,} bytes"):
        await starting


async def test_engine_start_without_enough_free_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for()
    monkeypatch.setattr(engine, "available_memory", lambda: plan.rank.used_bytes - 1)
    refused = HFEngine(plan)
    with pytest.raises(DoesNotFit, match="other programs leave"):
        await refused.start()
    assert refused.pid is None
