"""Where planner/engines/runtime/hf.py has its numbers for the hf engine on a CPU from: memory of each process.

Starts ``tonnage serve demo``, reads RssAnon + RssShmem of the API process and of the engine process when
ready and after a load that fills the token budget and the batch, and takes off what is known exactly (weights,
pool).

    python benchmarks/memory_terms.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx

from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.process_memory import process_tree, process_tree_bytes


def alone(pid: int) -> int:
    """Bytes of this process without its children."""
    tree = process_tree(pid)
    return process_tree_bytes(pid) - sum(process_tree_bytes(child) for child in tree[1:2])


async def load(url: str, requests: int, prompt_tokens: int, tokens: int) -> None:
    async with httpx.AsyncClient(timeout=600) as http:
        bodies = [
            {"model": "demo", "prompt": [100 + i] * prompt_tokens, "max_tokens": tokens, "temperature": 1.0}
            for i in range(requests)
        ]
        answers = await asyncio.gather(*(http.post(f"{url}/v1/completions", json=body) for body in bodies))
        assert all(answer.status_code == 200 for answer in answers)


def measure(flags: list[str], requests: int, prompt_tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(line.split()[-1] for line in server.stdout if line.startswith("listening on "))
        while httpx.get(f"{url}/ready").status_code != 200:
            time.sleep(0.2)
        engine = process_tree(server.pid)[1]
        report = httpx.get(f"{url}/memory").json()
        exact = report["measured"]["weights_bytes"] + report["measured"]["kv_pool_bytes"]
        found = {
            "flags": flags,
            "api_ready": alone(server.pid),
            "engine_ready": process_tree_bytes(engine) - exact,
        }
        asyncio.run(load(url, requests, prompt_tokens, 16))
        report = httpx.get(f"{url}/memory").json()
        rank = report["plan"]["ranks"][0]
        planned = sum(v for k, v in rank.items() if k not in ("free_bytes", "total_bytes"))
        peak = report["measured"]["process_peak_bytes"]
        return {
            **found,
            "api_loaded": alone(server.pid),
            "engine_loaded": process_tree_bytes(engine) - exact,
            "peak_less_exact": peak - exact,
            "planned_framework": rank["framework_bytes"],
            "planned_activations": rank["activation_bytes"],
            "peak": peak,
            "planned": planned,
            "peak_over_planned": peak / planned,
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    ensure_demo()
    pool = ["--kv-cache-memory-bytes", "512MiB"]
    cases = [
        measure([*pool], 64, 300),
        measure([*pool, "--max-num-batched-tokens", "2048", "--max-num-seqs", "128"], 128, 100),
        measure([*pool, "--max-num-batched-tokens", "64", "--max-num-seqs", "16"], 32, 100),
        measure([*pool, "--dtype", "float32"], 64, 300),
    ]
    for case in cases:
        print(" ".join(case["flags"]))
        for name, value in case.items():
            if isinstance(value, int):
                print(f"  {name:20} {value:14,} bytes {value / 2**20:9.1f} MiB")
        print(f"  peak / planned {case['peak_over_planned']:.3f}")
    if args.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
