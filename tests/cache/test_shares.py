"""Fair shares of several API keys: a short request of another key starts at once, one alone loses little."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from invariants import check_invariants

from tonnage.cache.admission import AdmissionMode, AdmissionRequest, Limits, Policy
from tonnage.cache.admission.shares import KeyUse, Shares
from tonnage.cache.errors import CacheConfigError
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.scheduler import Scheduler, Sequence
from tonnage.cache.scheduler.chunks import divided
from tonnage.cache.scheduler.sequence import Step
from tonnage.planner.model.layout import KVGroup, KVLayout

LAYOUT = KVLayout((KVGroup("full", (0,)),), 16, 1, 1, 8, "float32", 4)
# A hybrid: chunks of prompts end at blocks, where the recurrent state is cached.
HYBRID = KVLayout((KVGroup("full", (0,)), KVGroup("state", (1,))), 64, 1, 1, 8, "float32", 4)
LIMITS = Limits(LAYOUT, 640, 2048, 32, 256)
MODES = list(AdmissionMode)


@dataclass(slots=True, eq=False, kw_only=True)
class Numbered(Sequence):
    def token_ids(self) -> list[int]:
        return [self.id] * self.length


def scheduler_of(mode: AdmissionMode, keys: int, blocks: int = 641) -> Scheduler[Numbered]:
    manager = KVCacheManager(
        LAYOUT, blocks, max_num_seqs=32, max_model_len=2048, max_num_batched_tokens=256,
        policy=Policy(mode, keys=keys), enable_prefix_caching=False,
    )  # fmt: skip
    return Scheduler(manager, budget=256)


def arrive(
    scheduler: Scheduler[Numbered], tenant: str, prompt: int = 4, most: int = 100, **more: float
) -> Numbered:
    made = Numbered(prompt=prompt, max_tokens=most, arrival=float(scheduler.steps), tenant=tenant, **more)  # type: ignore[arg-type]
    scheduler.add(made)
    return made


def run(scheduler: Scheduler[Numbered]) -> Step[Numbered]:
    """Run one step; a sequence ends at its max_tokens."""
    step = scheduler.step()
    drawing = list(step.drawing)
    scheduler.computed(step.picked)
    going = []
    for sequence in drawing:
        if sequence.generated + 1 == sequence.max_tokens:
            scheduler.end(sequence, sequence.max_tokens)
        else:
            going.append(sequence)
    if going:
        scheduler.append(going, np.ones(len(going), np.int32))
    check_invariants(scheduler.manager)
    return step


def running(scheduler: Scheduler[Numbered]) -> Counter[str]:
    return Counter(sequence.tenant for sequence in scheduler.running.values())


@pytest.mark.parametrize("mode", MODES)
def test_short_request_starts_at_once_although_another_api_key_has_filled_the_queue(
    mode: AdmissionMode,
) -> None:
    scheduler = scheduler_of(mode, keys=2)
    for _ in range(200):
        arrive(scheduler, "many")
    run(scheduler)
    assert running(scheduler) == {"many": 31}  # all seats but the one of the reserve
    for _ in range(20):
        short = arrive(scheduler, "few", most=1)
        step = run(scheduler)
        assert short in step.admitted
        assert short in step.drawing
    assert scheduler.counters.preemptions == 0


@pytest.mark.parametrize("mode", MODES)
def test_short_request_finds_free_blocks_although_another_api_key_has_filled_the_pool(
    mode: AdmissionMode,
) -> None:
    scheduler = scheduler_of(mode, keys=2)
    for _ in range(40):
        arrive(scheduler, "large", prompt=400, most=100)  # 32 blocks of 640
    for _ in range(60):
        run(scheduler)
    assert scheduler.waiting
    short = arrive(scheduler, "short", most=16)
    assert short in run(scheduler).admitted


@pytest.mark.parametrize("mode", MODES)
def test_batch_places_go_to_the_api_key_below_its_fair_share_until_both_keys_have_half(
    mode: AdmissionMode,
) -> None:
    scheduler = scheduler_of(mode, keys=2)
    for at in range(100):
        arrive(scheduler, "first", most=60 + at)
    run(scheduler)
    for at in range(100):
        arrive(scheduler, "second", most=60 + at)
    while not scheduler.idle and running(scheduler)["first"] > 16:
        run(scheduler)
    run(scheduler)
    assert min(running(scheduler).values()) >= 15


def test_batch_places_are_divided_in_proportion_to_the_weights_of_api_keys() -> None:
    scheduler = scheduler_of(AdmissionMode.GUARANTEED, keys=2)
    for _ in range(300):
        arrive(scheduler, "one", weight=1.0)
        arrive(scheduler, "three", weight=3.0)
    seen = Counter[str]()
    for _ in range(400):
        run(scheduler)
        seen += running(scheduler)
    assert seen["three"] / seen["one"] == pytest.approx(3, rel=0.2)


def test_single_active_api_key_uses_all_batch_places() -> None:
    scheduler = scheduler_of(AdmissionMode.GUARANTEED, keys=1)
    for _ in range(100):
        arrive(scheduler, "alone")
    run(scheduler)
    assert running(scheduler) == {"alone": 32}


def test_request_with_as_many_outputs_as_max_num_seqs_starts_after_a_large_request_has_ended() -> None:
    scheduler = scheduler_of(AdmissionMode.GUARANTEED, keys=2)
    whole = arrive(scheduler, "large", prompt=1800, most=200)  # 125 of 640 blocks
    parallel = arrive(scheduler, "large", forks=31)
    while not scheduler.idle:
        step = run(scheduler)
        if parallel in step.admitted:
            assert whole.id not in scheduler.running
            return
    raise AssertionError("never started")


@pytest.mark.parametrize("mode", MODES)
def test_long_prompts_of_one_api_key_leave_a_part_of_each_step_to_other_keys(
    mode: AdmissionMode,
) -> None:
    scheduler = scheduler_of(mode, keys=2)
    for _ in range(3):
        arrive(scheduler, "long", prompt=2000, most=10)
    run(scheduler)
    short = arrive(scheduler, "short", prompt=100, most=1)
    step = run(scheduler)
    assert short in step.drawing
    assert sum(sequence.chunk or 0 for sequence in step.picked) <= 256
    two = arrive(scheduler, "short", prompt=600, most=1)
    taken = 0
    while two.id in scheduler.waiting or two.id in scheduler.running:
        run(scheduler)
        taken += 1
    assert taken <= 6  # 600 tokens at half of 256 a step


def test_requests_of_every_api_key_finish_with_fair_sharing() -> None:
    scheduler = scheduler_of(AdmissionMode.GUARANTEED, keys=3, blocks=200)
    for at in range(60):
        arrive(scheduler, f"key-{at % 3}", prompt=1 + 37 * at % 700, most=1 + 13 * at % 90, forks=at % 4)
    for _ in range(20_000):
        if scheduler.idle:
            break
        for sequence in list(scheduler.running.values()):
            if sequence.forks and sequence.generated:
                sequence.forks = 0  # no forks in this test: the first sequence stands for the request
        run(scheduler)
    assert scheduler.idle


def test_prompts_of_a_hybrid_model_finish_although_many_api_keys_share_the_token_budget() -> None:
    """A part of the budget would be below a block, while another key's stream decodes."""
    manager = KVCacheManager(
        HYBRID, 400, max_num_seqs=32, max_model_len=2048, max_num_batched_tokens=128,
        policy=Policy(AdmissionMode.GUARANTEED, keys=8),
    )  # fmt: skip
    assert manager.cached_states
    scheduler: Scheduler[Numbered] = Scheduler(manager, budget=128)
    arrive(scheduler, "stream", most=400)
    run(scheduler)
    prompts = [arrive(scheduler, f"key-{at}", prompt=300, most=1) for at in range(6)]
    for _ in range(100):
        run(scheduler)
        if not any(each.id in scheduler.running or each.id in scheduler.waiting for each in prompts):
            break
    else:
        raise AssertionError("prompts do not end while the stream runs")
    assert running(scheduler) == {"stream": 1}


def test_batch_places_stay_free_for_an_api_key_that_has_no_requests_yet() -> None:
    shares, wish = Shares(3, LIMITS), AdmissionRequest(1, 1, tenant="a")
    assert shares.within({"a": KeyUse(15, 0)}, wish, 1)
    assert not shares.within({"a": KeyUse(16, 0)}, wish, 1)
    two = {"a": KeyUse(10, 0), "b": KeyUse(1, 0)}
    assert not shares.within(two, wish, 1)  # a third of 32
    assert not shares.within({"a": KeyUse(1, 320), "b": KeyUse(1, 0)}, wish, 1)
    assert shares.within({"b": KeyUse(32, 640)}, AdmissionRequest(9, 9, 9, "a"), 99)  # runs nothing yet


def test_api_keys_of_equal_priority_are_served_in_order_of_use_divided_by_weight() -> None:
    shares = Shares(4, LIMITS)
    uses = {"a": KeyUse(2, 10), "b": KeyUse(4, 10, weight=4.0), "c": KeyUse(1, 80), "d": KeyUse(31, 0)}
    order = sorted("dcab", key=lambda key: shares.rank(uses, AdmissionRequest(1, 1, tenant=key), 1))
    assert order == ["b", "a", "c", "d"]  # 4 / 32 / 4; 2 / 32; 80 / 640; above its share
    better = AdmissionRequest(1, 1, tenant="c", priority=-1)
    assert shares.rank(uses, better, 1) < shares.rank(uses, AdmissionRequest(1, 1, tenant="b"), 1)


def test_api_key_that_uses_its_whole_fair_share_must_leave_batch_places_free() -> None:
    wish = AdmissionRequest(1, 1, tenant="a")
    assert Shares(1, LIMITS).kept({"a": KeyUse(31, 639)}, wish, 1) == (0, 0)
    assert Shares(2, LIMITS).kept({}, AdmissionRequest(1, 1, 32, "a"), 640) == (0, 0)
    assert Shares(2, LIMITS).kept({"a": KeyUse(3, 3)}, wish, 1) == (0, 0)
    assert Shares(2, LIMITS).kept({"a": KeyUse(16, 3)}, wish, 1) == (1, 20)


@pytest.mark.parametrize(
    ("budget", "wanted", "parts"),
    [
        (100, {"a": 10, "b": 500}, {"a": 10, "b": 90}),
        (100, {"a": 500, "b": 500}, {"a": 50, "b": 50}),
        (7, {"a": 9, "b": 9, "c": 1}, {"c": 1, "a": 3, "b": 3}),
        (0, {"a": 9, "b": 9}, {"a": 0, "b": 0}),
    ],
)
def test_token_budget_of_a_step_is_divided_by_max_min_fairness(
    budget: int, wanted: dict[str, int], parts: dict[str, int]
) -> None:
    assert divided(budget, wanted) == parts


def test_admission_policy_for_zero_api_keys_is_rejected() -> None:
    with pytest.raises(CacheConfigError, match="0 is below 1"):
        Policy(keys=0)
