"""Run random operations on the block manager, with its invariants checked after every call.

    python benchmarks/soak.py --operations 10000000

An operation is one sequence in one call: admitted, extended, appended a token, committed, decoded, forked or
freed.
Calls are batches of up to 64 sequences. `sample_invariants` runs after each call, and the slow independent
check every
--every calls. The script prints progress and one JSON object; a violated invariant ends it with the invariant's
name.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from invariants import check_invariants

from tonnage.cache.eviction.model import CLASSES
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.planner.model.layout import KVGroup, KVLayout

FULL = KVGroup("full", (0,))
LAYOUTS = {
    "full": (FULL,),
    "full and sliding": (FULL, KVGroup("sliding", (1,), window=20)),
    "two full, two sliding": (
        KVGroup("sliding", (0,), window=7),
        FULL,
        KVGroup("full", (2,)),
        KVGroup("sliding", (3,), window=40),
    ),
    "chunked, latents": (KVGroup("chunked", (0,), window=16), KVGroup("mla", (1,))),
    "two states, full": (KVGroup("state", (0,)), FULL, KVGroup("state", (2,))),
}
ROWS, LENGTH = 64, 96


class Soak:
    """A driver of one manager."""

    def __init__(self, groups: tuple[KVGroup, ...], seed: int) -> None:
        layout = KVLayout(groups, 4, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)
        self.random = random.Random(seed)
        self.manager = KVCacheManager(
            layout,
            480 * len(groups),
            max_num_seqs=ROWS,
            max_model_len=LENGTH,
            max_num_batched_tokens=LENGTH,
            hash_seed=seed,
        )
        self.manager.allow_prefix([1] * 8)
        self.documents = [self.random.choices(range(3), k=64) for _ in range(6)]
        self.operations = self.calls = 0
        self.next_id = 0
        self.live: dict[int, list[int]] = {}  # id -> [tokens known, computed, limit, forks left, prompt]

    def call(self) -> None:
        """Make one random call that the manager must accept."""
        choice, manager, pick = self.random.random(), self.manager, self.random
        if choice < 0.15 or not self.live:
            document = pick.choice(self.documents)
            prompt = (
                [1] * pick.choice([0, 0, 8]) + document[: pick.randint(1, 60)] + pick.choices(range(3), k=4)
            )
            n, more = pick.choice([1, 1, 1, 3]), pick.randint(1, 20)
            answer = manager.admit(self.next_id, prompt, more, n=n, salt=pick.choice(["", "a", "b"]))
            if isinstance(answer, Admitted):
                self.live[self.next_id] = [
                    len(prompt),
                    answer.cached_tokens,
                    len(prompt) + more,
                    n - 1,
                    len(prompt),
                ]
                self.next_id += 1
            self.operations += 1
        elif choice < 0.45:
            ids = [i for i, (known, computed, _, _, _) in self.live.items() if computed < known]
            ids = pick.sample(ids, min(len(ids), pick.randint(1, ROWS)))
            ends = [pick.randint(self.live[i][1] + 1, self.live[i][0]) for i in ids]
            manager.extend(ids, ends)
            self.check()
            manager.commit(ids, ends)
            for i, end in zip(ids, ends, strict=True):
                self.live[i][1] = end
            self.operations += 2 * len(ids)
        elif choice < 0.6:
            ids = [i for i, (known, _, limit, _, _) in self.live.items() if known < limit]
            manager.append(ids, pick.choices(range(3), k=len(ids)))
            for i in ids:
                self.live[i][0] += 1
            self.operations += len(ids)
        elif choice < 0.85:
            ids = [
                i
                for i, (known, computed, limit, _, _) in self.live.items()
                if known < limit and computed == known
            ]
            manager.extend(ids, [self.live[i][0] for i in ids])  # a forked parent needs its slot again
            manager.decode(ids, pick.choices(range(3), k=len(ids)))
            for i in ids:
                self.live[i][0] += 1
            self.operations += 2 * len(ids)
        elif choice < 0.9:
            for i, (known, computed, limit, left, prompt) in list(self.live.items()):
                if left and computed >= prompt // 4 * 4:
                    manager.fork(i, self.next_id)
                    self.live[i][3] = 0  # at most one fork per sequence
                    self.live[self.next_id] = [known, computed, limit, 0, prompt]
                    self.next_id += 1
                    self.operations += 1
                    break
        else:
            for i in pick.sample(list(self.live), min(len(self.live), pick.randint(1, 6))):
                manager.free([i])
                del self.live[i]
                self.operations += 1
        manager.model.rule[0] = pick.randrange(2)
        manager.model.density[0, pick.randrange(CLASSES)] = pick.random()
        self.check()

    def check(self) -> None:
        """Check the invariants with the compiled check."""
        self.calls += 1
        law = self.manager.sample_invariants()
        if law:
            check_invariants(self.manager)
            raise SystemExit(f"invariant {law!r} is violated after {self.operations} operations")


def main() -> None:
    """Run the operations and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--every", type=int, default=2000, help="number of calls between slow checks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, shown = time.process_time(), time.monotonic()
    soaks = [Soak(groups, options.seed + number) for number, groups in enumerate(LAYOUTS.values())]
    done = 0
    while done < options.operations:
        for soak in soaks:
            soak.call()
            if soak.calls % options.every == 0:
                check_invariants(soak.manager)
        done = sum(soak.operations for soak in soaks)
        if time.monotonic() - shown > 2:
            shown = time.monotonic()
            end = "\r" if sys.stderr.isatty() else "\n"
            print(f"{done:,} of {options.operations:,} operations", end=end, file=sys.stderr)
    for soak in soaks:
        for i in list(soak.live):
            soak.manager.free([i])
        check_invariants(soak.manager)
        assert soak.manager.stats().used == soak.manager.stats().reserved == 0
    stats = [soak.manager.stats() for soak in soaks]
    seconds = time.process_time() - start
    print(
        json.dumps(
            {
                "operations": done,
                "calls": sum(soak.calls for soak in soaks),
                "operations_per_s": round(done / seconds),
                "cpu_s": round(seconds, 1),
                "evictions": sum(s.evictions for s in stats),
                "hit_tokens": sum(s.hit_tokens for s in stats),
                "merged": sum(s.merged for s in stats),
                "violations": sum(soak.manager.violations for soak in soaks),
            }
        )
    )


if __name__ == "__main__":
    main()
