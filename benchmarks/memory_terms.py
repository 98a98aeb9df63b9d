"""Measure each server process on a CPU beside weights and pool, as the source of the planner's figures.

    python benchmarks/memory_terms.py --json                        hf, the demo model, four settings
    python benchmarks/memory_terms.py --engine vllm --json demo "$(python benchmarks/gemma_model.py)"

It starts ``tonnage serve`` and reads RssAnon + RssShmem of each process twice: when ready, and after a load
that fills token budget and batch and contains a grammar-constrained answer. Exactly known memory (weights,
pool) is subtracted. The figures are in planner/engines/runtime/hf.py and planner/engines/vllm/cpu.py.
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
from pathlib import Path
from typing import Any

import httpx

from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.process_memory import process_tree, process_tree_bytes

POOL = ("--kv-cache-memory-bytes", "512MiB")
# (flags, requests, tokens of each prompt)
Case = tuple[tuple[str, ...], int, int]
HF: tuple[Case, ...] = (
    ((), 64, 300),
    (("--max-num-batched-tokens", "2048", "--max-num-seqs", "128"), 128, 100),
    (("--max-num-batched-tokens", "64", "--max-num-seqs", "16"), 32, 100),
    (("--dtype", "float32"), 64, 300),
)
VLLM: tuple[Case, ...] = (
    (("--max-model-len", "4096"), 64, 300),
    (("--max-model-len", "4096", "--dtype", "float32"), 64, 300),
)
VLLM_NAMES = {"VLLM::EngineCore": "core", "VLLM::Worker": "worker"}  # vLLM's process titles


def alone(pid: int) -> int:
    """Return the bytes of a process without its children."""
    children = [member for member in process_tree(pid)[1:] if parent(member) == pid]
    return process_tree_bytes(pid) - sum(map(process_tree_bytes, children))


def parent(pid: int) -> int:
    """Return the parent's process id."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def held(pid: int) -> dict[str, int]:
    """Return the bytes of each server process by name; the hf engine's include its children."""
    found = {"api": alone(pid)}
    for member in process_tree(pid)[1:]:
        command = Path(f"/proc/{member}/cmdline").read_text().replace("\0", " ").strip()
        if command in VLLM_NAMES:
            found[VLLM_NAMES[command]] = alone(member)
        elif "server.engines.hf " in f"{command} ":
            found["worker"] = process_tree_bytes(member)
        elif parent(member) == pid:
            found["others"] = found.get("others", 0) + process_tree_bytes(member)
    return found


async def load(url: str, requests: int, prompt_tokens: int, tokens: int) -> None:
    """Send ``requests`` requests and one with a grammar, and wait for all answers."""
    async with httpx.AsyncClient(timeout=600) as http:
        bodies: list[dict[str, Any]] = [
            {"prompt": [100 + i] * prompt_tokens, "max_tokens": tokens, "temperature": 1.0}
            for i in range(requests)
        ]
        bodies.append(
            {"prompt": [100], "max_tokens": tokens, "structured_outputs": {"json": {"type": "object"}}}
        )
        posts = (http.post(f"{url}/v1/completions", json={"model": "it"} | body) for body in bodies)
        for answer in await asyncio.gather(*posts):
            assert answer.status_code == 200, answer.text


def measure(engine: str, model: str, case: Case) -> dict[str, Any]:
    """Start a server with one setting and return the figures."""
    flags, requests, prompt_tokens = case
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", model, "--served-model-name", "it"]
    command += ["--port", "0", "--backend", engine, *POOL, *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(line.split()[-1] for line in server.stdout if line.startswith("ready on "))
        report = httpx.get(f"{url}/memory").json()
        rank = report["plan"]["ranks"][0]
        # vLLM on a CPU packs the weights and does not report their size.
        weights = report["measured"]["weights_bytes"] or rank["weights_bytes"]
        exact = weights + report["measured"]["kv_pool_bytes"]

        def beside() -> dict[str, int]:
            found = held(server.pid)
            return found | {"worker": found["worker"] - exact}

        ready = beside()
        asyncio.run(load(url, requests, prompt_tokens, 16))
        loaded = beside()
        peak = httpx.get(f"{url}/memory").json()["measured"]["process_peak_bytes"]
        planned = sum(v for k, v in rank.items() if k not in ("free_bytes", "total_bytes"))
        return {
            "model": Path(model).name,
            "flags": flags,
            "vocab_size": report["plan"]["model"]["vocab_size"],
            **{f"{name}_ready": size for name, size in ready.items()},
            **{f"{name}_loaded": size for name, size in loaded.items()},
            "peak_less_exact": peak - exact,
            "planned_framework": rank["framework_bytes"],
            "planned_activations": rank["activation_bytes"],
            "peak": peak,
            "planned": planned,
            "peak_over_planned": peak / planned,
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def main() -> int:
    """Measure all models and settings, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=["demo"])
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--quick", action="store_true", help="only the first setting")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    ensure_demo()
    settings = HF if args.engine == "hf" else VLLM
    cases = []
    for model in args.model:
        for setting in settings[:1] if args.quick else settings:
            since = time.monotonic()
            case = measure(args.engine, model, setting)
            cases.append(case | {"seconds": round(time.monotonic() - since, 1)})
            print(args.engine, case["model"], *case["flags"])
            for name, value in case.items():
                if isinstance(value, int):
                    print(f"  {name:20} {value:14,} bytes {value / 2**20:9.1f} MiB")
            print(f"  peak / planned {case['peak_over_planned']:.3f}", flush=True)
    if args.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
