"""A tenant's view of a server under attack, measured by a process of its own.

It runs one stream, a short request of the same tenant every second, and a probe of /health every 50 ms,
whether or not the previous probe was answered. It samples the memory of the server's processes every 100 ms.
It prints ``watching`` at the stream's first token. When its standard input ends, it waits until the stream
continues, at most PATIENCE seconds, and prints one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from abuse.raw_http import COMPLETIONS, Address, answer, connection, request
from tonnage.server.engines.process_memory import process_tree_bytes

PATIENCE = 90.0
PROBE_SECONDS, PROBE_LIMIT = 0.05, 60.0
STREAM_TOKENS = 7000  # a stream that outlives most cases


@dataclass
class Victim:
    """A client that reads one stream after another.

    A gap is the time between two events of a stream. After a stream that failed, it lasts until the next
    stream's event.
    """

    address: Address
    key: str
    gap: float = 0.0
    last: float = 0.0  # time of the last event
    tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Read streams until the task is cancelled."""
        body = {"prompt": "Once upon a time", "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
        while True:
            try:
                end = await self._stream(request(COMPLETIONS, self.key, body))
            except (OSError, asyncio.IncompleteReadError) as error:
                end = type(error).__name__
            if end != "ended":
                self.ends[end] += 1
                await asyncio.sleep(0.2)
            else:
                self.last = 0.0

    async def _stream(self, asked: bytes) -> str:
        async with connection(self.address) as (reader, writer):
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head[:15]:
                return f"refused {head.split(None, 2)[1].decode()}"
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    return "ended"
                if line.startswith(b'data: {"error"'):
                    return "error"
                if line.startswith(b"data: "):
                    now = time.monotonic()
                    if self.last:
                        self.gap = max(self.gap, now - self.last)
                    self.last = now
                    self.tokens += 1
        return "cut off"


async def asking(address: Address, key: str, seconds: list[float], answers: Counter[str]) -> None:
    """Send one short request per second and record each duration, and that of a request cut off at the end."""
    body = {"prompt": "a", "max_tokens": 1}
    while True:
        since = time.monotonic()
        said = "no answer"
        try:
            async with connection(address) as (reader, writer):
                writer.write(request(COMPLETIONS, key, body))
                said = await answer(reader)
        except OSError as error:
            said = type(error).__name__
        finally:
            seconds.append(time.monotonic() - since)
        answers[said] += 1
        await asyncio.sleep(1)


async def probing(address: Address, times: list[float]) -> None:
    """Probe /health every 50 ms without waiting for earlier probes, so a pause is measured in full."""

    async def probe(due: float) -> None:
        try:
            async with asyncio.timeout(PROBE_LIMIT), connection(address) as (reader, writer):
                writer.write(request("/health", "", extra="Connection: close\r\n"))
                said = await reader.read(-1)
        except asyncio.CancelledError:  # the measurement ends before the answer
            times.append(time.monotonic() - due)
            raise
        except (OSError, TimeoutError):
            said = b""
        times.append(time.monotonic() - due if said.startswith(b"HTTP/1.1 200") else PROBE_LIMIT)

    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(probe(due))
            due += PROBE_SECONDS
            await asyncio.sleep(max(0.0, due - time.monotonic()))


def held(pid: int) -> int:
    """Return RssAnon + RssShmem of one process in bytes, 0 if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return 0


def sampling(pid: int, peaks: dict[str, int], end: threading.Event) -> None:
    """Record the peak memory of the server's processes until ``end`` is set."""
    while not end.wait(0.1):
        api, everything = held(pid), process_tree_bytes(pid)
        peaks["api"] = max(peaks["api"], api)
        peaks["engine"] = max(peaks["engine"], everything - api)
        peaks["all"] = max(peaks["all"], everything)


def percentile(times: list[float], share: float) -> float:
    """Return the value that ``share`` of ``times`` do not exceed."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


async def watch(address: Address, key: str, pid: int) -> dict[str, Any]:
    """Measure a server until standard input ends; return the figures as a JSON object."""
    victim, times, seconds = Victim(address, key), list[float](), list[float]()
    answers: Counter[str] = Counter()
    peaks = {"api": 0, "engine": 0, "all": 0}
    end = threading.Event()
    threading.Thread(target=sampling, args=(pid, peaks, end), daemon=True).start()
    stream = asyncio.create_task(victim.run())
    while not victim.tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print("watching", flush=True)
    others = [
        asyncio.create_task(asking(address, key, seconds, answers)),
        asyncio.create_task(probing(address, times)),
    ]
    await asyncio.to_thread(sys.stdin.read)
    over = time.monotonic()
    while victim.last <= over and time.monotonic() < over + PATIENCE:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    went_on = victim.last > over
    gap = max(victim.gap, time.monotonic() - victim.last if victim.last else 0.0)
    end.set()
    for task in (stream, *others):
        task.cancel()
    await asyncio.gather(stream, *others, return_exceptions=True)
    return {
        "gap_s": round(gap, 3),
        "went_on": went_on,
        "tokens": victim.tokens,
        "lost": dict(victim.ends),
        "answer_s": round(max(seconds), 3),
        "answers": dict(answers),
        "health_p99_ms": round(1e3 * percentile(times, 0.99), 1),
        "health_max_ms": round(1e3 * max(times), 1),
        "probes": len(times),
        "api_bytes": peaks["api"],
        "engine_bytes": peaks["engine"],
        "all_bytes": peaks["all"],
    }


if __name__ == "__main__":
    port, key, pid, *certificate = sys.argv[1:]
    print(json.dumps(asyncio.run(watch(Address(int(port), *certificate), key, int(pid)))))
