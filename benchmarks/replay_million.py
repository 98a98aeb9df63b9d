"""Seconds and memory of `tonnage replay --tiers` on a generated trace of conversations, overloaded or not.

    python benchmarks/replay_million.py --requests 1000000 --json
    python benchmarks/replay_million.py --requests 20000 --scale 1        a server that keeps up

Conversations begin with one of four system prompts, and each turn adds a question and the last answer. With
--scale 10, requests arrive several times faster than the GPU computes, so that most wait. The command replays
the trace without and with the tiers, in two processes at once; the figures are those of both. --check exits
with 1 if a million requests would take more than 8 minutes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

BLOCK = 128  # tokens of a hash id
SYSTEM = 4  # blocks of a system prompt
RATE = 12.0  # requests per second: about what one H100 computes of an 8B model
THINK = 60.0  # mean seconds between the turns of a conversation
AIM_SECONDS = 480.0  # of a million requests
_PROMPTS = 4


def write_trace(file: TextIO, requests: int, seed: int = 0) -> None:
    """Write a request log of conversations in order of arrival."""
    draw, fresh, now = random.Random(seed), _PROMPTS * SYSTEM, 0.0
    waiting: list[tuple[float, int, list[int]]] = []  # time of the next turn, number, blocks so far
    for number in range(requests):
        now += draw.expovariate(RATE)
        if waiting and waiting[0][0] <= now:
            _, chat, blocks = heapq.heappop(waiting)
        else:
            first = draw.randrange(_PROMPTS) * SYSTEM
            chat, blocks = number, list(range(first, first + SYSTEM))
        added = 1 + min(15, int(draw.expovariate(1 / 3)))
        blocks = [*blocks, *range(fresh, fresh + added)]
        fresh += added
        answer = 1 + min(999, int(draw.expovariate(1 / 200)))
        record = {"arrival": round(now, 3), "prompt_tokens": len(blocks) * BLOCK, "output_tokens": answer,
                  "hash_ids": blocks, "hash_block": BLOCK}  # fmt: skip
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
        if draw.random() < 0.8 and len(blocks) < 48:
            heapq.heappush(waiting, (now + draw.expovariate(1 / THINK), chat, blocks))


def measure(folder: Path, arguments: argparse.Namespace, requests: int) -> dict[str, object]:
    """Return the figures of one run of the command."""
    trace = folder / "trace.jsonl"
    with trace.open("w") as file:
        write_trace(file, requests)
    command = [sys.executable, "-m", "tonnage.server.cli", "replay", str(trace), "--model", arguments.model]
    command += ["--gpu", "h100-80g", "--max-model-len", "8192", "--scale", str(arguments.scale), "--json"]
    command += ["--tiers", arguments.tiers, "--tier-policy", arguments.tier_policy]
    begin = time.monotonic()
    with (folder / "out").open("w+") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode, took = os.waitstatus_to_exitcode(status), time.monotonic() - begin
        if process.returncode:
            raise SystemExit(f"tonnage replay ended with {process.returncode}")
        out.seek(0)
        record = json.loads(out.read())
    seconds = used.ru_utime + used.ru_stime
    return {
        "requests": requests, "scale": arguments.scale, "tiers": arguments.tiers,
        "tier_policy": arguments.tier_policy, "seconds": round(took, 1), "cpu_seconds": round(seconds, 1),
        "microseconds_per_request": round(1e6 * took / requests, 1),
        "cpu_microseconds_per_request": round(1e6 * seconds / requests, 1),
        "peak_mib": used.ru_maxrss >> 10, "longest_wait_seconds": round(record["wait_seconds"]["max"], 1),
        "hit_rate_with_tiers": record["tiers"]["hit_rate_with_tiers"],
    }  # fmt: skip


def main() -> int:
    """Print the figures; return 1 with --check if a million requests would take too long."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--scale", type=float, default=10.0, help="multiply the rate of arrivals (default: 10)")
    parser.add_argument("--model", default="meta-llama/Meta-Llama-3.1-8B")
    parser.add_argument("--tiers", default="host=64GiB")
    parser.add_argument("--tier-policy", default="lru")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a million takes over 8 minutes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), arguments, 100)  # compiles what a new version of the code has to compile
        found = measure(Path(folder), arguments, arguments.requests)
    print(
        json.dumps(found) if arguments.json else "\n".join(f"{name}: {value}" for name, value in found.items())
    )
    slow = float(str(found["seconds"])) * 1e6 / arguments.requests > AIM_SECONDS
    return int(arguments.check and slow)


if __name__ == "__main__":
    raise SystemExit(main())
