"""Verify the memory guarantee: a server limited to its plan plus 3 % survives overload.

For each pool size, it reads the plan before anything loads and starts ``tonnage serve demo`` with a memory
limit of the planned process total + 3 %. The limit is a memory cgroup (v1 or v2), or RLIMIT_DATA where neither
is writable. Clients keep four times as many requests in flight as can run: mixed prompts, random lengths, and
one in ten clients disconnects in the middle. No process may be killed, no request lost, and the peak must stay
within 3 % of the plan.

    python benchmarks/memory_limit.py --json              10 minutes for each pool
    python benchmarks/memory_limit.py --seconds 60 --pools 512MiB
    python benchmarks/memory_limit.py --long              30 minutes
    python benchmarks/memory_limit.py --kv-offloading-size 1 --kv-offloading-disk DIR,4GiB

With KV tiers, only the upper bound is checked: the requests need not fill a tier.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.process_memory import process_tree_bytes

SLACK = 1.03
OVERLOAD = 4
GRACE = 60  # seconds for requests in flight after the end of the load; then the clients disconnect
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def planned_bytes(flags: list[str]) -> tuple[int, int]:
    """Return the plan's process total and its max_num_seqs."""
    command = [sys.executable, "-m", "tonnage.server.cli", "plan", "demo", "--json", *flags]
    plan = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rank = plan["ranks"][0]
    used = sum(value for name, value in rank.items() if name not in ("free_bytes", "total_bytes"))
    return used, plan["deployment"]["max_num_seqs"]


class Limit:
    """A memory limit for the processes started under it: cgroup v1, cgroup v2 or RLIMIT_DATA."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.folder: Path | None = None
        for kind, parent, file in (
            ("cgroup v1", V1, "memory.limit_in_bytes"),
            ("cgroup v2", V2, "memory.max"),
        ):
            folder = parent / f"tonnage-{os.getpid()}"
            with contextlib.suppress(OSError):
                folder.mkdir()
                self.kind, self.folder = kind, folder
                (folder / file).write_text(str(limit))
                return
            if self.folder is not None:
                self.close()
        self.kind = "RLIMIT_DATA"

    def enter(self) -> None:
        """Apply the limit to this new process, before it executes its program."""
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))

    def kills(self) -> int | None:
        """Return the number of processes that the kernel killed for memory, or None if it is not known."""
        if self.folder is None:
            return None
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                for line in (self.folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return None

    def close(self) -> None:
        """Remove the cgroup."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            self.folder = None


@contextlib.contextmanager
def server(flags: list[str], limit: Limit) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server under ``limit`` and yield (URL, process) when it is ready."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit.enter)
    try:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith("listening on "))
        url = next(lines, "").split()[-1:]
        if not url:
            raise SystemExit(f"the server ended with status {process.wait()}")
        while httpx.get(f"{url[0]}/ready").status_code != 200:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            time.sleep(0.2)
        yield url[0], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def client(http: httpx.AsyncClient, url: str, number: int, until: float, outcomes: Counter[str]) -> None:
    """Send one request after another until ``until``, and count the outcomes."""
    draw = random.Random(number)
    while time.monotonic() < until:
        shared = [100 + number % 7] * draw.choice((0, 0, 64, 256))
        prompt = shared + [draw.randrange(3, 49000) for _ in range(int(draw.expovariate(1 / 150)) + 1)]
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": prompt[:1500],
            "max_tokens": draw.randrange(1, 200),
            "temperature": draw.choice((0.0, 1.0)),
            "ignore_eos": True,
            "n": draw.choice((1, 1, 1, 2)),
            "stream": True,
        }
        leave_after = draw.randrange(1, 20) if draw.random() < 0.1 else None
        outcomes[await ask(http, url, body, leave_after)] += 1


async def ask(http: httpx.AsyncClient, url: str, body: dict[str, Any], leave_after: int | None) -> str:
    """Send one request and return its outcome; the client disconnects after ``leave_after`` events."""
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code in (429, 503):
                await asyncio.sleep(float(response.headers.get("retry-after", 1)))
                return "asked to retry later"
            if response.status_code != 200:
                return f"status {response.status_code}"
            seen = 0
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "answered"
                if not line.startswith("data: "):
                    continue
                # Only a key counts as an error: in generated text, "error" is a word like others.
                if "error" in json.loads(line.removeprefix("data: ")):
                    return f"lost: error in the stream: {line[:300]}"
                seen += 1
                if leave_after is not None and seen >= leave_after:
                    return "disconnected by the client"
            return "lost: the stream ended early"
    except httpx.HTTPError as error:
        return f"lost: {type(error).__name__}"


async def overload(url: str, clients: int, seconds: float, pid: int) -> tuple[Counter[str], int]:
    """Keep ``clients`` clients active for ``seconds``; return the outcomes and the peak memory in bytes."""
    outcomes: Counter[str] = Counter()
    peak = 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        until = time.monotonic() + seconds
        tasks = [asyncio.create_task(client(http, url, number, until, outcomes)) for number in range(clients)]
        while any(not task.done() for task in tasks) and time.monotonic() < until + GRACE:
            peak = max(peak, await asyncio.to_thread(process_tree_bytes, pid))
            await asyncio.sleep(0.5)
            if sys.stderr.isatty():
                print(
                    f"\r{time.monotonic() - until + seconds:6.0f} s {dict(outcomes)}", end="", file=sys.stderr
                )
        for task in tasks:
            outcomes["disconnected at the end"] += task.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(answer, Exception):
                raise answer
    return outcomes, peak


def measure(pool: str, seconds: float, tiers: list[str]) -> dict[str, Any]:
    """Run one pool size, with the flags ``tiers`` of KV tiers, and return the figures."""
    flags = ["--kv-cache-memory-bytes", pool, "--max-model-len", "2048", *tiers]
    planned, seqs = planned_bytes(flags)
    limit = Limit(int(planned * SLACK))
    try:
        with server(flags, limit) as (url, process):
            outcomes, sampled = asyncio.run(overload(url, OVERLOAD * seqs, seconds, process.pid))
            report = httpx.get(f"{url}/memory", timeout=60).json()
            peak = max(sampled, report["measured"]["process_peak_bytes"])
        kills = limit.kills()
    finally:
        limit.close()
    excess = peak / planned - 1
    lost = sum(count for name, count in outcomes.items() if name.startswith(("lost", "status")))
    return {
        "pool": pool,
        "tiers": tiers,
        "seconds": seconds,
        "limited_by": limit.kind,
        "clients": OVERLOAD * seqs,
        "planned_bytes": planned,
        "limit_bytes": limit.limit,
        "peak_bytes": peak,
        "peak_over_planned": round(peak / planned, 4),
        "killed": kills,
        "requests": dict(outcomes),
        "lost": lost,
        "kept": lost == 0 and not kills and (excess if tiers else abs(excess)) <= SLACK - 1,
    }


def main() -> int:
    """Run all pool sizes; return 1 if the guarantee does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pools", default="512MiB,4GiB")
    parser.add_argument("--seconds", type=float, default=600, help="duration of the overload for each pool")
    parser.add_argument("--long", action="store_true", help="30 minutes for each pool")
    parser.add_argument("--kv-offloading-size", metavar="GIB", help="host tier of the server")
    parser.add_argument("--kv-offloading-disk", metavar="DIR,SIZE", help="disk tier of the server")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    ensure_demo()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the server together with this process
    given = {name: getattr(args, name) for name in ("kv_offloading_size", "kv_offloading_disk")}
    tiers = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    cases = []
    for pool in args.pools.split(","):
        case = measure(pool, 1800 if args.long else args.seconds, tiers)
        cases.append(case)
        print(f"pool {pool}, {case['limited_by']}, {case['clients']} clients for {case['seconds']:.0f} s")
        for name in ("planned", "limit", "peak"):
            value = case[f"{name}_bytes"]
            print(f"  {name:8} {value:14,} bytes {value / 2**20:9.1f} MiB")
        print(f"  peak / planned {case['peak_over_planned']:.4f}, killed {case['killed']}, lost {case['lost']}")
        for outcome, count in sorted(case["requests"].items()):
            print(f"  {count:6} {outcome}")
        print("  kept" if case["kept"] else "  NOT kept", flush=True)
    if args.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "cases": cases}))
    return 0 if all(case["kept"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
