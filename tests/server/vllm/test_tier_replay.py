"""Test of the stores of a replay against vLLM's CPUOffloadingManager, driven by the same calls."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tonnage.cache.replay.tiers import Tiers, TierSetup
from tonnage.cache.replay.trace import Trace, TraceRequest, read_trace

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("tier_replay", ROOT / "benchmarks" / "tier_replay.py")
assert _SPEC is not None
assert _SPEC.loader is not None
tier_replay = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tier_replay)


def turns() -> Trace:
    """Return a trace in which conversations grow, return, and share their beginnings."""
    requests = [
        TraceRequest(float(i), 64 * (2 + i % 11) + 1, 1,
                     hash_ids=(0, *(100 * (i * 7 % 13) + place for place in range(1 + i % 11)), 9000 + i),
                     hash_block=64)
        for i in range(600)
    ]  # fmt: skip
    return Trace("turns", "log", tuple(requests))


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("capacity", [16, 40, 90])
def test_replayed_tier_hits_stores_and_evictions_equal_vllms_offloading_manager(
    policy: str, capacity: int
) -> None:
    both = tier_replay.Both(capacity, policy)
    tiers = Tiers(TierSetup(capacity * 64, 1, policy=policy), 64, host=both)
    assert tier_replay.run(turns(), tiers, running=6, step=128) > 0
    assert both.calls > 3000
    assert both.evicted > 0


def test_replay_of_the_mooncake_conversation_through_tiers_equals_vllm() -> None:
    trace = read_trace(ROOT / "tests" / "data" / "traces" / "mooncake_conversation_120.jsonl")
    rows = tier_replay.against_vllm(trace, 3000, running=32, step=8192)
    assert [row["difference"] for row in rows] == [""] * 6
