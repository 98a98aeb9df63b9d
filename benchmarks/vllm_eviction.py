"""Compare learned eviction inside vLLM's own KVCacheManager with vLLM's LRU: hit rates, CPU time.

    python benchmarks/vllm_eviction.py --trace TRACE.jsonl --n 2000 --blocks 65536 --running 32 --json

It uses the closed loop of kv_manager.py and drives vLLM's manager as its scheduler does. The manager runs
unchanged and after `tonnage.server.engines.vllm.eviction.install`, in turns, --rounds times. This project's
own manager shows its hit rate. Only calls into the managers are timed, in CPU time of the thread.
cost_us_per_request is the median over the rounds of the additional time; the prefill that hits save is not
included. It prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import traces
from adapters import Tonnage, Vllm
from kv_manager import ReplayFigures, replay

from tonnage.server.engines.vllm.eviction import EvictionStats, install

BUDGET = 16_384  # uncached tokens that a step may admit, as in kv_manager.py


class Learned(Vllm):
    """vLLM's manager whose pool evicts blocks by the learned rule."""

    name = "vllm, learned"

    def __init__(self, blocks: int, running: int) -> None:
        super().__init__(blocks, running)
        self.queue = install(self.manager)
        if self.queue is None:
            raise SystemExit("this version of vLLM is not supported; the warning above names the reason")

    @property
    def stats(self) -> EvictionStats:
        """Return the statistics of the learned rule."""
        assert self.queue is not None
        return self.queue.stats


def main() -> None:
    """Run both sides and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake .jsonl or Azure .csv")
    parser.add_argument("--n", type=int, default=2000, help="requests")
    parser.add_argument("--blocks", type=int, default=65_536)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of both sides, in turns")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    loads = traces.load(options.trace, options.n)
    tokens = traces.Tokens(loads)

    def run(make: Callable[[int, int], Any]) -> tuple[ReplayFigures, Any]:
        cache = make(options.blocks, options.running)
        gc.collect()
        gc.freeze()
        done = replay(cache, loads, options.running, BUDGET, tokens=tokens, progress=not options.json)
        gc.unfreeze()
        return done, cache

    # Load compiled code before the measurement.
    replay(Learned(8192, 4), traces.synthetic("zipf", 80), 4, BUDGET)
    lru: list[ReplayFigures] = []
    learned: list[ReplayFigures] = []
    stats = EvictionStats(False, 0, 0)
    for turn in range(options.rounds):
        for make in (Vllm, Learned) if turn % 2 == 0 else (Learned, Vllm):
            done, cache = run(make)
            (learned if make is Learned else lru).append(done)
            if make is Learned:
                stats = cache.stats
    ours, _ = run(Tonnage)
    more = [b.us_per_request - a.us_per_request for a, b in zip(lru, learned, strict=True)]
    result = {
        "trace": options.trace.name,
        "n": lru[0].requests,
        "blocks": options.blocks,
        "running": options.running,
        "rounds": options.rounds,
        "load_average": round(os.getloadavg()[0], 1),
        "hit_rate_vllm_lru": round(lru[0].hit_rate, 4),
        "hit_rate_vllm_learned": round(learned[0].hit_rate, 4),
        "hit_rate_tonnage": round(ours.hit_rate, 4),
        "us_per_request_lru": _median(lru),
        "us_per_request_learned": _median(learned),
        "us_by_round_lru": [round(each.us_per_request) for each in lru],
        "us_by_round_learned": [round(each.us_per_request) for each in learned],
        "cost_us_per_request": round(statistics.median(more), 1),
        "cost_ratio": round(_median(learned) / _median(lru), 3),
        "blocks_evicted": stats.evicted,
        "fallbacks": stats.fallbacks,
        "preemptions": [lru[0].preemptions, learned[0].preemptions],
    }
    if not options.json:
        print(file=sys.stderr)
        for key, value in result.items():
            print(f"{key:26} {value}")
    print(json.dumps(result))


def _median(runs: list[ReplayFigures]) -> float:
    return round(statistics.median(each.us_per_request for each in runs), 1)


if __name__ == "__main__":
    main()
