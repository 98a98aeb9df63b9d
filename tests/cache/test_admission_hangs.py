"""Load patterns that hang other servers, on the real queue, admission and manager: each ends or is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from invariants import check_invariants, check_step

from tonnage.cache.admission import (
    AdmissionMode,
    AdmissionRequest,
    Head,
    Never,
    NeverReason,
    Policy,
    Wait,
    WaitReason,
)
from tonnage.cache.errors import UnknownSequence
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.cache.replay.result import Replay
from tonnage.cache.replay.simulator import Setup, Simulator
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.trace import Trace, TraceRequest
from tonnage.cache.scheduler.queue import Waiting, WaitingQueue
from tonnage.planner.model.layout import KVGroup, KVLayout

LAYOUT = KVLayout((KVGroup("full", (0,)),), 16, 1, 1, 8, "float32", 4)
MODES = [AdmissionMode.GUARANTEED, AdmissionMode.PREDICTIVE, AdmissionMode.GREEDY, AdmissionMode.NO_EVICT]
SETUP = Setup(
    layout=LAYOUT,
    num_blocks=101,
    max_num_seqs=64,
    max_model_len=4000,
    budget=64,
    max_tokens=200,
    policy=Policy(),
    step_time=StepTime(1, 1, 0.0, 1.0, 1e30, overhead=0.0),  # one second a step
    check=check_step,
)


class Logged(Simulator):
    """A replay that records each admission result with its step, and the step in which each request ended."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        super().__init__(trace, setup)
        self.answers: list[tuple[int, int, str]] = []
        self.ended_at: dict[int, int] = {}
        admit, free = self.manager.admit, self.manager.free

        def logged_admit(sequence_id: int, *args: object, **more: object) -> object:
            answer = admit(sequence_id, *args, **more)  # type: ignore[arg-type]
            self.answers.append((self.steps, sequence_id, type(answer).__name__))
            return answer

        def logged_free(sequence_ids: Sequence[int]) -> None:
            self.ended_at |= dict.fromkeys(sequence_ids, self.steps)
            free(sequence_ids)

        self.manager.admit = logged_admit  # type: ignore[method-assign, assignment]
        self.manager.free = logged_free  # type: ignore[method-assign]


def trace_of(*requests: tuple[float, int, int, int]) -> Trace:
    """Return a trace of requests given as (arrival, prompt, output, max_tokens)."""
    return Trace("test", "log", tuple(TraceRequest(a, p, o, max_tokens=m) for a, p, o, m in requests))


def run(trace: Trace, mode: AdmissionMode, **changes: object) -> Replay:
    simulator = Simulator(trace, replace(SETUP, policy=Policy(mode), **changes))  # type: ignore[arg-type]
    result = simulator.run()
    stats = simulator.manager.stats()
    assert (stats.used, stats.reserved, stats.sequences) == (0, 0, 0)
    assert result.finished + result.rejected == len(trace.requests)
    return result


@pytest.mark.parametrize("mode", MODES)
def test_prompt_that_never_fits_is_rejected_and_the_next_is_served(mode: AdmissionMode) -> None:
    result = run(trace_of((0, 2000, 10, 10), (0, 50, 5, 10)), mode)
    assert (result.rejected, result.reasons) == (1, {"blocks": 1})
    assert result.finished == 1
    assert result.steps < 10


@pytest.mark.parametrize("mode", MODES)
def test_request_whose_output_exceeds_the_pool_is_rejected_at_submit(mode: AdmissionMode) -> None:
    """Reject 1,000 + 700 tokens (107 blocks) in a pool of 100 blocks, although the prompt alone fits."""
    result = run(trace_of((0, 1000, 700, 700), (0, 50, 5, 10)), mode)
    assert (result.rejected, result.finished) == (1, 1)
    manager = KVCacheManager(
        LAYOUT, 101, max_num_seqs=4, max_model_len=4000, max_num_batched_tokens=64, policy=Policy(mode)
    )
    answer = manager.admit(0, [1] * 1000, 700)
    assert isinstance(answer, Never)
    assert (answer.reason, answer.needed_blocks, answer.usable_blocks) == (NeverReason.BLOCKS, 107, 100)
    assert answer.largest_prompt_tokens == 900


@pytest.mark.parametrize("mode", MODES)
def test_partially_prefilled_requests_do_not_deadlock(mode: AdmissionMode) -> None:
    """Prefill prompts of 60 and 55 blocks in chunks, in a pool of 100 blocks that holds one at a time."""
    result = run(trace_of((0, 960, 20, 40), (0, 880, 20, 40), (0, 900, 20, 40)), mode)
    assert result.finished == 3
    if mode is AdmissionMode.GUARANTEED:
        assert result.preemptions == 0


@pytest.mark.parametrize("mode", MODES)
def test_small_requests_do_not_starve_a_large_one(mode: AdmissionMode) -> None:
    """Admit a request for 94 of 100 blocks among a stream of small requests that could fill the pool."""
    small = [(float(at), 100, 60, 60) for at in range(300)]
    trace = trace_of(*small[:20], (20.0, 1400, 100, 100), *small[20:])
    simulator = Logged(trace, replace(SETUP, policy=Policy(mode), check=None))
    simulator.run()
    start = next(step for step, id, answer in simulator.answers if id == 20 and answer == "Admitted")
    assert start < 20 + 3 * 60
    before = [id for _, id, answer in simulator.answers[: simulator.answers.index((start, 20, "Admitted"))]
              if answer == "Admitted" and id > 20]  # fmt: skip
    assert len(before) < 60


def test_small_requests_that_overtake_the_queue_head_do_not_delay_it() -> None:
    """Start the head in the same step with and without passing; every request runs to max_tokens."""
    first = [(0.0, 400, 100, 100)] * 3
    head, short, long = (0.0, 800, 200, 200), (0.0, 60, 4, 4), (0.0, 60, 200, 200)
    starts = {}
    for lookahead in (0, 8):
        simulator = Logged(
            trace_of(*first, head, long, short, short, long),
            replace(SETUP, budget=2000, whole_prompts=True, scale=None, lookahead=lookahead),
        )
        simulator.run()
        starts[lookahead] = {id: step for step, id, answer in simulator.answers if answer == "Admitted"}
    assert starts[8][3] == starts[0][3]
    assert starts[8][5] < starts[8][3]  # a small one passed
    assert starts[0][5] >= starts[0][3]


def queue_and_manager(policy: Policy) -> tuple[WaitingQueue, KVCacheManager]:
    manager = KVCacheManager(
        LAYOUT, 101, max_num_seqs=8, max_model_len=4000, max_num_batched_tokens=2000, policy=policy
    )
    return WaitingQueue(lookahead=0), manager


def take(queue: WaitingQueue, manager: KVCacheManager) -> int | None:
    def ask(entry: Waiting, head: Head | None) -> Admitted | Wait | Never:
        request = entry.request
        return manager.admit(entry.id, [entry.id] * request.prompt_tokens, request.max_tokens, head=head)

    taken = queue.take(ask, manager.admission.start_of, step=0)
    return None if taken is None else taken[0].id


@pytest.mark.parametrize("mode", MODES)
def test_tenant_at_its_quota_waits_without_blocking_other_tenants(mode: AdmissionMode) -> None:
    _, manager = queue_and_manager(Policy(mode, tenant_blocks=20))
    assert isinstance(manager.admit(0, [1] * 200, 40, tenant="a"), Admitted)  # 15 blocks
    assert manager.admit(1, [2] * 80, 16, tenant="a") == Wait(WaitReason.TENANT_QUOTA, 1)
    assert isinstance(manager.admit(1, [2] * 80, 16, tenant="b"), Admitted)
    never = manager.admit(2, [3] * 300, 30, tenant="c")
    assert isinstance(never, Never)
    assert (never.reason, never.needed_blocks, never.usable_blocks) == (NeverReason.TENANT_QUOTA, 21, 20)
    manager.free([0])
    assert isinstance(manager.admit(2, [2] * 80, 16, tenant="a"), Admitted)
    check_invariants(manager)


def test_cancelling_the_first_waiting_request_lets_the_next_one_start() -> None:
    queue, manager = queue_and_manager(Policy())
    for id, prompt in enumerate((800, 1400, 320)):
        queue.push(Waiting(id, AdmissionRequest(prompt, 100), float(id)))
    assert take(queue, manager) == 0
    before = manager.stats()
    assert take(queue, manager) is None
    queue.remove(1)
    assert manager.stats() == before
    with pytest.raises(UnknownSequence):
        queue.remove(1)
    assert take(queue, manager) == 2
    assert len(queue) == 0


def test_abort_of_a_preempted_request_releases_all_its_blocks() -> None:
    queue, manager = queue_and_manager(Policy(AdmissionMode.PREDICTIVE))
    for id in range(2):
        queue.push(Waiting(id, AdmissionRequest(700, 500), 0.0))
        manager.admission.ended(1)
    for _ in range(100):
        manager.admission.ended(1)
    assert (take(queue, manager), take(queue, manager)) == (0, 1)
    manager.extend([0, 1], [700, 700])
    manager.commit([0, 1], [700, 700])
    at = 700
    while True:  # both outlive the learned lengths, until neither can continue
        ends = manager.grant([0, 1], [at + 1, at + 1])
        if (ends == at).all():
            break
        assert (ends == at + 1).all()
        manager.extend([0, 1], ends)
        manager.append([0, 1], [5, 6])
        at += 1
        manager.commit([0, 1], ends)
    assert at == 800
    victim = manager.admission.victim(manager.running())
    manager.free([victim])
    queue.push(Waiting(victim, AdmissionRequest(at, 400, produced=100), 0.0))
    check_invariants(manager)
    assert manager.grant([1 - victim], [at + 1]).tolist() == [at + 1]
    queue.remove(victim)  # the client disconnected
    manager.free([1 - victim])
    check_invariants(manager)
    stats = manager.stats()
    assert (stats.used, stats.reserved, len(queue)) == (0, 0, 0)


@pytest.mark.parametrize("mode", [AdmissionMode.GUARANTEED, AdmissionMode.PREDICTIVE, AdmissionMode.GREEDY])
def test_admission_decisions_do_not_depend_on_the_future_output_lengths_of_requests(
    mode: AdmissionMode,
) -> None:
    rng = random.Random(3)
    trace = trace_of(*[(0.0, rng.randint(20, 400), rng.randint(1, 60), 80) for _ in range(40)])
    setup = replace(SETUP, policy=Policy(mode), leap=False, check=None)
    first = Logged(trace, setup)
    first.run()
    until = first.steps // 3
    ended = {id for id, step in first.ended_at.items() if step <= until}
    assert 5 < len(ended) < 35
    # Requests that are unfinished at that step get a longer output.
    others = tuple(
        request if id in ended else replace(request, output_tokens=rng.randint(request.output_tokens + 1, 80))
        for id, request in enumerate(trace.requests)
    )
    second = Logged(replace(trace, requests=others), setup)
    second.run()
    assert second.ended_at != first.ended_at
    known = [answer for answer in first.answers if answer[0] < until]
    assert known == [answer for answer in second.answers if answer[0] < until]
