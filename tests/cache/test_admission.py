"""Admission tests: the reservation equals the exact bound, and it suffices under every schedule tried."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_invariants
from kv_calls import append, commit, extend

from tonnage.cache.admission import (
    AdmissionMode,
    AdmissionRequest,
    Admit,
    Limits,
    Never,
    NeverReason,
    Policy,
    Wait,
    WaitReason,
    group_reservation,
    largest_prompt,
    refusal,
    reserved_blocks,
)
from tonnage.cache.admission.controller import Admission
from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.errors import CacheConfigError, InvalidRequest
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.planner.model.layout import KVGroup, KVLayout

FULL = KVGroup("full", (0,))


def layout_of(*groups: KVGroup, block_size: int = 16) -> KVLayout:
    return KVLayout(groups, block_size, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)


LIMITS = Limits(
    layout_of(FULL), usable_blocks=805, max_model_len=16_384, max_num_seqs=8, max_num_batched_tokens=64
)


def test_full_attention_reserves_blocks_for_prompt_and_max_tokens() -> None:
    assert reserved_blocks(AdmissionRequest(1600, 3200), LIMITS) == 300
    assert reserved_blocks(AdmissionRequest(1, 15), LIMITS) == 1
    assert reserved_blocks(AdmissionRequest(1, 16), LIMITS) == 2


def test_reservation_for_n_outputs_shares_only_the_full_prompt_blocks() -> None:
    # 40 prompt tokens: 2 full blocks shared; each of the 4 forks owns the partial third and its output.
    assert reserved_blocks(AdmissionRequest(40, 50, n=1), LIMITS) == 2 + 4
    assert reserved_blocks(AdmissionRequest(40, 50, n=3), LIMITS) == 2 + 3 * 4


def test_reservation_is_the_sum_over_all_kv_cache_groups() -> None:
    sliding = KVGroup("sliding", (1,), window=32)
    limits = replace(LIMITS, layout=layout_of(FULL, sliding))
    request = AdmissionRequest(1000, 1000)
    assert reserved_blocks(request, limits) == 125 + group_reservation(sliding, request, limits)


@settings(deadline=None)
@given(
    window=st.integers(1, 40),
    budget=st.integers(1, 40),
    size=st.sampled_from([1, 2, 4, 8]),
    prompt=st.integers(1, 90),
    more=st.integers(1, 60),
)
def test_sliding_window_reservation_is_the_largest_number_of_blocks_held_in_any_step(
    window: int, budget: int, size: int, prompt: int, more: int
) -> None:
    """Compare with the blocks that each step [computed, end) writes or looks back to, position by position."""
    group = KVGroup("sliding", (0,), window=window)
    limits = Limits(layout_of(group, block_size=size), 10_000, 10_000, 8, budget)
    total = prompt + more
    most = 0
    for computed in range(total):
        for end in range(computed + 1, min(computed + budget, total) + 1):
            needed = {
                key // size
                for query in (computed, end - 1)
                for key in range(max(0, query - window + 1), query + 1)
            }
            needed |= {position // size for position in range(computed, end)}
            most = max(most, len(needed))
    assert group_reservation(group, AdmissionRequest(prompt, more), limits) == most


def beside(*running: AdmissionRequest) -> Admission:
    """Return an admission in the pool of LIMITS with these requests running, by the sum of reservations."""
    manager = manager_of(805, 64, FULL, seqs=8)
    for request in running:
        manager.reservations.reserve(request, b"")
    return manager.admission


def test_output_lengths_are_forecast_once_per_step_for_all_waiting_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Judge six requests: lengths are forecast once, and again only after a step has changed the blocks."""
    manager = manager_of(805, 64, FULL, seqs=8, policy=Policy(AdmissionMode.GUARANTEED))
    for number in range(2):
        assert isinstance(manager.admit(number, [number] * 1600, 3200), Admitted)
    forecasts = []
    left = LengthForecast.left
    monkeypatch.setattr(LengthForecast, "left", lambda *args: forecasts.append(args) or left(*args))
    request = AdmissionRequest(6400, 3200)

    def ask() -> None:
        for number in range(2, 8):
            assert isinstance(manager.admit(number, [number] * 6400, 3200), Wait)
        manager.admission.start_of(request)

    ask()
    assert len(forecasts) == 1
    extend(manager, 0, 64)
    ask()
    assert len(forecasts) == 2


def test_admission_distinguishes_requests_that_fit_now_or_later_or_never() -> None:
    first, second = AdmissionRequest(1600, 3200), AdmissionRequest(8000, 1600)
    assert beside().decide_early(first) == Admit(300)
    assert beside(first).decide_early(second) == Wait(WaitReason.BLOCKS, blocks_short=300 + 600 - 805)
    assert beside(AdmissionRequest(205 * 16 - 1, 1)).decide_early(second) == Admit(600)
    assert beside(AdmissionRequest(206 * 16 - 1, 1)).decide_early(second) == Wait(
        WaitReason.BLOCKS, blocks_short=1
    )
    busy = beside(AdmissionRequest(1, 1, n=7)).decide_early(replace(first, n=2))
    assert busy == Wait(WaitReason.SEQUENCES, blocks_short=0, sequences_short=1)
    never = refusal(AdmissionRequest(12_000, 1000), LIMITS)
    assert isinstance(never, Never)
    assert never.reason is NeverReason.BLOCKS
    assert (never.needed_blocks, never.usable_blocks) == (813, 805)
    assert never.largest_prompt_tokens == 805 * 16 - 1000
    assert "813 KV blocks, the pool has 805" in str(never)
    assert "prompt of 11880 tokens fits" in str(never)


def test_rejection_of_a_request_that_never_fits_names_the_exceeded_limit() -> None:
    long = refusal(AdmissionRequest(16_000, 385), LIMITS)
    assert isinstance(long, Never)
    assert (long.reason, long.needed_tokens, long.max_model_len) == (NeverReason.MAX_MODEL_LEN, 16_385, 16_384)
    many = refusal(AdmissionRequest(10, 10, n=9), LIMITS)
    assert isinstance(many, Never)
    assert many.reason is NeverReason.SEQUENCES
    assert "n = 9" in str(many)
    endless = refusal(AdmissionRequest(10, 16_384), LIMITS)
    assert isinstance(endless, Never)
    assert endless.largest_prompt_tokens == 0
    assert "lower max_tokens" in str(endless)


@settings(deadline=None)
@given(
    usable=st.integers(1, 40),
    max_model_len=st.integers(2, 120),
    max_tokens=st.integers(1, 60),
    n=st.integers(1, 5),
    window=st.none() | st.integers(1, 30),
    size=st.sampled_from([1, 2, 4, 8]),
)
def test_largest_prompt_that_a_rejection_suggests_is_exactly_the_largest_that_fits(
    usable: int, max_model_len: int, max_tokens: int, n: int, window: int | None, size: int
) -> None:
    groups = (FULL,) if window is None else (FULL, KVGroup("sliding", (1,), window=window))
    limits = Limits(layout_of(*groups, block_size=size), usable, max_model_len, 4, 7)
    fitting = [
        prompt
        for prompt in range(1, max_model_len + 1)
        if refusal(AdmissionRequest(prompt, max_tokens, n), limits) is None
    ]
    assert largest_prompt(AdmissionRequest(1, max_tokens, n), limits) == max(fitting, default=0)


@pytest.mark.parametrize("field", ["prompt_tokens", "max_tokens", "n"])
def test_request_with_zero_prompt_tokens_max_tokens_or_n_is_rejected(field: str) -> None:
    values = {"prompt_tokens": 1, "max_tokens": 1, "n": 1, field: 0}
    with pytest.raises(InvalidRequest, match=field):
        AdmissionRequest(**values)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"usable_blocks": 0}, "usable_blocks"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"layout": layout_of(FULL, block_size=0)}, "block_size"),
        ({"layout": layout_of(KVGroup("sliding", (0,)))}, "layout"),
        ({"layout": layout_of(KVGroup("chunked", (0,)))}, "layout"),
        ({"layout": layout_of(KVGroup("cross", (0,)))}, "layout"),
    ],
)
def test_invalid_admission_limits_are_rejected_naming_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(CacheConfigError) as caught:
        replace(LIMITS, **change)  # type: ignore[arg-type]
    assert caught.value.field == field


# -- the reservation, kept
# ---------------------------------------------------------------------------------------


def manager_of(
    usable: int,
    budget: int,
    *groups: KVGroup,
    max_model_len: int = 16_384,
    seqs: int = 64,
    policy: Policy | None = None,
) -> KVCacheManager:
    return KVCacheManager(
        layout_of(*groups),
        usable + 1,
        max_num_seqs=seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        policy=policy,
    )


def advance(manager: KVCacheManager, sequence: int, lengths: dict[int, tuple[int, int]], chunk: int) -> None:
    """Compute at most ``chunk`` more positions of one sequence, with arbitrary output tokens."""
    computed, total = lengths[sequence]
    end = min(computed + chunk, total)
    known = int(manager.rows.length[manager.row(sequence)])
    if end > known:
        append(manager, sequence, [sequence] * (end - known))
    extend(manager, sequence, end)
    commit(manager, sequence, end)
    lengths[sequence] = (end, total)


@pytest.mark.parametrize(("budget", "peak"), [(64, 808), (16, 834)])
def test_request_whose_chunked_prefill_overflows_the_pool_waits(budget: int, peak: int) -> None:
    """Admit requests of (1,600 + 3,200) and (8,000 + 1,600) tokens in a pool of 805 blocks; the second waits.

    A peak rule that assumes whole-prompt prefill admits both. With decodes first and the rest of the budget for
    prefill, they need 808 or 834 blocks.
    """
    requests = [(1600, 3200), (8000, 1600)]
    tight = manager_of(805, budget, FULL)
    assert isinstance(tight.admit(0, [0] * 1600, 3200), Admitted)
    assert isinstance(tight.admit(1, [1] * 8000, 1600), Wait)
    # The figures themselves, in a pool where both fit: the step that a chunked scheduler would have run.
    roomy = manager_of(900, budget, FULL)
    most, finished = 0, set()
    lengths: dict[int, tuple[int, int]] = {}
    for sequence, (prompt, more) in enumerate(requests):
        assert isinstance(roomy.admit(sequence, [sequence] * prompt, more), Admitted)
        lengths[sequence] = (0, prompt + more)
    while len(finished) < 2:
        left = budget
        for sequence, (prompt, _) in enumerate(requests):
            if sequence in finished:
                continue
            computed, total = lengths[sequence]
            chunk = 1 if computed >= prompt else min(left, prompt - computed)
            if chunk:
                advance(roomy, sequence, lengths, chunk)
                left -= chunk
            most = max(most, roomy.stats().used)
            if lengths[sequence][0] == total:
                roomy.free([sequence])
                finished.add(sequence)
    assert most == peak
    assert most <= 900


HYBRID = (FULL, KVGroup("sliding", (1,), window=100), KVGroup("sliding", (2,), window=33))


@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("groups", [(FULL,), HYBRID, HYBRID[1:]], ids=["full", "hybrid", "sliding"])
@pytest.mark.parametrize("order", ["random", "one at a time", "all prompts first", "longest first"])
def test_reserved_blocks_suffice_for_admitted_requests_in_every_scheduling_order(
    budget: int, groups: tuple[KVGroup, ...], order: str
) -> None:
    """Admit requests as early as allowed, fork them and run them to max_tokens, in adversarial orders.

    An allocation that fails raises. At the end every request must have finished.
    """
    rng = random.Random(f"{budget} {order} {len(groups)}")
    manager = manager_of(150, budget, *groups, max_model_len=900, seqs=12)
    waiting = [(rng.randint(1, 400), rng.randint(1, 300), rng.choice([1, 1, 2, 4])) for _ in range(60)]
    lengths: dict[int, tuple[int, int]] = {}
    to_fork: dict[int, tuple[int, int]] = {}  # sequence -> prompt, forks to come
    arrivals = finished = forked = 0
    never: list[tuple[int, int, int]] = []
    fullest = 0.0
    while waiting or lengths:
        while waiting:
            prompt, more, n = waiting[0]
            tokens = [rng.randrange(2)] * min(prompt, 40) + rng.choices(range(50), k=max(0, prompt - 40))
            result = manager.admit(arrivals, tokens, more, n=n)
            if isinstance(result, Wait):
                assert lengths, "a request waits although the pool is empty"
                break
            waiting.pop(0)
            if isinstance(result, Never):
                never.append((prompt, more, n))
                continue
            lengths[arrivals] = (result.cached_tokens, prompt + more)
            to_fork[arrivals] = (prompt, n - 1)
            arrivals += 1
        if not lengths:
            continue
        if order == "random":
            sequence = rng.choice(list(lengths))
        elif order == "one at a time":
            sequence = max(lengths)
        elif order == "longest first":
            sequence = max(lengths, key=lambda s: lengths[s][0])
        else:
            behind = [s for s in lengths if lengths[s][0] < to_fork[s][0]]
            sequence = rng.choice(behind or list(lengths))
        prompt, forks = to_fork[sequence]
        computed = lengths[sequence][0]
        aligned = prompt if computed < prompt else lengths[sequence][1]
        chunk = rng.choice([1, rng.randint(1, budget), budget])
        advance(manager, sequence, lengths, min(chunk, aligned - computed))
        if lengths[sequence][0] >= prompt and forks:
            for _ in range(forks):
                manager.fork(sequence, arrivals)
                lengths[arrivals], to_fork[arrivals] = lengths[sequence], (prompt, 0)
                arrivals += 1
                forked += 1
            to_fork[sequence] = (prompt, 0)
        stats = manager.stats()
        assert stats.used <= stats.reserved <= stats.usable
        fullest = max(fullest, stats.used / stats.usable)
        if lengths[sequence][0] == lengths[sequence][1]:
            check_invariants(manager)
            manager.free([sequence])
            del lengths[sequence], to_fork[sequence]
            finished += 1
    check_invariants(manager)
    assert finished == arrivals
    assert forked > 5
    assert len(never) < 30
    if order in ("random", "all prompts first"):
        assert fullest > 0.5  # it was a tight pool
    assert manager.stats().reserved == manager.stats().used == 0


def test_each_of_n_outputs_releases_its_reservation_when_it_ends() -> None:
    manager = manager_of(100, 64, FULL)
    manager.admit(0, list(range(40)), 50, n=3)
    extend(manager, 0, 40)
    commit(manager, 0, 40)
    seen = [manager.stats().reserved]
    manager.fork(0, 1)
    manager.fork(0, 2)
    for sequence in (0, 2, 1):
        assert manager.reservations.sequences == 3 - len(seen) + 1
        manager.free([sequence])
        seen.append(manager.stats().reserved)
    assert seen == [14, 10, 6, 0]
    assert all(a > b for a, b in pairwise(seen))
    assert (manager.reservations.reserved, manager.reservations.sequences) == (0, 0)
