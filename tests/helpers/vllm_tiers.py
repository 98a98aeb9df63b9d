"""vLLM's own manager of tiers with our disk tier, driven as its connector does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from serving import PATIENCE
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK = 65_536  # bytes
NONE = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


@contextmanager
def manager(
    folder: Path, *, chunks: int = 4, dtype: str = "bfloat16", model: str = "a/b", **tier: Any
) -> Iterator[Any]:
    """Yield vLLM's manager of a host tier of some chunks and our disk tier."""
    options = {"path": str(folder), "size": "64MiB"} | tier
    made = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0",), 0),),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": chunks * CHUNK,
            "secondary_tiers": [
                {"type": "tonnage", "module_path": "tonnage.server.engines.vllm.disk_tier", **options}
            ],
        },
        engine_id=f"tests-{time.monotonic_ns()}",
        model=OffloadingModelConfig(model, dtype),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    found: Any = TieringOffloadingSpec(made).get_manager()
    try:
        found.secondary_tiers[0]._store.wait_until_ready(PATIENCE)
        yield found
    finally:
        found.shutdown()


def key(number: int) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def bytes_of(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, CHUNK, dtype=np.uint8)


def host(made: TieringOffloadingManager) -> np.ndarray[Any, Any]:
    """Return the bytes of the host tier, of shape (chunks, bytes of a chunk)."""
    return np.frombuffer(made.primary_tier.get_kv_memoryview(), dtype=np.uint8).reshape(-1, CHUNK)


def offload(made: TieringOffloadingManager, numbers: list[int]) -> None:
    """Offload chunks as the connector does: to the host tier, and from there to the disk."""
    offload_keys(made, [key(number) for number in numbers])


def offload_keys(made: TieringOffloadingManager, keys: list[Any]) -> None:
    """Offload chunks by their keys."""
    context = ReqContext(f"store-{keys[0]!r}")
    made.on_new_request(context)
    offload_and_finish(made, keys, context)


def offload_and_finish(made: TieringOffloadingManager, keys: list[Any], context: ReqContext) -> None:
    """Offload chunks of a request by their keys, end the request, and wait until its transfers have ended."""
    prepared = made.prepare_store(keys, context)
    assert prepared is not None
    for each, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
        host(made)[chunk] = bytes_of(int.from_bytes(each[:32], "big"))
    made.complete_store(prepared.keys_to_store, context)
    made.on_request_finished(context)
    until_idle(made)


def until_idle(made: TieringOffloadingManager) -> None:
    until = time.monotonic() + PATIENCE
    while made.has_pending_work():
        made.on_schedule_end(NONE)
        assert time.monotonic() < until
        time.sleep(0.001)


def fetch(made: TieringOffloadingManager, number: int) -> np.ndarray[Any, Any] | None:
    """Return the bytes of a chunk as a request of the engine would load them, or None after a miss."""
    context = ReqContext(f"load-{number}")
    made.on_new_request(context)
    until = time.monotonic() + PATIENCE
    while (found := made.lookup(key(number), context)) not in (LookupResult.HIT, LookupResult.MISS):
        made.on_schedule_end(NONE)
        assert time.monotonic() < until
        time.sleep(0.001)
    data = None
    if found is LookupResult.HIT:
        (chunk,) = made.prepare_load([key(number)], context).chunk_ids
        data = host(made)[chunk].copy()
        made.complete_load([key(number)], context)
    made.on_request_finished(context)
    until_idle(made)
    return data
