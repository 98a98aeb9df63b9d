"""Headroom: what /memory, /metrics and the replicas on Ray say is what admission does, in every mode."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.results import Admitted
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.planner.plans import Plan
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.pool_stats import pool_stats
from tonnage.server.engines.stats import EngineStats, PoolStats

BLOCKS, SIZE = 101, 16
POLICIES = {
    "sum of reservations": None,
    "guaranteed": Policy(),
    "guaranteed by the median": Policy(length_quantile=0.5),
    "predictive": Policy(AdmissionMode.PREDICTIVE),
    "predictive, 5 % left": Policy(AdmissionMode.PREDICTIVE, watermark=0.055),
    "greedy": Policy(AdmissionMode.GREEDY),
    "greedy, 5 % left": Policy(AdmissionMode.GREEDY, watermark=0.055),
    "no_evict": Policy(AdmissionMode.NO_EVICT),
    "no_evict, 5 % left": Policy(AdmissionMode.NO_EVICT, watermark=0.055),
}


class Load:
    """Requests on a block manager as a scheduler runs them; every token is new, so nothing is shared."""

    def __init__(self, policy: Policy | None, seed: int = 0) -> None:
        layout = KVLayout(
            groups=(KVGroup("full", (0,)),),
            block_size=SIZE,
            layer_slots=1,
            kv_heads=1,
            head_size=8,
            dtype="bfloat16",
            dtype_bytes=2,
        )
        self.manager = KVCacheManager(
            layout, BLOCKS, max_num_seqs=64, max_model_len=1600, max_num_batched_tokens=2048, policy=policy
        )
        self.draw = random.Random(seed)
        self.running: dict[int, int] = {}  # sequence -> output tokens left
        self._ids = 0

    def admit(self, prompt: int, max_tokens: int) -> int | None:
        self._ids += 1
        tokens = np.array([self.draw.randrange(1, 2**30) for _ in range(prompt)], np.int32)
        if not isinstance(self.manager.admit(self._ids, tokens, max_tokens), Admitted):
            return None
        return self._ids

    def start(self, prompt: int, max_tokens: int) -> bool:
        """Admit it and compute its prompt, as far as blocks are granted."""
        found = self.admit(prompt, max_tokens)
        if found is None:
            return False
        (end,) = self.manager.grant((found,), (prompt,))
        self.manager.extend((found,), (end,))
        self.manager.commit((found,), (end,))
        if end < prompt:
            self.manager.free([found])
            return False
        self.running[found] = max_tokens
        return True

    def decode(self) -> None:
        """Generate one token for each request that gets a slot."""
        going = [sequence for sequence, left in self.running.items() if left > 1]
        lengths = [int(self.manager.rows.length[self.manager.row(sequence)]) for sequence in going]
        ends = self.manager.grant(going, [length + 1 for length in lengths]) if going else []
        for sequence, length, end in zip(going, lengths, ends, strict=True):
            if end > length:
                self.manager.append((sequence,), (self.draw.randrange(1, 2**30),))
                self.manager.extend((sequence,), (length + 1,))
                self.manager.commit((sequence,), (length + 1,))
                self.running[sequence] -= 1

    def end(self, sequence: int) -> None:
        self.manager.free([sequence])
        del self.running[sequence]


def check_headroom(load: Load) -> None:
    """Check that a request within the headroom is admitted, for any split into prompt and output."""
    pool = pool_stats(load.manager)
    assert 0 <= pool.headroom <= pool.usable
    tokens = pool.headroom * SIZE
    for prompt in {1, tokens // 2, tokens - 1}:
        if 0 < prompt < tokens:
            found = load.admit(prompt, tokens - prompt)
            assert found is not None, (pool, prompt, tokens)
            load.manager.free([found])
    after = pool_stats(load.manager)
    assert (after.headroom, after.reserved) == (pool.headroom, pool.reserved)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_request_within_the_reported_headroom_is_admitted(name: str, seed: int) -> None:
    load = Load(POLICIES[name], seed)
    check_headroom(load)
    least = BLOCKS
    for _ in range(80):
        deed = load.draw.random()
        if deed < 0.35 and len(load.running) < 60:
            load.start(load.draw.randrange(1, 300), load.draw.randrange(1, 200))
        elif deed < 0.5 and load.running:
            load.end(load.draw.choice(list(load.running)))
        else:
            load.decode()
        check_headroom(load)
        least = min(least, pool_stats(load.manager).headroom)
    assert least < BLOCKS // 4, "the pool was never full enough to say anything"


@pytest.mark.parametrize(
    "name", ["sum of reservations", "greedy", "greedy, 5 % left", "no_evict", "no_evict, 5 % left"]
)
def test_request_beyond_the_reported_headroom_waits(name: str) -> None:
    load = Load(POLICIES[name])
    for prompt, output in ((300, 20), (200, 100), (310, 200)):
        assert load.start(prompt, output)
        more = (pool_stats(load.manager).headroom + 1) * SIZE
        assert load.admit(more - 1, 1) is None


def crowded() -> PoolStats:
    """Return the stats of a guaranteed pool with headroom whose reservations exceed its usable blocks.

    Some requests end before others reach their full length.
    """
    load = Load(Policy())
    assert load.start(560, 32)  # 37 blocks for 32 more steps
    assert load.start(400, 496)  # 56 blocks in the end
    assert load.start(16, 480)  # 31
    pool = pool_stats(load.manager)
    assert pool.reserved > pool.usable
    return pool


def test_empty_pool_of_an_encoder_reports_headroom_zero_and_reserved_fraction_zero() -> None:
    pool = PoolStats(1, 0, 0, 0, 0, 0)
    assert (pool.headroom, pool.reserved_share) == (0, 0.0)
    assert crowded().reserved_share > 1


async def test_memory_report_and_metrics_show_equal_headroom(run_server, small_plan) -> None:
    """In guaranteed mode, with more reserved than there is and room left."""

    class Crowded(FakeEngine):
        def __init__(self, plan: Plan) -> None:
            super().__init__(plan)
            self.pool: PoolStats | None = crowded()

        def stats(self) -> EngineStats:
            stats = super().stats()
            return stats if self.pool is None else replace(stats, pool=self.pool)

    async with run_server(Crowded(small_plan())) as server:
        report = (await server.http.get("/memory")).json()["headroom"]
        text = (await server.http.get("/metrics")).text
        samples = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
        assert report["blocks"] == samples["tonnage_headroom_blocks"] == crowded().headroom > 0
        assert report["bytes"] == samples["tonnage_headroom_bytes"]
        server.engine.pool = None
