"""Measure a scrape of /metrics while the engine is under full load: ``p99_ms``, ``page_bytes``, ``series``.

16 streams from another process keep a real server busy (demo model, hf engine; ``--engine fake`` for the
in-process one). Every 50 ms, /metrics is read over one keep-alive connection, as Prometheus does. A plain
socket reads it, so that no client parsing is timed. ``render_cpu_ms``, ``page_bytes`` and ``series`` are of
one page with 50 tenants, rendered in its own process without HTTP.

    .venv/bin/python benchmarks/metrics_scrape.py --json
"""

from __future__ import annotations

import argparse
import json
import math
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

TENANTS = 50
STREAMS = 16
SCRAPES = 400


@contextmanager
def server(engine: str) -> Iterator[str]:
    """Start ``tonnage serve demo`` and yield its URL when it is ready."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0", "--backend", engine]
    command += ["--kv-cache-memory-bytes", "256MiB", "--max-model-len", "2048"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def load(url: str) -> Iterator[Callable[[], int]]:
    """Keep ``STREAMS`` streams active from another process.

    Yields a function that stops them and returns the number of ended streams.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, "--streams-for", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield lambda: int(process.communicate()[0])
    finally:
        process.kill()
        process.wait()


def keep_streaming(url: str) -> int:
    """Start a new stream when one ends, until standard input closes; return the number of ended streams."""
    address, finished = address_of(url), 0
    body = json.dumps(
        {"model": "demo", "prompt": "Once upon a time", "max_tokens": 200, "stream": True}
    ).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    asked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head.encode() + body
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        free = STREAMS
        while True:
            for _ in range(free):
                stream = socket.create_connection(address)
                stream.sendall(asked)
                selector.register(stream, selectors.EVENT_READ)
            free = 0
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return finished
                stream = cast(socket.socket, key.fileobj)
                if not stream.recv(1 << 16):
                    selector.unregister(stream)
                    stream.close()
                    free, finished = free + 1, finished + 1


def address_of(url: str) -> tuple[str, int]:
    """Return (host, port) of ``url``."""
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def scrape(connection: socket.socket) -> tuple[float, bytes]:
    """Return the seconds from sending the request to the last byte, and the page."""
    began = time.perf_counter()
    connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    head, answer, size = b"", b"", None
    while size is None or len(answer) < size:
        part = connection.recv(1 << 20)
        assert part, "the server closed the connection"
        answer += part
        if size is None and b"\r\n\r\n" in answer:
            head, _, answer = answer.partition(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    seconds = time.perf_counter() - began
    assert head.startswith(b"HTTP/1.1 200"), head[:200]
    return seconds, answer


def over_http(url: str, scrapes: int) -> dict[str, float]:
    """Scrape the server ``scrapes`` times and return the latencies."""
    times = []
    with socket.create_connection(address_of(url)) as connection:
        for _ in range(scrapes):
            times.append(1e3 * scrape(connection)[0])
            time.sleep(0.05)
    times.sort()
    return {
        "p50_ms": statistics.median(times),
        "p99_ms": times[min(len(times) - 1, math.ceil(0.99 * len(times)) - 1)],
        "max_ms": times[-1],
    }


def in_process() -> dict[str, Any]:
    """Return the CPU time and the size of a page with TENANTS tenants."""
    from tonnage.planner.deployment import Deployment
    from tonnage.planner.planning.build import make_plan
    from tonnage.server.engines.fake import FakeEngine
    from tonnage.server.observe.metrics import Metrics
    from tonnage.server.security.tenants import Tenant
    from tonnage.server.settings import Settings
    from tonnage.server.state import ServerState
    from tonnage.server.text.tokenizer import Tokenizer

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
    """Run both measurements and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the result")
    parser.add_argument("--engine", default="hf", choices=("hf", "fake"))
    parser.add_argument("--scrapes", type=int, default=SCRAPES)
    parser.add_argument("--streams-for", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.streams_for:
        print(keep_streaming(arguments.streams_for))
        return 0
    result: dict[str, Any] = {"engine": arguments.engine, "streams": STREAMS, "tenants": TENANTS}
    result |= in_process()
    with server(arguments.engine) as url, load(url) as end:
        time.sleep(3)
        result |= over_http(url, arguments.scrapes)
        result["requests_finished"] = end()
    if not arguments.json:
        print("a scrape of /metrics under load, one page every 50 ms")
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
