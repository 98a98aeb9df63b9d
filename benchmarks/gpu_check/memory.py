"""Steps `memory` and `host`: bytes on the device and on the host, compared with the plan of the same start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from tonnage.planner.engines.runtime.hf import HF_CHILD_BYTES, HF_INTERVAL
from tonnage.planner.plans import Plan
from tonnage.server.engines.hf.model.device import memory_of
from tonnage.server.engines.hf.model.loading import storage_bytes
from tonnage.server.engines.hf.model.profile import profile
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import checked_attention
from tonnage.server.engines.process_memory import process_tree_bytes

from .models import Target, spec, write
from .rows import INFO, Row, exact, within
from .serving import prompts_of, serve


def run(target: Target) -> Iterator[Row]:
    """Yield the measured bytes of each component, for the large model and the mixture of experts."""
    device = memory_of(torch.device(target.device))
    if device is not None:
        before = device.used()
        torch.zeros(1, device=target.device)
        context = device.used() - before
        yield Row(
            "context, first allocation included", context, "bytes", note="the driver counts a part of it before"
        )
    for kind in ("large", "experts", "windows"):
        shape = spec(kind, target.device)
        plan = target.plan(write(shape, target.folder, "bfloat16"), "bfloat16")
        yield from _components(plan, shape.name)


def _components(plan: Plan, name: str) -> Iterator[Row]:
    """Yield weights, pool and activations of one model, loaded and profiled as at a server's start."""
    runner = ModelRunner(plan)
    rank = plan.rank
    yield exact(f"{name}: weights", runner.weights_bytes, rank.weights_bytes)
    yield exact(f"{name}: KV pool", runner.pool.nbytes, rank.kv_pool_bytes)
    error = checked_attention(runner)
    yield Row(f"{name}: attention", runner.attention, note=f"relative error of the logits {error:.3g}")
    activations = profile(runner)
    bounds = plan.intervals["activation_bytes"]
    row = within(f"{name}: activations", activations, rank.activation_bytes, bounds)
    if runner.device.type == "cpu":  # allocations of a process vary by more than a model of two layers takes
        row = replace(row, verdict=INFO, note="peak of the process, too coarse for a model of this size")
    yield row
    yield exact(f"{name}: weights after a forward", storage_bytes(runner.model), rank.weights_bytes)
    device = memory_of(runner.device)
    if device is not None:
        rest = device.used() - runner.weights_bytes - runner.pool.nbytes - activations
        bounds = plan.intervals.get("framework_bytes", (0, 0))
        note = "the device's used memory less weights, pool and activations, other processes included"
        yield within(f"{name}: framework", rest, rank.framework_bytes, bounds, note)


def host(target: Target) -> Iterator[Row]:
    """Yield the anonymous memory of this process while it serves, compared with the plan's engine process."""
    shape = spec("small", target.device)
    plan = target.plan(write(shape, target.folder, "bfloat16"), "bfloat16")
    runner = ModelRunner(plan)
    serve(runner, prompts_of([64] * 16, runner.vocab_size), 16)
    held = process_tree_bytes(os.getpid())
    on_device = runner.weights_bytes + runner.pool.nbytes if target.device == "cpu" else 0
    process = held - on_device
    note = "anonymous memory of this process, whose steps before this one also count"
    low, high = (int(HF_CHILD_BYTES * share) for share in HF_INTERVAL)
    if plan.host is None:
        yield Row("engine process", process, "bytes", HF_CHILD_BYTES, low, high, INFO, note)
        return
    cuda = next(part for part in plan.host.parts if part.name == "CUDA")
    planned, bounds = HF_CHILD_BYTES + cuda.value, (low + cuda.low, high + cuda.high)
    yield Row("engine process with CUDA", process, "bytes", planned, *bounds, INFO, note)
