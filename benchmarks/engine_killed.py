"""Measure how soon clients see the end of their streams after kill -9 of the engine (``told_s``).

The server is real (demo model, hf engine), with 20 streams in progress; ``told_s`` is the last of them. The
limit is
2 seconds. The engine's return takes as long as a start (``ready_s``). The tests check only the order of the
two.

    .venv/bin/python benchmarks/engine_killed.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil

STREAMS = 20
PROMISED = 2.0  # seconds


@contextmanager
def server() -> Iterator[tuple[str, psutil.Process]]:
    """Start ``tonnage serve demo`` and yield (URL, engine process) when it is ready."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0"]
    command += ["--kv-cache-memory-bytes", "512MiB", "--max-num-seqs", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))
        (engine,) = psutil.Process(process.pid).children()
        yield url, engine
    finally:
        process.terminate()
        process.communicate(timeout=60)


async def measure(url: str, engine: psutil.Process) -> dict[str, float]:
    """Kill the engine during the streams and return the seconds until the streams end and until it is ready."""
    begun = asyncio.Event()

    async def client(http: httpx.AsyncClient, number: int) -> float:
        body = {"model": "demo", "prompt": f"Story {number}:", "max_tokens": 400, "ignore_eos": True}
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line:
                    begun.set()
        return time.monotonic()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300, limits=limits) as http:
        clients = [asyncio.create_task(client(http, number)) for number in range(STREAMS)]
        await begun.wait()
        await asyncio.sleep(0.5)
        killed = time.monotonic()
        engine.kill()
        told = max(await asyncio.gather(*clients)) - killed
        while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return {"told_s": round(told, 3), "ready_s": round(time.monotonic() - killed, 3)}


def main() -> None:
    """Run the measurement; exit with 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with server() as (url, engine):
        found = asyncio.run(measure(url, engine))
    found["kept"] = found["told_s"] <= PROMISED
    if arguments.json:
        print(json.dumps(found))
    else:
        print(
            f"{STREAMS} streams ended within {found['told_s']} s (limit {PROMISED}), "
            f"ready after {found['ready_s']} s"
        )
    sys.exit(not found["kept"])


if __name__ == "__main__":
    main()
