"""The learned policy of vLLM's host tier, in vLLM's own manager."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from tonnage.cache.eviction.chunk_order import LearnedChunkOrder

MODULE = "tonnage.server.engines.vllm.host_policy"
CHUNKS = 40


def new_manager(policy: str = "LearnedCachePolicy") -> CPUOffloadingManager:
    return CPUOffloadingManager(CHUNKS, cache_policy=policy, cache_policy_module_path=MODULE)


def key(number: int) -> Any:
    return make_offload_key(number.to_bytes(8, "big"), 0)


def ask(manager: CPUOffloadingManager, name: str, numbers: list[int]) -> int:
    """Load a prompt's stored prefix, store the rest, and end; return the chunks loaded."""
    context, keys = ReqContext(name), [key(number) for number in numbers]
    manager.on_new_request(context)
    for place, each in enumerate(keys):
        context.set_offload_key_position(each, place)
    hit = 0
    while hit < len(keys) and manager.lookup(keys[hit], context) is LookupResult.HIT:
        hit += 1
    manager.prepare_load(keys[:hit], context)
    prepared = manager.prepare_store(keys[hit:], context)
    if prepared is not None:
        assert not set(prepared.evicted_keys) & set(keys[:hit])  # they are being loaded
        manager.complete_store(prepared.keys_to_store, context)
    manager.complete_load(keys[:hit], context)
    manager.on_request_finished(context)
    return hit


def hits_of_sessions(policy: str) -> int:
    """Return the hits of sessions that return, among prompts that do not."""
    manager, chance, hits = new_manager(policy), random.Random(0), 0
    for number in range(600):
        session = chance.randrange(3)
        hits += ask(manager, f"session-{number}", list(range(100 * session, 100 * session + 6)))
        hits += ask(manager, f"once-{number}", list(range(10_000 + 20 * number, 10_020 + 20 * number)))
    return hits


def test_learned_host_tier_policy_hits_20_percent_more_than_lru() -> None:
    assert hits_of_sessions("LearnedCachePolicy") >= 1.2 * hits_of_sessions("lru")


def test_exception_in_the_learned_host_tier_policy_falls_back_to_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = new_manager()
    for number in range(10):
        ask(manager, f"before-{number}", [number * 4 + at for at in range(4)])

    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(LearnedChunkOrder, "evict", broken)
    assert ask(manager, "again", [0, 1, 2, 3]) == 4
    ask(manager, "new", [100, 101, 102, 103])
    assert manager._policy._order is None
    assert ask(manager, "kept", [0, 1, 2, 3]) == 4
    assert ask(manager, "evicted", [4, 5, 6, 7]) == 0
    assert len(manager._policy._chunks) <= CHUNKS


def test_chunks_whose_store_failed_are_removed_and_a_reset_removes_all_chunks() -> None:
    manager, context = new_manager(), ReqContext("failed")
    manager.on_new_request(context)
    prepared = manager.prepare_store([key(1), key(2)], context)
    assert prepared is not None
    manager.complete_store(prepared.keys_to_store, context, success=False)
    manager.on_request_finished(context)
    assert ask(manager, "again", [1, 2]) == 0
    assert ask(manager, "third", [1, 2]) == 2
    manager.reset_cache()
    assert ask(manager, "after", [1, 2]) == 0
