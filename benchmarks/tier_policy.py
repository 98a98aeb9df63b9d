"""Compare the learned order of KV tiers with LRU, ARC and the optimum, at five sizes of a trace.

    python benchmarks/tier_policy.py TRACE... --json --check
    python benchmarks/tier_policy.py TRACE... --behind --check    a disk tier behind host memory of 1 %
    python benchmarks/tier_policy.py --generated --check

TRACE is any trace with hash ids, or a folder of agentic sessions. Each request loads its longest stored prefix,
stores its prompt in steps of --step tokens, and ends when --running later requests have started. The optimum
knows the future; its requests run one after the other, so it is an upper bound of all policies. --check exits
with 1 if learned hits less than LRU or ARC by more than 1 % of their hits at any size. With --behind, host
memory is LRU, and its 1 % are of the trace's distinct chunks.

--generated replays made workloads instead: conversations that continue between prompts that never return. It
varies their mix, the tier's chunks and the requests that run at once, and prints the hits of learned / LRU of
each. --check then exits with 1 if a ratio is below 0.99, and the output names the workload.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any

from tier_replay import SHARES, run

from tonnage.cache.replay.chunk_store import POLICIES
from tonnage.cache.replay.tier_curve import chunk_uses, optimum
from tonnage.cache.replay.tiers import Tiers, TierSetup
from tonnage.cache.replay.trace import Trace, TraceRequest, read_trace

HOST, DISKS = 0.01, (0.02, 0.05, 0.2)  # shares of the distinct chunks, with --behind
CHUNK = 512  # tokens of a chunk of the made workloads
TOLERANCE = 0.01  # of the hits of LRU and ARC


def compare(path: Path, limit: int | None, running: int, step: int) -> list[dict[str, Any]]:
    """Return hit rates and stored chunks of each policy at five sizes of one trace."""
    trace, rows = read_trace(path, limit=limit), []
    uses = chunk_uses(trace)
    size = uses.chunk_tokens
    for share in SHARES:
        chunks = max(1, int(share * uses.distinct))
        row: dict[str, Any] = {"trace": trace.name, "chunks": chunks, "share": share}
        for policy in POLICIES:
            tiers = Tiers(TierSetup(chunks * size, 1, policy=policy), size)
            hits = run(trace, tiers, running, step)
            row[policy] = round(hits / uses.prompt_tokens, 5)
            row[f"{policy}_stored"] = tiers.host.stored
        row["optimum"] = round(optimum(uses, chunks, rate=1.0), 5)
        row["holds"] = row["learned"] >= (1 - TOLERANCE) * max(row["lru"], row["arc"])
        rows.append(row)
        assert row["optimum"] >= max(row[policy] for policy in POLICIES), "a policy hits more than the optimum"
    return rows


def compare_behind(path: Path, limit: int | None, running: int, step: int) -> list[dict[str, Any]]:
    """Return hit rates of both tiers, and chunks written to disk, with each policy of the disk tier."""
    trace, rows = read_trace(path, limit=limit), []
    uses = chunk_uses(trace)
    size = uses.chunk_tokens
    host = max(1, int(HOST * uses.distinct))
    for share in DISKS:
        chunks = max(1, int(share * uses.distinct))
        row: dict[str, Any] = {"trace": trace.name, "chunks": chunks, "share": share, "host": host}
        for policy in ("lru", "learned"):
            tiers = Tiers(TierSetup(host * size, 1, disk_bytes=chunks * size, policy=policy), size)
            row[policy] = round(run(trace, tiers, running, step) / uses.prompt_tokens, 5)
            assert tiers.disk is not None
            row[f"{policy}_stored"] = tiers.disk.stored
        row["holds"] = row["learned"] >= (1 - TOLERANCE) * row["lru"]
        rows.append(row)
    return rows


def conversations(seed: int, requests: int, share: float, live: int, once: int) -> Trace:
    """Return a trace of conversations between prompts that never return.

    Args:
        seed: Seed of all draws.
        requests: Number of requests.
        share: Share of the requests that continue a conversation.
        live: Conversations that take turns at random; each ends after 8 turns, and a new one follows.
        once: Mean chunks of the other prompts.
    """
    draw, fresh, made = random.Random(seed), count(1), list[TraceRequest]()

    def new(chunks: int) -> list[int]:
        return [next(fresh) for _ in range(chunks)]

    chats = [(new(4), draw.randrange(8)) for _ in range(live)]
    for number in range(requests):
        if draw.random() < share:
            place = draw.randrange(live)
            ids, turns = chats[place]
            ids = [*ids, *new(1 + draw.randrange(3))]
            chats[place] = (new(4), 0) if turns == 7 else (ids, turns + 1)
        else:
            ids = new(1 + draw.randrange(2 * once - 1))
        made.append(TraceRequest(float(number), CHUNK * len(ids), 1, hash_ids=tuple(ids), hash_block=CHUNK))
    return Trace(f"conversations-{seed}", "log", tuple(made))


def compare_generated(requests: int, seeds: int, step: int) -> Iterator[dict[str, Any]]:
    """Yield the hits of LRU and learned, in chunks, on each generated workload."""
    for seed, share, live, once in product(range(seeds), (0.2, 0.5, 0.8), (16, 128), (4, 16)):
        trace = conversations(seed, requests, share, live, once)
        for running, chunks in product((1, 8, 32), (64, 256, 1024)):
            row: dict[str, Any] = {"seed": seed, "share": share, "live": live, "once": once,
                                   "running": running, "chunks": chunks}  # fmt: skip
            for policy in ("lru", "learned"):
                tiers = Tiers(TierSetup(chunks * CHUNK, 1, policy=policy), CHUNK)
                row[policy] = run(trace, tiers, running, step) // CHUNK
            row["ratio"] = round(row["learned"] / max(1, row["lru"]), 4)
            row["holds"] = row["learned"] >= (1 - TOLERANCE) * row["lru"]
            yield row


def print_generated(arguments: argparse.Namespace) -> bool:
    """Print the ratios of all generated workloads; return whether every one holds."""
    rows = []
    for row in compare_generated(arguments.requests, arguments.seeds, arguments.step):
        rows.append(row)
        if not arguments.json:
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    mean = math.exp(sum(math.log(max(1, row["learned"]) / max(1, row["lru"])) for row in rows) / len(rows))
    worst, below = min(row["ratio"] for row in rows), [row for row in rows if not row["holds"]]
    print(json.dumps({"workloads": len(rows), "geometric_mean": round(mean, 3), "worst": worst,
                      "below": below}))  # fmt: skip
    return not below


def main() -> int:
    """Print the comparison; return 1 with --check if learned loses at a size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--generated", action="store_true", help="replay made workloads instead of traces")
    parser.add_argument("--requests", type=int, default=3000, help="of a made workload (default: 3000)")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each made workload (default: 2)")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--running", type=int, default=32, help="requests that run at once (default: 32)")
    parser.add_argument("--step", type=int, default=8192, help="tokens of a prefill step (default: 8192)")
    parser.add_argument("--behind", action="store_true", help="compare disk tiers behind host memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit code 1 if learned loses at a size")
    arguments = parser.parse_args()
    if bool(arguments.traces) == arguments.generated:
        parser.error("name traces, or use --generated")
    if arguments.generated:
        return int(not print_generated(arguments) and arguments.check)
    rows, measure = [], compare_behind if arguments.behind else compare
    for path in arguments.traces:
        for row in measure(path, arguments.limit, arguments.running, arguments.step):
            rows.append(row)
            if not arguments.json:
                rates = ", ".join(
                    f"{name} {100 * row[name]:.2f} %" for name in (*POLICIES, "optimum") if name in row
                )
                stored = f"stored {row['lru_stored']:,} by LRU, {row['learned_stored']:,} learned"
                print(f"{row['trace']} {row['chunks']:>7,} chunks: {rates}; {stored}", flush=True)
    holds = all(row["holds"] for row in rows)
    if arguments.json:
        print(json.dumps({"tolerance": TOLERANCE, "holds": holds, "rows": rows}))
    return int(arguments.check and not holds)


if __name__ == "__main__":
    raise SystemExit(main())
