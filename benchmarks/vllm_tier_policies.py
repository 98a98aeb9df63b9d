"""Hits of vLLM's KV tier in host memory with each policy of eviction, on traces with hash ids.

    python benchmarks/vllm_tier_policies.py TRACE ... --json
    python benchmarks/vllm_tier_policies.py TRACE ... --check    exit 1 unless learned is best and LRU >= FIFO

vLLM 0.32's CPUOffloadingManager holds the chunks. Each request loads its longest stored prefix, stores its
prompt in steps of --step tokens, and ends when --running later requests have started. Sizes are shares of the
trace's distinct chunks. Policies: vLLM's lru and arc, first in first out, and our learned order
(server/engines/vllm/host_policy.py). An order holds if it is missed by at most 1 % of the hits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from tonnage.cache.replay.tiers import chunk_keys, chunk_tokens_of
from tonnage.cache.replay.trace import Trace, read_trace

SHARES = (0.02, 0.1, 0.3)
TOLERANCE = 0.99


class FIFOCachePolicy(CachePolicy):
    """The chunk that was stored first is evicted first."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: dict[Any, ChunkStatus] = {}

    def get(self, key: Any) -> ChunkStatus | None:
        """Return a chunk, or None if it is not in the tier."""
        return self.chunks.get(key)

    def insert(self, key: Any, chunk: ChunkStatus) -> None:
        """Add a chunk."""
        self.chunks[key] = chunk

    def remove(self, key: Any) -> None:
        """Remove a chunk."""
        del self.chunks[key]

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """Do nothing: uses do not count."""

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, ChunkStatus]] | None:
        """Remove and return the ``n`` oldest idle chunks."""
        idle = (key for key, chunk in self.chunks.items() if chunk.ref_cnt == 0 and key not in protected)
        found = [key for key, _ in zip(idle, range(n), strict=False)]
        return [(key, self.chunks.pop(key)) for key in found] if len(found) == n else None

    def clear(self) -> None:
        """Remove all chunks."""
        self.chunks.clear()


POLICIES = {
    "learned": ("LearnedCachePolicy", "tonnage.server.engines.vllm.host_policy"),
    "lru": ("lru", None),
    "arc": ("arc", None),
    "fifo": ("FIFOCachePolicy", __name__),
}


class Request:
    """One request of a trace, as vLLM's connector tells the manager of it."""

    def __init__(self, manager: CPUOffloadingManager, number: int, keys: tuple[int, ...]) -> None:
        self.manager, self.context = manager, ReqContext(req_id=str(number))
        self.keys = [make_offload_key(key.to_bytes(8, "big"), 0) for key in keys]
        manager.on_new_request(self.context)
        for place, key in enumerate(self.keys):
            self.context.set_offload_key_position(key, place)

    def load(self) -> int:
        """Load the longest stored prefix; return its chunks."""
        found = 0
        while found < len(self.keys):
            if self.manager.lookup(self.keys[found], self.context) is not LookupResult.HIT:
                break
            found += 1
        self.manager.prepare_load(self.keys[:found], self.context)
        self.manager.complete_load(self.keys[:found], self.context)
        return found

    def store(self, start: int, end: int) -> None:
        """Store the chunks at places [start, end)."""
        prepared = self.manager.prepare_store(self.keys[start:end], self.context)
        if prepared is not None:
            self.manager.complete_store(prepared.keys_to_store, self.context)


def hit_chunks(trace: Trace, policy: str, capacity: int, running: int, step: int) -> int:
    """Return the chunks that all requests loaded."""
    name, module = POLICIES[policy]
    manager = CPUOffloadingManager(capacity, cache_policy=name, cache_policy_module_path=module)
    live: deque[Request] = deque()
    known: dict[tuple[int, int], int] = {}
    hits, each = 0, max(1, step // chunk_tokens_of(trace))
    for number, traced in enumerate(trace.requests):
        request = Request(manager, number, chunk_keys(traced, known))
        loaded = request.load()
        hits += loaded
        for start in range(loaded, len(request.keys), each):
            request.store(start, min(start + each, len(request.keys)))
        live.append(request)
        if len(live) > running:
            manager.on_request_finished(live.popleft().context)
    return hits


def measure(path: Path, limit: int | None, running: int, step: int) -> list[dict[str, Any]]:
    """Return the hits of each policy and size on one trace."""
    trace = read_trace(path, limit=limit)
    known: dict[tuple[int, int], int] = {}
    total = sum(len(chunk_keys(request, known)) for request in trace.requests)
    found = []
    for share in SHARES:
        row: dict[str, Any] = {"trace": path.name, "chunks": max(1, int(share * len(known))), "offered": total}
        for policy in POLICIES:
            since = time.process_time()
            row[policy] = hit_chunks(trace, policy, row["chunks"], running, step)
            row[f"{policy}_seconds"] = round(time.process_time() - since, 1)
        print(row, file=sys.stderr)
        found.append(row)
    return found


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Return the orders that do not hold."""
    wrong = []
    for better, worse in (("learned", "lru"), ("learned", "arc"), ("lru", "fifo")):
        wrong += [
            f"{row['trace']}, {row['chunks']} chunks: {better} {row[better]}, {worse} {row[worse]}"
            for row in rows if row[better] < TOLERANCE * row[worse]
        ]  # fmt: skip
    return wrong


def main() -> int:
    """Measure all traces and print the hits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, help="requests of each trace")
    parser.add_argument("--running", type=int, default=32, help="requests that run at once (default: 32)")
    parser.add_argument("--step", type=int, default=8192, help="tokens of a prefill step (default: 8192)")
    parser.add_argument("--check", action="store_true", help="exit 1 and name the orders that do not hold")
    parser.add_argument("--json", action="store_true", help="accepted: the last line is always JSON")
    options = parser.parse_args()
    rows = [
        row for path in options.traces for row in measure(path, options.limit, options.running, options.step)
    ]
    wrong = missed(rows)
    for each in wrong:
        print(f"missed: {each}", file=sys.stderr)
    print(json.dumps({"missed": wrong, "rows": rows}))
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
