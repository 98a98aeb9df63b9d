"""Compare the learned order of KV tiers with LRU, ARC and the optimum, at five sizes of a trace.

    python benchmarks/tier_policy.py TRACE... --json --check

TRACE is any trace with hash ids, or a folder of agentic sessions. Each request loads its longest stored prefix,
stores its prompt in steps of --step tokens, and ends when --running later requests have started. The optimum
knows the future; its requests run one after the other, so it is an upper bound of all policies. --check exits
with 1 if learned hits less than LRU or ARC by more than 1 % of their hits at any size.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tier_replay import SHARES, run

from tonnage.cache.replay.chunk_store import POLICIES
from tonnage.cache.replay.tier_curve import chunk_uses, optimum
from tonnage.cache.replay.tiers import Tiers, TierSetup
from tonnage.cache.replay.trace import read_trace

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


def main() -> int:
    """Print the comparison; return 1 with --check if learned loses at a size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--running", type=int, default=32, help="requests that run at once (default: 32)")
    parser.add_argument("--step", type=int, default=8192, help="tokens of a prefill step (default: 8192)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit code 1 if learned loses at a size")
    arguments = parser.parse_args()
    rows = []
    for path in arguments.traces:
        for row in compare(path, arguments.limit, arguments.running, arguments.step):
            rows.append(row)
            if not arguments.json:
                rates = ", ".join(f"{name} {100 * row[name]:.2f} %" for name in (*POLICIES, "optimum"))
                stored = f"stored {row['lru_stored']:,} by LRU, {row['learned_stored']:,} learned"
                print(f"{row['trace']} {row['chunks']:>7,} chunks: {rates}; {stored}", flush=True)
    holds = all(row["holds"] for row in rows)
    if arguments.json:
        print(json.dumps({"tolerance": TOLERANCE, "holds": holds, "rows": rows}))
    return int(arguments.check and not holds)


if __name__ == "__main__":
    raise SystemExit(main())
