"""Tests of the scheduler's statistics, compared with vLLM's own lists and tables after each step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from vllm.v1.request import RequestStatus
from vllm_steps import BLOCK, World, config, request, scheduler

from tonnage.cache.admission.decide import decide
from tonnage.server.engines.stats import AutoStats, stats_of_auto
from tonnage.server.engines.vllm.scheduler import TonnageScheduler
from tonnage.server.engines.vllm.scheduler import report as module
from tonnage.server.engines.vllm.scheduler.account import RESERVED
from tonnage.server.engines.vllm.stats_transport import PREFIX, AdmissionStats, take_stats

BLOCKS = 60


def world(mode: str, blocks: int = BLOCKS, **flags: Any) -> World:
    return World(scheduler(TonnageScheduler, config(blocks + 1, mode=mode, **flags)))


def told_by(made: Any) -> AdmissionStats:
    told: AdmissionStats = made._admission_stats(made._report)
    return told


def holds(made: Any) -> AdmissionStats:
    """Assert that the reported statistics agree with vLLM's lists and tables, and return them."""
    told = told_by(made)
    assert told.unfinished == len(made.requests)
    if told.mode == "greedy":
        assert told.reserved is told.committed is told.waste is told.asked is None
        counts_what_is_cached(made, told)
        return told
    tables = made.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    held = sum(len(tables[running.request_id]) for running in made.running)
    assert told.waste == held * BLOCK - sum(running.num_computed_tokens for running in made.running)
    assert told.broken == 0
    assert told.reserved is not None
    assert told.committed is not None
    assert told.asked is not None
    assert held <= told.reserved <= told.asked
    assert 0 <= told.committed <= BLOCKS
    counts_what_is_cached(made, told)
    return told


def counts_what_is_cached(made: Any, told: AdmissionStats) -> None:
    pool = made.kv_cache_manager.block_pool
    hashed = [block for block in pool.blocks[1:] if block.block_hash is not None]
    twice = len(hashed) - len({block.block_hash for block in hashed})
    reclaimable = sum(block.ref_cnt == 0 for block in hashed)
    assert told.cached is not None
    assert max(0, reclaimable - twice) == told.cached


@pytest.mark.parametrize(
    ("mode", "eviction"),
    [
        ("guaranteed", "lru"),
        ("predictive", "learned"),
        ("no_evict", "lru"),
        ("greedy", "lru"),
        ("greedy", "learned"),
    ],
)
def test_schedulers_report_is_consistent_in_every_step_of_a_busy_pool(
    mode: str, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    draw = random.Random(3)
    tried = world(mode, sequences=8, eviction=eviction)
    made = tried.scheduler
    before = AdmissionStats("")
    pool, removed = made.kv_cache_manager.block_pool, 0
    emit = pool._emit_block_removed_events

    def emitted(hashes: list[Any]) -> None:
        nonlocal removed
        removed += len(hashes)
        emit(hashes)

    monkeypatch.setattr(pool, "_emit_block_removed_events", emitted)

    def law(made: Any) -> None:
        nonlocal before
        told = holds(made)
        for table in ("decisions", "missing_blocks"):
            assert not Counter(getattr(before, table)) - Counter(getattr(told, table)), "counters never go back"
        before = told

    tried.law = law
    for number in range(40):
        tried.add(request(f"r{number}", draw.randrange(1, 200), 120), 1 + draw.randrange(100))
        for _ in range(draw.randrange(4)):
            if made.has_unfinished_requests():
                tried.step()
    tried.run()
    told = told_by(made)
    assert (told.received, told.unfinished) == (40, 0)
    assert told.decisions["admit", "fits"] == 40
    assert told.decisions.get(("admit", "resumed"), 0) == tried.preemptions
    assert told.decisions["wait", "blocks"] > 0
    if mode != "greedy":
        assert (told.reserved, told.committed, told.asked, told.waste) == (0, 0, 0, 0)
        assert told.missing_blocks["wait", "blocks"] >= told.decisions["wait", "blocks"]
    assert sum(told.evictions.values()) == removed > 0
    assert told.evictions["blocks", "prefill"] > 0
    assert told.evictions["blocks", "decode"] > 0
    cached = told.cached
    assert made.reset_prefix_cache()
    assert told_by(made).evictions["blocks", "reset"] == cached
    assert told_by(made).cached == 0
    assert told.failures == 0


@pytest.mark.parametrize("mode", ["guaranteed", "predictive", "no_evict"])
def test_request_that_fits_the_reported_uncommitted_blocks_starts_at_once(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    draw = random.Random(5)
    tried = world(mode, sequences=32)
    made, asked = tried.scheduler, 0
    for number in range(30):
        tried.add(request(f"r{number}", draw.randrange(1, 120), 100), 1 + draw.randrange(90))
        tried.step()
        room = BLOCKS - (told_by(made).committed or 0)
        if made.admission is None or not 0 < room < BLOCKS or made.waiting:
            continue
        newcomer = request(f"new{number}", max(1, room * BLOCK - 20), 20)
        assert sum(made._account.reservation(newcomer)) == room
        admission = made.admission
        new = admission._newcomer(newcomer, made._account.find(newcomer))
        assert decide(admission._state(1), new, admission.rules) <= 0
        asked += 1
    assert asked > 3


def test_waiting_and_rejected_admission_decisions_are_counted() -> None:
    tried = world("guaranteed", sequences=2)
    for number in range(4):
        tried.add(request(f"r{number}", 16, 30), 20 + number)
    tried.add(request("large", 2000, 30), 1)
    tried.run()
    told = told_by(tried.scheduler)
    assert told.decisions["wait", "sequences"] == 2  # each request once, when it is first in the queue
    assert told.decisions["never", "blocks"] == 1
    assert told.missing_blocks["never", "blocks"] == 2029 // BLOCK + 1 - BLOCKS
    assert (told.received, told.unfinished) == (5, 0)


def test_waits_because_of_max_num_active_seqs_are_reported_with_the_reason_sequences() -> None:
    """vLLM runs with ``--max-num-active-seqs`` below ``--max-num-seqs``."""
    tried = world("guaranteed", sequences=8)
    setattr(tried.scheduler, tried.scheduler._names.seats, 2)
    for number in range(4):
        tried.add(request(f"r{number}", 16, 30), 20 + number)
    tried.run()
    decisions = told_by(tried.scheduler).decisions
    assert decisions["wait", "sequences"] == 2
    assert ("wait", "blocks") not in decisions


def test_violated_scheduler_invariants_are_counted_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    tried = world("guaranteed")
    tried.add(request("r0", 50, 30), 25)
    tried.step()
    assert told_by(tried.scheduler).broken == 0
    tried.scheduler._account._kept[:, RESERVED] = 1  # it holds four
    assert told_by(tried.scheduler).broken == 2
    assert told_by(tried.scheduler).broken == 4


def test_aborted_requests_are_no_longer_counted_as_unfinished() -> None:
    tried = world("predictive")
    for number in range(3):
        tried.add(request(f"r{number}", 50, 30), 25)
    tried.step()
    tried.scheduler.finish_requests(["r0", "r2"], RequestStatus.FINISHED_ABORTED)
    told = holds(tried.scheduler)
    assert (told.received, told.unfinished) == (3, 1)


def test_report_of_auto_mode_has_step_costs_and_admission_rule() -> None:
    """The load is 200 requests in a pool that preempts, with 17 ms a step and 1 ms a prefilled token."""
    draw = random.Random(3)
    tried = world("auto", sequences=32)
    made, now = tried.scheduler, 0.0
    made.clock = lambda: now
    assert told_by(made).auto == AutoStats()
    scheduled = tried.scheduled

    def timed(output: Any) -> None:
        nonlocal now
        tokens, sequences = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        now += 0.017 + 0.001 * (tokens - sequences)
        scheduled(output)

    tried.scheduled = timed  # type: ignore[method-assign]
    for number in range(200):
        tried.add(request(f"r{number}", 32, 400), 60 + draw.randrange(280))
    tried.run()
    auto, told = made.admission.auto, take_stats(made.make_stats().waiting_lora_adapters)
    known = stats_of_auto(auto)
    assert auto.log.name.startswith("vllm.")
    assert told is not None
    assert told.mode == "auto"
    assert told.auto is not None
    assert known is not None
    assert told.auto.parts == pytest.approx(known.parts, abs=1e-9)
    assert told.auto.parts["fixed"] > 0
    assert told.auto.share == known.share
    assert told.auto.fallbacks == auto.fallbacks
    assert told.auto.gain == (None if known.gain is None else pytest.approx(known.gain, abs=0.0005))


def test_report_of_other_modes_than_auto_has_no_auto_statistics() -> None:
    for mode in ("guaranteed", "greedy"):
        assert told_by(world(mode).scheduler).auto is None


def test_schedulers_report_is_sent_inside_vllms_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world("guaranteed").scheduler
    stats = made.make_stats()
    assert take_stats(stats.waiting_lora_adapters) == told_by(made)
    assert stats.waiting_lora_adapters == {}
    monkeypatch.setenv("VLLM_PLUGINS", "another")  # without our logger nothing would remove the values
    quiet = world("guaranteed").scheduler.make_stats()
    assert not [name for name in quiet.waiting_lora_adapters if name.startswith(PREFIX)]


def test_exception_while_making_the_report_does_not_stop_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = world("guaranteed")
    monkeypatch.setattr(tried.scheduler._report, "stats", None)
    tried.add(request("r0", 16, 30), 20)
    tried.run()
    assert tried.scheduler.admission is not None
    assert tried.scheduler.make_stats().waiting_lora_adapters == {}


def test_report_counts_an_exception_in_tonnages_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = world("predictive")
    tried.add(request("r0", 16, 30), 20)
    tried.step()
    monkeypatch.setattr(tried.scheduler._account, "sync", None)
    tried.add(request("r1", 16, 30), 20)
    tried.run()
    told = told_by(tried.scheduler)
    assert (told.mode, told.failures, told.received, told.unfinished) == ("greedy", 1, 2, 0)
    assert told.reserved is None
