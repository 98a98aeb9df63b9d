"""What a scrape of /metrics costs while the engine is under full load: ``p99_ms``, ``page_bytes``, ``series``.

A real server (demo model, hf engine; ``--engine fake`` for the in-process one) is kept full by 16 streams.
Every 50 ms /metrics is read by a plain socket, so that no client's parsing is timed. ``render_cpu_ms``,
``page_bytes`` and ``series`` are of one page with 50 tenants, in a process of its own and without HTTP.

    .venv/bin/python benchmarks/metrics_scrape.py --json
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TENANTS = 50
STREAMS = 16
SCRAPES = 400


@contextmanager
def server(engine: str) -> Iterator[str]:
    """URL of a ready ``tonnage serve demo``."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0", "--backend", engine]
    command += ["--kv-cache-memory-bytes", "256MiB", "--max-model-len", "2048"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))
    finally:
        process.terminate()
        process.communicate(timeout=30)


class Load:
    """Keeps ``STREAMS`` streams going until stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(STREAMS)]
        self.finished = 0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            body = {"model": "demo", "prompt": f"stream {number}", "max_tokens": 200, "stream": True}
            request = urllib.request.Request(
                f"{self._url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                while answer.read(65536) and not self._stop.is_set():
                    pass
            self.finished += 1


def scrape(address: tuple[str, int]) -> tuple[float, bytes]:
    """Seconds from sending the request to the last byte, and the page."""
    with socket.create_connection(address) as connection:
        began = time.perf_counter()
        connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        parts = []
        while part := connection.recv(1 << 20):
            parts.append(part)
        seconds = time.perf_counter() - began
    head, _, page = b"".join(parts).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head[:200]
    return seconds, page


def over_http(url: str, scrapes: int) -> dict[str, float]:
    host, port = url.removeprefix("http://").split(":")
    address = (host, int(port))
    times = []
    for _ in range(scrapes):
        times.append(1e3 * scrape(address)[0])
        time.sleep(0.05)
    times.sort()
    return {
        "p50_ms": statistics.median(times),
        "p99_ms": times[min(len(times) - 1, math.ceil(0.99 * len(times)) - 1)],
        "max_ms": times[-1],
    }


def in_process() -> dict[str, Any]:
    """CPU time of a page with TENANTS tenants, and its size."""
    from tonnage.planner.build import make_plan
    from tonnage.planner.plan import Deployment
    from tonnage.server.engines.fake import FakeEngine
    from tonnage.server.metrics import Metrics
    from tonnage.server.security.tenants import Tenant
    from tonnage.server.settings import Settings
    from tonnage.server.state import ServerState
    from tonnage.server.text import Tokenizer

    plan = make_plan("demo", Deployment(kv_cache_memory_bytes=256 << 20, max_model_len=2048))
    settings = Settings(model="demo")
    state = ServerState(settings, FakeEngine(plan), Tokenizer.from_folder(plan.model.path))
    metrics = Metrics(state)
    for number in range(TENANTS):
        state.accounts.receive("/v1/completions", str(number), Tenant(f"tenant-{number}")).finish("rejected")
    page = metrics.render()
    times = []
    for _ in range(200):
        began = time.process_time()
        metrics.render()
        times.append(1e3 * (time.process_time() - began))
    series = sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))
    return {"render_cpu_ms": statistics.median(times), "page_bytes": len(page), "series": series}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result only")
    parser.add_argument("--engine", default="hf", choices=("hf", "fake"))
    parser.add_argument("--scrapes", type=int, default=SCRAPES)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"engine": arguments.engine, "streams": STREAMS, "tenants": TENANTS}
    result |= in_process()
    with server(arguments.engine) as url, Load(url) as load:
        time.sleep(3)
        result |= over_http(url, arguments.scrapes)
    result["requests_finished"] = load.finished
    if not arguments.json:
        print("a scrape of /metrics under load, one page every 50 ms")
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
