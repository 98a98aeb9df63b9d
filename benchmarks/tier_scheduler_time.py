"""CPU time that the disk tier takes of vLLM's scheduler thread in one step.

    python benchmarks/tier_scheduler_time.py --json       half a minute
    python benchmarks/tier_scheduler_time.py --check      exit 1 if a step takes more than 0.1 ms

vLLM 0.32's own manager of tiers makes the tier. In each step a request of 3,000 tokens arrives and finds its
first 2,048 tokens on disk, 8,192 tokens of prompts are stored (vLLM's default budget on large GPUs), finished
jobs and statistics are collected, and a request ends. Meanwhile the tier's threads write, evict and read.
Chunks have the tokens of one block, as by default, or of eight. The last line is JSON, times are in
microseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

AIM = 100.0  # microseconds
PROMPT, KNOWN, BUDGET = 3_000, 2_048, 8_192  # tokens
BLOCK = 16  # tokens
CHUNK_BYTES = 4_096  # the scheduler's thread touches no bytes of a chunk


def new_manager(folder: Path, chunks: int) -> Any:
    """Return vLLM's manager of a host tier of ``chunks`` and our disk tier."""
    tier = {
        "type": "tonnage", "module_path": "tonnage.server.engines.vllm.disk_tier", "path": str(folder),
        "size": "64MiB", "prefill": 1,
    }  # fmt: skip
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(BLOCK, ("layer.0",), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": chunks * CHUNK_BYTES, "secondary_tiers": [tier]},
        engine_id=f"benchmark-{time.monotonic_ns()}",
        model=OffloadingModelConfig("a/b", "bfloat16"),
        cache=OffloadingCacheConfig(BLOCK, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    return TieringOffloadingSpec(config).get_manager()


def keys_of(first: int, count: int) -> list[Any]:
    """Return vLLM's keys of chunks; each is a hash of 32 bytes and a group."""
    return [
        make_offload_key(hashlib.sha256(str(at).encode()).digest(), 0) for at in range(first, first + count)
    ]


def measure(tokens: int, steps: int, folder: Path) -> dict[str, Any]:
    """Return the CPU time of each kind of call in a step, with chunks of ``tokens``."""
    manager = new_manager(folder, 4_096)
    tier, stored = manager.secondary_tiers[0], BUDGET // tokens
    known = keys_of(0, KNOWN // tokens)
    unknown = keys_of(10**6, 1)
    job = 0

    def made(keys: list[Any], load: bool, context: Any) -> Any:
        nonlocal job
        job += 1
        return TransferJob(job, keys, np.arange(len(keys), dtype=np.int64), load, context)

    tier._store.wait_until_ready(60.0)
    tier.submit_store(made(known, False, ReqContext("before")))
    tier.drain_jobs()
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Any, *given: Any) -> Any:
        since = time.thread_time_ns()
        found = call(*given)
        took[name][-1] += (time.thread_time_ns() - since) / 1000
        return found

    def look(context: Any) -> int:
        for at, key in enumerate(known):
            if tier.lookup(key, context) is not LookupResult.HIT:
                return at
        tier.lookup(unknown[0], context)
        return len(known)

    hits = 0
    for step in range(steps):
        for name in ("request", "lookup", "submit_load", "submit_store", "get_finished_jobs", "get_stats"):
            took.setdefault(name, []).append(0.0)
        context = ReqContext(f"request-{step}")
        new = keys_of(2 * 10**6 + step * stored, stored)
        timed("request", tier.on_new_request, context)
        hits += timed("lookup", look, context)
        timed("submit_load", tier.submit_load, made(known, True, context))
        timed("submit_store", tier.submit_store, made(new, False, context))
        timed("get_finished_jobs", tier.get_finished_jobs)
        timed("get_stats", tier.get_stats)
        timed("request", tier.on_request_finished, context)
        time.sleep(0.01)  # a short step of the model
    tier.drain_jobs()
    counts = tier._store.counts()
    manager.shutdown()
    total = [sum(values) for values in zip(*took.values(), strict=True)][
        10:
    ]  # threads start in the first steps
    return {
        "chunk_tokens": tokens, "chunks_stored": stored, "lookups": len(known) + 1,
        "median_us": statistics.median(total), "mean_us": statistics.fmean(total),
        "p99_us": statistics.quantiles(total, n=100)[98],
        "calls_median_us": {name: statistics.median(values[10:]) for name, values in took.items()},
        "hit_chunks": hits, "written": counts.stored, "dropped": counts.dropped, "evicted": counts.evicted,
        "read": counts.loaded,
    }  # fmt: skip


def main() -> int:
    """Measure both sizes of chunks and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--check", action="store_true", help="exit 1 if the median step exceeds 0.1 ms")
    parser.add_argument("--json", action="store_true", help="accepted: the last line is always JSON")
    options = parser.parse_args()
    found = []
    for blocks in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(BLOCK * blocks, options.steps, Path(folder)))
    wrong = [f"{each['median_us']:.0f} us of {each['chunk_tokens']} tokens" for each in found
             if each["median_us"] > AIM]  # fmt: skip
    for each in wrong:
        print(f"missed: {each}, aim {AIM:.0f}", file=sys.stderr)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "missed": wrong, "chunks": found}))
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
