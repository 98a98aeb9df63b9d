"""Tests of queue positions and rejections in front of vLLM, with vLLM's real scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm_steps import World, config, request, scheduler

from tonnage.cache.admission import AdmissionRequest, Limits
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.server.engines.errors import NeverFits
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.engines.stats import EngineStats, PoolStats
from tonnage.server.engines.vllm.queue_position import QueuePositions
from tonnage.server.engines.vllm.scheduler import TonnageScheduler
from tonnage.server.engines.vllm.stats_transport import NEVER_FITS

LAYOUT = KVLayout(
    groups=(KVGroup("full", (0, 1)),),
    block_size=16,
    layer_slots=2,
    kv_heads=2,
    head_size=8,
    dtype="bfloat16",
    dtype_bytes=2,
)
LIMITS = Limits(LAYOUT, usable_blocks=10, max_model_len=400, max_num_seqs=8, max_num_batched_tokens=64)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(prompt: int, max_tokens: int, n: int = 1) -> GenerationRequest:
    return GenerationRequest("r", (5,) * prompt, SamplingParams(max_tokens=max_tokens), n=n)


class Served:
    """A scheduler with a pool of 10 blocks, whose requests get their positions on arrival."""

    def __init__(self, blocks: int = 10, sequences: int = 8) -> None:
        self.clock = Clock()
        self.positions = QueuePositions(replace(LIMITS, usable_blocks=blocks), self.clock)
        made = config(blocks + 1, mode="guaranteed", policy="priority", sequences=sequences, batched=64)
        self.world = World(scheduler(TonnageScheduler, made))

    def enter(self, name: str, prompt: int, max_tokens: int, priority: int = 0) -> None:
        self.clock.now += 0.01
        self.world.add(
            request(
                name, prompt, max_tokens, priority=self.positions.position(priority), arrival=self.clock.now
            ),
            max_tokens,
        )

    @property
    def running(self) -> set[str]:
        return {running.request_id for running in self.world.scheduler.running}

    def steps(self, count: int = 8) -> set[str]:
        """Run `count` steps; return the ids of the running requests."""
        for _ in range(count):
            self.world.step()
        return self.running


def test_requests_of_equal_priority_run_in_arrival_order() -> None:
    served = Served()
    served.enter("a", 64, 32)  # 6 blocks
    assert served.steps() == {"a"}
    served.enter("big", 64, 64)  # 8
    served.enter("small", 8, 8)  # 1: would fit, but came later
    assert served.steps() == {"a"}
    served.world.abort("a")
    assert served.steps(4) == {"big", "small"}
    served.world.run()
    assert served.world.produced["big"] == 64


def test_abort_of_a_waiting_request_lets_the_next_one_start() -> None:
    served = Served()
    served.enter("a", 64, 64)
    served.steps()
    served.enter("big", 64, 64)
    served.enter("small", 8, 8)
    assert served.steps() == {"a"}
    served.world.abort("big")
    assert served.steps(4) == {"a", "small"}
    served.world.run()
    assert set(served.world.ended) == {"a", "small"}


def test_number_of_running_sequences_is_limited_by_max_num_seqs() -> None:
    served = Served(blocks=100, sequences=2)
    for name in "abc":
        served.enter(name, 8, 40)
    assert served.steps() == {"a", "b"}
    served.world.abort("a")
    assert served.steps() == {"b", "c"}


def test_request_of_higher_priority_runs_first() -> None:
    served = Served()
    served.enter("runs", 64, 64)
    served.steps()
    for name, priority in (("late", 2), ("usual", 0), ("urgent", -3)):
        served.enter(name, 64, 64, priority)
    order = []
    while served.world.scheduler.has_unfinished_requests():
        order += [new.req_id for new in served.world.step().scheduled_new_reqs]
    assert order == ["urgent", "usual", "late"]


def test_time_that_a_request_waits_behind_higher_priorities_is_bounded() -> None:
    """A request of priority 0 waits behind arrivals of priority -10, one per second, each run to its end."""
    served = Served()
    served.enter("0", 64, 64, -10)  # 8 of 10 blocks: one runs at a time
    served.steps(4)
    served.enter("patient", 64, 64)
    ends = 0
    while served.running != {"patient"}:
        assert ends < 200
        served.clock.now += 1.0 - 0.01
        served.enter(f"{ends + 1}", 64, 64, -10)
        served.steps(2)
        served.world.abort(f"{ends}")
        served.steps(2)
        ends += 1
    # Ten steps of priority are worth a hundred seconds, so a request that arrives later is behind it.
    assert ends in range(98, 104)


def test_rejection_of_a_request_that_never_fits_states_exact_numbers() -> None:
    positions = QueuePositions(LIMITS)
    with pytest.raises(NeverFits, match=r"needs 16 KV blocks, the pool has 10; .* 64 tokens fits"):
        positions.check(asked(100, 16, 2), pools=False)  # 2 x 8 blocks
    positions.check(asked(64, 16, 2), pools=False)  # what it said would fit does
    with pytest.raises(NeverFits):
        positions.check(asked(65, 16, 2), pools=False)
    stats = positions.rejections.added_to(EngineStats(True, 0, 0, PoolStats(0, 0, 0, 0, 0, 0)))
    assert stats.admissions == (("never", "blocks", 2),)
    assert stats.refused_blocks == (("never", "blocks", 6 + 2),)
    with pytest.raises(NeverFits, match="max_model_len is 400"):
        positions.check(asked(390, 16), pools=False)
    with pytest.raises(NeverFits, match="max_num_seqs is 8"):
        positions.check(asked(1, 1, 9), pools=False)


def test_reservation_for_n_outputs_in_vllm_counts_the_prompt_blocks_n_times() -> None:
    positions = QueuePositions(LIMITS)
    assert positions.rejection(AdmissionRequest(64, 16, n=2)) is None
    never = positions.rejection(AdmissionRequest(64, 16, n=3))
    assert never is not None
    assert never.needed_blocks == 3 * 5


def test_embedding_request_reserves_blocks_for_its_prompt_only() -> None:
    positions = QueuePositions(LIMITS)
    positions.check(asked(160, 100), pools=True)
    with pytest.raises(NeverFits):
        positions.check(asked(161, 100), pools=True)
    with pytest.raises(NeverFits):
        positions.check(asked(160, 100), pools=False)


def test_rejection_message_of_the_vllm_scheduler_becomes_the_never_fits_error() -> None:
    """The message of a rejection by the scheduler is recognised as NeverFits."""
    served = Served()
    served.enter("large", 16 * 11, 10)
    served.world.run()
    assert str(served.world.ended["large"].stop_reason).startswith(NEVER_FITS)
