"""Step `out-of-memory`: the plan refuses a pool larger than the device; without a plan, torch's error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tonnage.server.engines.hf.model.device import memory_of
from tonnage.server.engines.hf.pool import PagedPool

from .models import Target, spec, write
from .rows import OFF, OK, Row, skipped

_BEYOND = 1.02  # share of the largest pool that fits
_CPU_BYTES = 3 << 30  # memory of the planned machine on a CPU, where nothing is allocated


def run(target: Target) -> Iterator[Row]:
    """Plan the largest pool and one 2 % larger; on a GPU, allocate the larger one without the plan."""
    folder = write(spec("large", target.device), target.folder, "bfloat16")
    # Without a size, a pool takes the rest of the memory, on a CPU at most what max_num_seqs sequences fill.
    flags: dict[str, Any] = {
        "gpu_memory_utilization": 1.0,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        "device_memory": target.memory or _CPU_BYTES,
    }
    largest = target.plan(folder, "bfloat16", kv_cache_memory_bytes=None, **flags)
    yield Row(
        "largest pool that fits", largest.rank.kv_pool_bytes, "bytes", verdict=OK if largest.fits else OFF
    )
    beyond = int(largest.rank.kv_pool_bytes * _BEYOND)
    plan = target.plan(folder, "bfloat16", kv_cache_memory_bytes=beyond, **flags)
    reason = "; ".join(plan.reasons)[:200]
    yield Row(
        "a pool 2 % larger",
        "planned as fitting" if plan.fits else "refused",
        verdict=OFF if plan.fits else OK,
        note=reason,
    )
    device = memory_of(torch.device(target.device))
    if device is None:
        yield skipped("the pool without a plan", "on a CPU the kernel would kill a process")
        return
    blocks = int(device.free() * _BEYOND) // plan.kv_cache.layout.bytes_per_block
    try:
        PagedPool(plan.kv_cache.layout, blocks, torch.device(target.device))
    except torch.OutOfMemoryError as error:
        yield Row("a pool of 102 % of the free memory, without a plan", str(error)[:200], verdict=OK)
    else:
        yield Row("a pool of 102 % of the free memory, without a plan", "allocated", verdict=OFF)
