"""A served demo model (float32, greedy) without a KV tier, with one, and after a restart with its folder."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from serving import PATIENCE, serving

SYSTEM = 3_000  # tokens of the system prompt
# 4,160 tokens in blocks of 16: the system prompt and one more request. 737,280 bytes each.
FLAGS = (
    "--dtype", "float32", "--kv-cache-memory-bytes", str(260 * 737_280), "--max-model-len", "4096",
    "--max-num-seqs", "4",
)  # fmt: skip


def tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 40_000) for _ in range(count)]


REQUESTS = {
    "system": tokens(1, SYSTEM) + tokens(2, 20),
    "other": tokens(3, 3_300),
    "again": tokens(1, SYSTEM) + tokens(4, 25),
}


@dataclass
class Server:
    """A running server, with the answers that it gave."""

    http: httpx.Client
    cached: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def ask(self, name: str) -> str:
        body: dict[str, Any] = {
            "model": "demo", "prompt": REQUESTS[name], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        since = time.monotonic()
        answer = self.http.post("/v1/completions", json=body).json()
        self.seconds[name] = time.monotonic() - since
        self.cached[name] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return str(answer["choices"][0]["text"])

    def metric(self, name: str) -> float:
        (found,) = [
            line.rpartition(" ")[2]
            for line in self.http.get("/metrics").text.splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        ]
        return float(found)

    def wait(self, name: str, value: float) -> None:
        until = time.monotonic() + PATIENCE
        while self.metric(name) < value:
            assert time.monotonic() < until
            time.sleep(0.1)


@contextmanager
def server(*flags: str, killed: bool = False) -> Iterator[Server]:
    with (
        serving("demo", *FLAGS, *flags, killed=killed) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        yield Server(http)


def test_kv_tier_changes_no_generated_token_and_survives_a_killed_server(tmp_path: Path) -> None:
    with server() as plain:
        expected = {name: plain.ask(name) for name in REQUESTS}
        assert plain.cached["again"] < 1_000  # the other request has taken blocks of the system prompt
        assert "tonnage_tier" not in plain.http.get("/metrics").text
    flags = ("--kv-offloading-size", "0.4", "--kv-offloading-disk", f"{tmp_path / 'kv'},1GiB")
    whole = SYSTEM // 16  # blocks
    with server(*flags, killed=True) as tiered:
        assert {name: tiered.ask(name) for name in REQUESTS} == expected
        assert tiered.cached["again"] == whole * 16
        assert tiered.metric("tonnage_tier_host_hit_tokens_total") > SYSTEM / 2
        memory = tiered.http.get("/memory").json()
        (rank,) = memory["plan"]["ranks"]
        size = int(0.4 * 2**30) // 737_280 * 737_280
        assert rank["kv_tier_bytes"] == memory["measured"]["kv_tier_bytes"] == size
        planned = rank["total_bytes"] - rank["free_bytes"]
        assert memory["measured"]["process_peak_bytes"] <= 1.03 * planned
        tiered.wait("tonnage_tier_stored_total", tiered.metric("tonnage_tier_host_stored_total"))
    with server(*flags) as restarted:
        restarted.wait("tonnage_tier_ready", 1)
        assert restarted.ask("again") == expected["again"]
        assert restarted.cached["again"] == (SYSTEM + 24) // 16 * 16
        assert restarted.metric("tonnage_tier_host_hit_tokens_total") == restarted.cached["again"]
        assert restarted.metric("tonnage_tier_loaded_total") == restarted.cached["again"] // 16
        assert restarted.seconds["again"] < tiered.seconds["system"] / 3
        print(f"seconds: {plain.seconds}, {tiered.seconds}, {restarted.seconds}")
