"""Compare the block manager with vLLM's on a trace: CPU time, hit rate, memory. Prints one JSON object.

    python benchmarks/kv_manager.py --trace TRACE.jsonl --n 2000 --blocks 262144 --running 32 --peer vllm --json

The loop is closed: at most --running requests run. A step gives each of them a token and frees the finished
ones. It then admits whole prompts from the head of the queue until --prefill-budget uncached tokens are
reached. Only calls into the managers are timed, in CPU time of the thread, because the machine may be shared.
Both sides receive the same lists of ints, and the first side changes with --rounds.

- ratio_request, ratio_append: vLLM's time divided by this project's, per request and per step of appends (p50
  of the steps with all --running requests).
- step_ms_worst: the longest step of the replay.
- step_ms_p50: a decode step of --running sequences with grants, appends, slots, tables and publishing, as an
  engine needs them.
- bytes_per_cached_block: growth of the resident memory of a fresh process that fills its pool, tokens included,
  divided by the cached blocks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import traces
from adapters import BLOCK_SIZE, Tonnage, Vllm

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.prefix.index import hash_row
from tonnage.cache.sequences.tables import token_array

clock = time.thread_time
# Fields of the manager's state with one entry per block.
BY_BLOCK = (
    *("refs", "next", "prev", "stamp", "node_of", "parent", "salt", "kind", "chain"),
    *("node_hash", "node_tokens", "node_blocks", "heads"),
)


def _overhead() -> float:
    """Return the duration of two consecutive clock readings, which is subtracted from every timed call."""
    return statistics.median(-(clock() - clock()) for _ in range(20_001))


@dataclass
class ReplayFigures:
    """The figures of one replay; times are in seconds of CPU."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    admit: float = 0.0
    append: float = 0.0
    free: float = 0.0
    full_appends: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def us_per_request(self) -> float:
        """Return the CPU microseconds per request."""
        return 1e6 * (self.admit + self.append + self.free) / self.requests

    @property
    def hit_rate(self) -> float:
        """Return the share of prompt tokens that were prefix hits."""
        return self.hit_tokens / self.prompt_tokens


def replay(
    cache: Any,
    loads: list[traces.TraceRequest],
    running: int,
    budget: int,
    *,
    tokens: traces.Tokens | None = None,
    progress: bool = False,
) -> ReplayFigures:
    """Replay ``loads`` in a closed loop with at most ``running`` requests.

    ``budget`` is the number of uncached prompt tokens that a step may admit.
    """
    out, tokens = ReplayFigures(), tokens or traces.Tokens()
    over = _overhead()
    queue: deque[tuple[int, list[int], int]] = deque()  # number, prompt, tokens to produce
    live: dict[int, list[Any]] = {}  # number -> [prompt, produced, wanted]
    position = 0
    while position < len(loads) or queue or live:
        step = 0.0
        if live:
            numbers = list(live)
            new = [traces.Tokens.output(number, live[number][1]) for number in numbers]
            start = clock()
            lost = cache.append(numbers, new)
            spent = clock() - start - over
            out.append += spent
            step += spent
            if len(numbers) == running:
                out.full_appends.append(spent)
            for number in numbers:
                live[number][1] += 1
            for number in lost:
                prompt, produced, wanted = live.pop(number)
                out.preemptions += 1
                known = prompt + [traces.Tokens.output(number, at) for at in range(produced)]
                queue.appendleft((number, known, wanted - produced))
        for number in [n for n, (_, produced, wanted) in live.items() if produced >= wanted]:
            start = clock()
            cache.free(number)
            spent = clock() - start - over
            out.free += spent
            step += spent
            del live[number]
        left = budget
        while len(live) < running and left > 0:
            if not queue:
                if position == len(loads):
                    break
                request = loads[position]
                queue.append((position, tokens.prompt(request), request.output_tokens))
                position += 1
            number, prompt, wanted = queue[0]
            start = clock()
            hit = cache.admit(number, prompt, wanted)
            spent = clock() - start - over
            out.admit += spent
            step += spent
            if hit is None:
                if not live:
                    raise SystemExit(f"request {number} of {len(prompt)} tokens never fits")
                break
            queue.popleft()
            left -= len(prompt) - hit
            # Count only first admissions, not preempted requests.
            if len(prompt) == loads[number].prompt_tokens:
                out.requests += 1
                out.prompt_tokens += len(prompt)
                out.hit_tokens += hit
            live[number] = [prompt, 0, wanted]
        out.steps.append(step)
        if progress and sys.stderr.isatty() and len(out.steps) % 512 == 0:
            print(f"\r{cache.name}: {position} of {len(loads)} requests", end="", file=sys.stderr)
    return out


def scheduler_step(running: int, steps: int) -> list[float]:
    """Return the CPU seconds of each decode step with all calls that an engine makes.

    These are grants, the tokens of the last step, blocks, slot mapping and block tables as arrays, and
    publishing. Prompts have 1,024 tokens.
    """
    cache = Tonnage(running * 140 + 10, running, policy=Policy(AdmissionMode.GUARANTEED))
    manager = cache.manager
    for number in range(running):
        prompt = [(number * 7919 + at * 13) % traces.VOCABULARY for at in range(1024 + number % 16)]
        assert cache.admit(number, prompt, 1000) is not None
    numbers, times, over = list(range(running)), [], _overhead()
    lengths = np.array([1024 + number % 16 for number in numbers])
    rows = np.array([manager.row(number) for number in numbers])
    gc.collect()
    gc.freeze()
    for step in range(steps):
        new = [traces.Tokens.output(number, step) for number in numbers]
        start = clock()
        manager.append(numbers, new)
        ends = manager.grant(numbers, lengths + 1)
        manager.extend(numbers, ends)
        slots = manager.slot_mapping(0, rows, ends - 1)
        tables = manager.tables[0][rows, : -(-int(ends.max()) // BLOCK_SIZE)]
        manager.commit(numbers, ends)
        times.append(clock() - start - over)
        lengths = ends
        assert len(slots) == running == len(tables)
    gc.unfreeze()
    return times


def hash_cost(blocks: int = 8192, rounds: int = 50) -> float:
    """Return the median microseconds per block to convert a list of ints to tokens and hash it."""
    tokens = [(at * 104_729) % traces.VOCABULARY for at in range(blocks * BLOCK_SIZE)]
    cache = Tonnage(blocks + 2, 1)
    core = cache.manager.core
    times = []
    for _ in range(rounds):
        start = clock()
        row = token_array(tokens)
        core.tokens[0, : len(row)] = row
        hash_row(core, 0, blocks)
        times.append(clock() - start)
        core.rows["hashed"][0] = 0
    return 1e6 * statistics.median(times) / blocks


def memory(blocks: int) -> dict[str, float]:
    """Fill a pool in this fresh process with prompts of 4,096 blocks and return its memory."""
    cache = Tonnage(64, 1)  # load compiled code and its libraries before the count
    for number in range(3):
        cache.admit(number, list(range(number, 400 + number)), 20)
        cache.append([number], [1])
        cache.free(number)
    for _ in range(3):  # let the allocator grow for the driver's prompts before the count
        prompt = _prompt(0, 4096)
        del prompt
    before = _resident()
    cache = Tonnage(blocks, 1)
    empty = _resident()
    filled = number = 0
    while filled < blocks - 1 - 1:
        size = min(4096, blocks - 2 - filled)
        # Prompts are arrays here, because lists would be the driver's memory and distort the count.
        tokens = _prompt(number, size)
        assert cache.admit(number, tokens, 1) == 0  # type: ignore[arg-type]
        cache.free(number)
        filled += size
        number += 1
        del tokens
    gc.collect()
    cached = cache.manager.stats().cached
    grown = _resident() - before
    core = cache.manager.core
    arrays = sum(getattr(core, name).nbytes for name in BY_BLOCK)
    return {
        "cached": cached,
        "bytes_per_cached_block": round(grown / cached, 1),
        "bytes_of_arrays_per_block": round(arrays / blocks, 1),
        "bytes_per_empty_block": round((empty - before) / blocks, 1),
    }


def _prompt(number: int, blocks: int) -> Any:
    """Return int32 tokens that share nothing with another number's tokens."""
    return ((np.arange(blocks * BLOCK_SIZE) + number * 65_536 * 3) % (1 << 30)).astype(np.int32)


def vllm_memory(blocks: int) -> dict[str, float]:
    """Return the same figures for vLLM's manager, which stores no tokens."""
    cache = Vllm(64, 1)
    _warm_lists()
    before = _resident()
    cache = Vllm(blocks, 1)
    filled = number = 0
    while filled < blocks - 2:
        size = min(4096, blocks - 2 - filled)
        tokens = ((np.arange(size * BLOCK_SIZE) + number * 65_536 * 3) % (1 << 30)).tolist()
        if cache.admit(number, tokens, 1) is None:
            break
        cache.free(number)
        filled += size
        number += 1
        del tokens
    gc.collect()
    return {"bytes_per_cached_block": round((_resident() - before) / filled, 1)}


def _warm_lists() -> None:
    """Let the allocator grow for the driver's lists of ints before the count."""
    for shift in range(3):
        tokens = (np.arange(4096 * BLOCK_SIZE) + shift).tolist()
        token_array(tokens)
        del tokens


def _resident() -> int:
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _fresh(arguments: list[str]) -> Any:
    """Run this script in a new process and return its last line as JSON."""
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run all measurements and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="Mooncake .jsonl or Azure .csv")
    parser.add_argument("--n", type=int, default=2000, help="requests")
    parser.add_argument("--blocks", type=int, default=262_144)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--prefill-budget", type=int, default=16_384)
    parser.add_argument("--peer", choices=["vllm", "none"], default="none")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of both sides; times are medians")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--memory-of", choices=["tonnage", "vllm"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps((memory if options.memory_of == "tonnage" else vllm_memory)(options.blocks)))
        return
    if options.trace is None:
        parser.error("--trace is required")
    loads = traces.load(options.trace, options.n)
    tokens = traces.Tokens(loads)
    progress = not options.json
    makers: dict[str, Callable[[], Any]] = {"tonnage": lambda: Tonnage(options.blocks, options.running)}
    if options.peer == "vllm":
        makers["vllm"] = lambda: Vllm(options.blocks, options.running)
    warm = Tonnage(4096, 4)  # load compiled code from the disk before the measurement
    replay(warm, traces.synthetic("chat", 8), 4, options.prefill_budget)
    runs: dict[str, list[ReplayFigures]] = {name: [] for name in makers}
    for turn in range(options.rounds):
        for name in sorted(makers, reverse=turn % 2 == 1):
            cache = makers[name]()
            gc.collect()
            gc.freeze()
            run = replay(
                cache, loads, options.running, options.prefill_budget, tokens=tokens, progress=progress
            )
            runs[name].append(run)
            gc.unfreeze()
            del cache
    lru = replay(
        Tonnage(options.blocks, options.running, eviction="lru"),
        loads,
        options.running,
        options.prefill_budget,
        tokens=tokens,
    )
    ours = runs["tonnage"]
    step = sorted(scheduler_step(options.running, 400)[20:])
    result: dict[str, Any] = {
        "trace": options.trace.name,
        "n": ours[0].requests,
        "blocks": options.blocks,
        "running": options.running,
        "us_per_request": round(statistics.median(r.us_per_request for r in ours), 1),
        "us_admit": round(1e6 * statistics.median(r.admit / r.requests for r in ours), 1),
        "us_append": round(1e6 * statistics.median(r.append / r.requests for r in ours), 1),
        "us_free": round(1e6 * statistics.median(r.free / r.requests for r in ours), 1),
        "append_us_per_step": _append_us(ours),
        "hash_us_per_block": round(hash_cost(), 3),
        "step_ms_p50": round(1e3 * step[len(step) // 2], 3),
        "step_ms_p99": round(1e3 * step[int(0.99 * len(step))], 3),
        "step_ms_worst": round(1e3 * statistics.median(max(r.steps) for r in ours), 2),
        **_fresh(["--memory-of", "tonnage", "--blocks", str(options.blocks)]),
        "hit_rate": round(ours[0].hit_rate, 4),
        "lru_hit_rate": round(lru.hit_rate, 4),
        "preemptions": ours[0].preemptions,
    }
    if options.peer == "vllm":
        peer = runs["vllm"]
        result["peer"] = {
            "name": "vllm",
            "us_per_request": round(statistics.median(r.us_per_request for r in peer), 1),
            "append_us_per_step": _append_us(peer),
            "step_ms_worst": round(1e3 * statistics.median(max(r.steps) for r in peer), 2),
            "hit_rate": round(peer[0].hit_rate, 4),
            "preemptions": peer[0].preemptions,
            **_fresh(["--memory-of", "vllm", "--blocks", str(options.blocks)]),
        }
        result["ratio_request"] = round(result["peer"]["us_per_request"] / result["us_per_request"], 2)
        if result["append_us_per_step"]:
            ratio = result["peer"]["append_us_per_step"] / result["append_us_per_step"]
            result["ratio_append"] = round(ratio, 2)
    if progress:
        print(file=sys.stderr)
        for key, value in result.items():
            print(f"{key:26} {value}")
    print(json.dumps(result))


def _append_us(runs: list[ReplayFigures]) -> float | None:
    """Return the median over the runs of the p50 append call with all requests running."""
    medians = [statistics.median(r.full_appends) for r in runs if r.full_appends]
    return round(1e6 * statistics.median(medians), 2) if medians else None


if __name__ == "__main__":
    main()
