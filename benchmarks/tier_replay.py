"""Compare the replay of KV tiers with vLLM's CPUOffloadingManager, call by call, and the curve with replays.

    python benchmarks/tier_replay.py TRACE --json

TRACE is a Mooncake trace or a request log with hash ids. Each request loads its longest stored prefix, stores
its prompt in steps of --step tokens, and ends when --running later requests have started. Both stores get every
call, and every answer (hit, chunks stored, chunks evicted) must be equal. The curve's hit rates are compared
with those of a replay whose requests run one after the other, at five sizes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

from tonnage.cache.replay.chunk_store import ChunkStore, ChunkUse
from tonnage.cache.replay.tier_curve import chunk_uses, tier_curve
from tonnage.cache.replay.tiers import Tiers, TierSetup, chunk_tokens_of
from tonnage.cache.replay.trace import Trace, read_trace

SHARES = (0.01, 0.05, 0.2, 0.5, 0.9)  # sizes, as shares of the trace's distinct chunks


class Differs(AssertionError):
    """An answer of our store that differs from vLLM's."""


class Both:
    """Our store and vLLM's manager behind one interface; an answer that differs raises Differs."""

    def __init__(self, capacity: int, policy: str) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.base, self.calls = base, 0
        self.ours = ChunkStore(capacity, policy)
        self.theirs = CPUOffloadingManager(num_chunks=capacity, cache_policy=policy)
        self.contexts: dict[ChunkUse, Any] = {}
        self._writers: dict[int, Any] = {}
        self.evicted = 0

    stored = property(lambda self: self.ours.stored)
    refused = property(lambda self: self.ours.refused)
    declined = property(lambda self: self.ours.declined)

    def key(self, key: int) -> Any:
        """Return vLLM's key of a chunk."""
        return self.base.make_offload_key(key.to_bytes(8, "big"), 0)

    def context(self, use: ChunkUse) -> Any:
        """Return vLLM's context of a request, with the places of its chunks."""
        if use not in self.contexts:
            context = self.contexts[use] = self.base.ReqContext(req_id=str(id(use)))
            self.theirs.on_new_request(context)
            for place, key in enumerate(use.keys):
                context.set_offload_key_position(self.key(key), place)
        return self.contexts[use]

    def check(self, what: str, ours: object, theirs: object) -> None:
        """Raise Differs if two answers differ."""
        self.calls += 1
        if ours != theirs:
            raise Differs(f"call {self.calls}, {what}: {ours!r:.200} and vLLM's {theirs!r:.200}")

    def lookup(self, key: int) -> bool:
        """Look a chunk up in both."""
        found = self.ours.lookup(key)
        theirs = self.theirs.lookup(self.key(key), self.base.ReqContext(req_id="lookup"))
        self.check("lookup", found, theirs is self.base.LookupResult.HIT)
        return found

    def load(self, use: ChunkUse, start: int, end: int) -> None:
        """Begin a load in both."""
        self.ours.load(use, start, end)
        self.theirs.prepare_load([self.key(key) for key in use.keys[start:end]], self.context(use))

    def loaded(self, use: ChunkUse, start: int, end: int) -> None:
        """End a load in both."""
        self.ours.loaded(use, start, end)
        self.theirs.complete_load([self.key(key) for key in use.keys[start:end]], self.context(use))

    def store(self, use: ChunkUse, start: int, end: int) -> list[int] | None:
        """Begin a store in both."""
        before = self.ours.evicted
        new = self.ours.store(use, start, end)
        theirs = self.theirs.prepare_store([self.key(key) for key in use.keys[start:end]], self.context(use))
        self.check("refusal of a store", new is None, theirs is None)
        if new is not None and theirs is not None:
            self.check("chunks stored", [self.key(key) for key in new], theirs.keys_to_store)
            self.check("chunks evicted", self.ours.evicted - before, len(theirs.evicted_keys))
            for key in theirs.evicted_keys:
                self.check("an evicted chunk", int.from_bytes(key[:8], "big") in self.ours.order, False)
            self.evicted += len(theirs.evicted_keys)
            self._writers.update(dict.fromkeys(new, self.context(use)))
        return new

    def written(self, keys: list[int]) -> None:
        """End a store in both."""
        self.ours.written(keys)
        for key in keys:
            self.theirs.complete_store([self.key(key)], self._writers.pop(key))

    def finish(self, use: ChunkUse) -> None:
        """End a request in both."""
        self.ours.finish(use)
        self.theirs.on_request_finished(self.context(use))
        del self.contexts[use]


def run(trace: Trace, tiers: Tiers, running: int, step: int) -> int:
    """Let every request load, store and end; return the tokens of all prompts that were loaded."""
    live: deque[int] = deque()
    for number, request in enumerate(trace.requests):
        loaded, _ = tiers.load(number, request, 0, 0.0)
        if loaded:
            tiers.loaded(number)
        for reached in range(loaded + step, request.prompt_tokens + step, step):
            tiers.computed(number, min(reached, request.prompt_tokens))
            tiers.step_ended()
        live.append(number)
        if len(live) > running:
            tiers.ended(live.popleft())
    while live:
        tiers.ended(live.popleft())
    return tiers.counts.hit_tokens


def against_vllm(trace: Trace, distinct: int, running: int, step: int) -> list[dict[str, Any]]:
    """Return hits and stores of both, for LRU and ARC at three sizes."""
    found = []
    for policy in ("lru", "arc"):
        for share in SHARES[:3]:
            capacity = max(1, int(share * distinct))
            both = Both(capacity, policy)
            size = chunk_tokens_of(trace)
            tiers = Tiers(TierSetup(capacity * size, 1, policy=policy), size, host=both)
            differs = ""
            try:
                run(trace, tiers, running, step)
            except Differs as error:
                differs = str(error)
            found.append(
                {"policy": policy, "chunks": capacity, "hit_tokens": tiers.counts.hit_tokens,
                 "chunks_stored": both.stored, "chunks_evicted": both.evicted, "answers_compared": both.calls,
                 "equal": not differs, "difference": differs}
            )  # fmt: skip
    return found


def curve_against_replays(trace: Trace, distinct: int, step: int) -> dict[str, Any]:
    """Return hit rates of the curve beside those of one replay for each size, and the seconds of both."""
    begin = time.perf_counter()
    curve = tier_curve(chunk_uses(trace))
    once, size = time.perf_counter() - begin, chunk_tokens_of(trace)
    tokens, rows, replays = sum(request.prompt_tokens for request in trace.requests), [], 0.0
    for share in SHARES:
        capacity = max(1, int(share * distinct))
        begin = time.perf_counter()
        hits = run(trace, Tiers(TierSetup(capacity * size, 1), size), 0, step)
        replays += time.perf_counter() - begin
        rows.append({"chunks": capacity, "curve": round(curve.hit_rate(capacity), 5),
                     "replay": round(hits / tokens, 5)})  # fmt: skip
    worst = max(abs(row["curve"] - row["replay"]) for row in rows)
    return {"sizes": rows, "largest_difference_points": round(100 * worst, 3), "curve_seconds": round(once, 2),
            "replay_seconds": round(replays, 2), "sampled": round(curve.rate, 4)}  # fmt: skip


def main() -> int:
    """Print the comparisons; return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--running", type=int, default=32, help="requests that run at once (default: 32)")
    parser.add_argument("--step", type=int, default=8192, help="tokens of a prefill step (default: 8192)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, limit=arguments.limit)
    distinct = len(
        {(r.hash_ids or ())[i] for r in trace.requests for i in range(r.prompt_tokens // r.hash_block)}
    )
    vllm = against_vllm(trace, distinct, arguments.running, arguments.step)
    curve = curve_against_replays(trace, distinct, arguments.step)
    equal = all(row["equal"] for row in vllm)
    if arguments.json:
        print(json.dumps({"requests": len(trace.requests), "distinct_chunks": distinct, "equal": equal,
                          "against_vllm": vllm, "curve": curve}))  # fmt: skip
    else:
        for row in vllm:
            print(f"{row['policy']} {row['chunks']:>7,} chunks: {row['hit_tokens']:>12,} hit tokens, "
                  f"{row['chunks_stored']:>9,} stored, {row['answers_compared']:>9,} answers "
                  f"{'equal' if row['equal'] else 'DIFFER: ' + row['difference']}")  # fmt: skip
        for row in curve["sizes"]:
            print(f"curve {row['chunks']:>7,} chunks: {row['curve']:.5f}, replay {row['replay']:.5f}")
        print(f"curve {curve['curve_seconds']} s, five replays {curve['replay_seconds']} s")
    return int(not equal)


if __name__ == "__main__":
    raise SystemExit(main())
