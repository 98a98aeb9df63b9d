"""Safe states: order, grant and bound compared with a search over all orders, then the safety law in a pool."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_invariants
from kv_calls import append, commit, extend

from tonnage.cache.admission import Limits, committed_peak, grant, is_safe, last_owners
from tonnage.cache.admission.peak import Added, Growth, peak_of
from tonnage.cache.admission.safety import finishing_order, slack_of
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.planner.model.layout import KVGroup, KVLayout


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def snapshot_of(
    usable: int, held: list[int], need: list[int], private: list[int] | None = None
) -> RunningSnapshot:
    own = held if private is None else private
    zero = np.zeros(len(held), np.int32)
    return RunningSnapshot(
        usable=usable,
        used=sum(held),
        windowed=0,
        # held, private, reserved, prompt, prompt_left, output, output_left, sequences
        rows=np.stack(
            (ints(*held), ints(*own), ints(*held) + ints(*need), zero + 1, zero, zero, zero + 1, zero + 1), 1
        ),
    )


def test_committed_peak_is_the_capacity_minus_the_fewest_free_blocks_while_requests_finish_in_order() -> None:
    draw = random.Random(0)
    for _ in range(200):
        count = draw.randrange(1, 9)
        held, need = ([draw.randrange(6) for _ in range(count)] for _ in range(2))
        snapshot = snapshot_of(sum(held) + draw.randrange(9), held, need, [draw.randint(0, at) for at in held])
        order = finishing_order(snapshot.need, snapshot.private)
        slack = slack_of(order, snapshot.available, snapshot.need, snapshot.private)
        assert committed_peak(snapshot) == snapshot.capacity - slack.min()


def some_order_works(available: int, need: list[int], back: list[int]) -> bool:
    """Return whether some order lets every request finish, by trying each order (the definition of safety)."""
    for order in permutations(range(len(need))):
        room = available
        for at in order:
            if room < need[at]:
                break
            room += back[at]
        else:
            return True
    return False


STATES = st.integers(1, 5).flatmap(
    lambda k: st.tuples(
        st.lists(st.integers(0, 8), min_size=k, max_size=k),
        st.lists(st.integers(0, 8), min_size=k, max_size=k),
        st.integers(0, 8),
    )
)


@settings(deadline=None, max_examples=300)
@given(STATES)
def test_safety_check_of_the_pool_agrees_with_a_search_over_all_finishing_orders(
    state: tuple[list[int], list[int], int],
) -> None:
    held, need, available = state
    snapshot = snapshot_of(sum(held) + available, held, need)
    assert is_safe(snapshot) == some_order_works(available, need, held)
    assert is_safe(snapshot) == (committed_peak(snapshot) <= snapshot.capacity)


@settings(deadline=None, max_examples=300)
@given(STATES, st.data())
def test_granting_blocks_keeps_the_pool_safe_and_at_least_one_request_progresses(
    state: tuple[list[int], list[int], int], data: st.DataObject
) -> None:
    held, need, available = state
    if not some_order_works(available, need, held) or not any(need):
        return
    snapshot = snapshot_of(sum(held) + available, held, need)
    entries = [at for at, count in enumerate(need) if count]
    wanted = [data.draw(st.integers(1, need[at])) for at in entries]
    granted = grant(snapshot, ints(*entries), ints(*wanted)).tolist()
    assert all(0 <= got <= want for got, want in zip(granted, wanted, strict=True))
    after_held, after_need = held.copy(), need.copy()
    for at, got in zip(entries, granted, strict=True):
        after_held[at] += got
        after_need[at] -= got
    left = available - sum(granted)
    assert left >= 0
    assert some_order_works(left, after_need, after_held)
    if len(entries) == len(need):  # every request asks, so at least one is served
        assert any(granted)
    # What was refused could not be granted on top: one more block would have been unsafe.
    for place, at in enumerate(entries):
        if granted[place] < wanted[place]:
            more_held, more_need = after_held.copy(), after_need.copy()
            more_held[at] += 1
            more_need[at] -= 1
            assert left == 0 or not some_order_works(left - 1, more_need, more_held)


def test_partial_grant_of_blocks_is_a_multiple_of_the_number_of_kv_cache_groups() -> None:
    # 12 available: the second must still find its 5 when the first has taken a part of the 14 it needs.
    snapshot = snapshot_of(20, [4, 4], [14, 5])
    assert grant(snapshot, ints(0), ints(13), multiple=1).tolist() == [7]
    assert grant(snapshot, ints(0), ints(13), multiple=2).tolist() == [6]
    assert grant(snapshot, ints(1), ints(5), multiple=2).tolist() == [5]


def test_exact_block_count_shows_that_a_state_with_merged_blocks_is_safe_where_the_bound_does_not() -> None:
    """Compare the bound and the exact count for two requests that share four merged blocks.

    Each request computed the blocks itself before they were found equal. The bound counts them as never
    returned, although the second release returns them.
    """
    tables = ints(1, 2, 3, 4, 5, 1, 2, 3, 4, 6)
    owners = ints(0, 0, 0, 0, 0, 1, 1, 1, 1, 1)
    third = 7  # a request of its own with blocks 7 .. 10 that needs 6
    tables = np.concatenate((tables, np.arange(third, third + 4)))
    owners = np.concatenate((owners, np.full(4, 2)))
    snapshot = replace(snapshot_of(11, [5, 5, 4], [1, 1, 6], [1, 1, 4]), used=len(set(tables.tolist())))
    assert snapshot.available == 1
    assert not is_safe(snapshot)
    leaving = last_owners(snapshot, tables, owners, 20)
    assert leaving.returns.tolist() == [1, 5, 4]
    assert is_safe(snapshot, leaving)
    # The first request of the order may always continue; the bound allows no other.
    assert grant(snapshot, ints(1, 2), ints(1, 1)).tolist() == [0, 0]
    assert grant(snapshot, ints(2, 1), ints(1, 1), leaving=leaving).tolist() == [0, 0]
    assert grant(snapshot, ints(0), ints(1), leaving=leaving).tolist() == [1]


# -- the peak over time ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_forecast_peak_of_held_blocks_equals_their_maximum_over_all_steps(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    size = data.draw(st.sampled_from([1, 2, 4, 8, 16, 64]))

    def many(low: int, high: int) -> np.ndarray:
        values = data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        return np.array(values, dtype=np.int64)

    growth = Growth(many(0, 5), many(0, 90), many(1, 3), many(0, 150))
    since = data.draw(st.integers(0, int(growth.end.max())))
    held = [
        sum(
            int(fixed + n * -(-(tail + step) // size))
            for fixed, tail, n, end in zip(growth.fixed, growth.tail, growth.sequences, growth.end, strict=True)
            if step <= end
        )
        for step in range(since, int(growth.end.max()) + 1)
    ]
    peak = peak_of(growth, size, since)
    apart = data.draw(st.integers(0, min(2, count)))  # requests that are added to a forecast of the others
    arrays = growth.fixed, growth.tail, growth.sequences, growth.end
    others = Growth(*(each[apart:] for each in arrays))
    added = [Added(*(int(each[place]) for each in arrays)) for place in range(apart)]
    assert peak_of(others, size, since, added) == peak
    if size <= 16:
        assert peak == max(held)
    else:  # remainders are rounded up to sixteenths of a block: never too few
        assert max(held) <= peak <= max(held) + int(growth.sequences.sum())


# -- the case that breaks a rule of lockstep -----------------------------------------------------------------


@pytest.mark.parametrize("budget", [16, 64, 9600])
def test_sequences_are_stalled_when_the_pool_has_no_safe_block_for_them(budget: int) -> None:
    """Run (1,600 + 3,200) and (8,000 + 1,600) tokens in 805 blocks to their end without preemption.

    Started together they would need 808 blocks at 64 tokens per step and 834 at 16.
    """
    from tonnage.cache.admission import Policy
    from tonnage.cache.manager import Admitted, KVCacheManager

    layout = KVLayout((KVGroup("full", (0,)),), 16, 1, 1, 8, "float32", 4)
    manager = KVCacheManager(
        layout,
        806,
        max_num_seqs=4,
        max_model_len=9600,
        max_num_batched_tokens=budget,
        # A quantile admits both at once: the law alone has to hold.
        policy=Policy(length_quantile=0.01),
    )
    for _ in range(200):
        manager.admission.ended(1)
    totals = {0: (1600, 4800), 1: (8000, 9600)}
    computed: dict[int, int] = {}
    for sequence, (prompt, total) in totals.items():
        assert isinstance(manager.admit(sequence, [sequence] * prompt, total - prompt), Admitted)
        computed[sequence] = 0
    stalls = steps = 0
    while computed:
        steps += 1
        left = budget
        ids, ends = [], []
        for sequence in list(computed):
            prompt, total = totals[sequence]
            at = computed[sequence]
            chunk = 1 if at >= prompt else min(left, prompt - at)
            if chunk:
                left -= chunk
                ids.append(sequence)
                ends.append(at + chunk)
        granted = manager.grant(ids, ends).tolist()
        assert any(end > computed[sequence] for sequence, end in zip(ids, granted, strict=True))
        for sequence, end in zip(ids, granted, strict=True):
            if end == computed[sequence]:
                stalls += 1
                continue
            known = int(manager.rows.length[manager.row(sequence)])
            append(manager, sequence, [sequence] * max(0, end - known))
            extend(manager, sequence, end)
            commit(manager, sequence, end)
            computed[sequence] = end
        snapshot = manager.running()
        assert committed_peak(snapshot) <= snapshot.capacity
        for sequence in [s for s, at in computed.items() if at == totals[s][1]]:
            manager.free([sequence])
            del computed[sequence]
    check_invariants(manager)
    if budget < 9600:
        assert stalls


def test_admitted_requests_with_sliding_windows_always_find_the_blocks_that_they_need() -> None:
    """Run random operations on a pool with a full and a sliding group, with forks and shared prefixes.

    Every admitted request finds the blocks that it needs, and every request ends.
    """
    from tonnage.cache.admission import Never, Policy, Wait
    from tonnage.cache.manager import KVCacheManager

    groups = (KVGroup("full", (0,)), KVGroup("sliding", (1,), window=40))
    layout = KVLayout(groups, 8, 1, 1, 8, "float32", 4)
    rng = random.Random(5)
    manager = KVCacheManager(
        layout, 121, max_num_seqs=24, max_model_len=600, max_num_batched_tokens=32,
        policy=Policy(length_quantile=0.2),
    )  # fmt: skip
    assert isinstance(manager.limits, Limits)
    for _ in range(100):
        manager.admission.ended(2)
    waiting = [(rng.randint(1, 200), rng.randint(1, 120), rng.choice([1, 1, 2])) for _ in range(80)]
    live: dict[int, list[int]] = {}  # id -> computed, prompt, total, forks to come
    ids = stalls = ended = 0
    while waiting or live:
        while waiting:
            prompt, more, n = waiting[0]
            common = [7] * min(prompt, 24)
            answer = manager.admit(ids, common + [ids + 1] * (prompt - len(common)), more, n=n)
            if isinstance(answer, Wait):
                assert live
                break
            waiting.pop(0)
            if isinstance(answer, Never):
                continue
            live[ids] = [answer.cached_tokens, prompt, prompt + more, n - 1]
            ids += 1
        if not live:
            continue
        order = list(live)
        rng.shuffle(order)
        ends = []
        for sequence in order:
            at, prompt, total, _ = live[sequence]
            ends.append(min(prompt if at < prompt else total, at + rng.randint(1, 32 if at < prompt else 1)))
        granted = manager.grant(order, ends).tolist()
        assert any(end > live[s][0] for s, end in zip(order, granted, strict=True)), "every request stalls"
        for sequence, end in zip(order, granted, strict=True):
            at, prompt, total, forks = live[sequence]
            if end == at:
                stalls += 1
                continue
            known = int(manager.rows.length[manager.row(sequence)])
            append(manager, sequence, [rng.randrange(9)] * max(0, end - known))
            extend(manager, sequence, end)
            commit(manager, sequence, end)
            live[sequence][0] = end
            if end == prompt and forks:
                for _ in range(forks):
                    manager.fork(sequence, ids)
                    live[ids] = [end, prompt, total, 0]
                    ids += 1
                live[sequence][3] = 0
            if end == total or rng.random() < 0.004:
                manager.free([sequence])
                del live[sequence]
                ended += 1
        check_invariants(manager)
    assert ended == ids
    assert stalls > 20, "the pool was never tight"
