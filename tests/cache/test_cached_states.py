"""Recurrent states cached with prefixes, case by case: copies, junctions, retention, eviction and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pool_lists
import pytest
from invariants import check_invariants
from kv_calls import append, commit, extend
from kv_small import FULL

from tonnage.cache.admission import AdmissionRequest, Limits, Never, group_reservation
from tonnage.cache.blocks.state import BY_RESET
from tonnage.cache.errors import CacheConfigError, InvariantViolation, OutOfOrder
from tonnage.cache.manager import Admitted, BlockCopy, KVCacheManager
from tonnage.cache.prefix.index import evict
from tonnage.planner.model.layout import KVGroup, KVLayout

STATE = KVGroup("state", (1,))


def make(
    *groups: KVGroup, blocks: int = 65, interval: int | None = 0, caching: bool = True, length: int = 128
) -> KVCacheManager:
    layout = KVLayout(groups or (FULL, STATE), 4, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)
    return KVCacheManager(
        layout, blocks, max_num_seqs=8, max_model_len=length, max_num_batched_tokens=64,
        enable_prefix_caching=caching, prefix_cache_retention_interval=interval, eviction="lru",
    )  # fmt: skip


def admit(
    manager: KVCacheManager, sequence: int, tokens: list[int], max_tokens: int = 8, n: int = 1
) -> Admitted:
    answer = manager.admit(sequence, tokens, max_tokens, n=n)
    assert isinstance(answer, Admitted)
    check_invariants(manager)
    return answer


def compute(manager: KVCacheManager, sequence: int, *ends: int) -> tuple[BlockCopy, ...]:
    """Compute the sequence in one step up to each of ``ends``; return all block copies."""
    copies: tuple[BlockCopy, ...] = ()
    for end in ends:
        copies += extend(manager, sequence, end)
        check_invariants(manager)
        commit(manager, sequence, end)
        check_invariants(manager)
        assert manager.sample_invariants() is None
    return copies


def state_of(manager: KVCacheManager, sequence: int) -> int:
    return int(manager.states[0][manager.row(sequence)])


def test_sequence_copies_a_cached_recurrent_state_before_writing_to_it() -> None:
    manager, prompt = make(), list(range(10))
    assert admit(manager, 1, prompt).cached_tokens == 0
    assert compute(manager, 1, 8) == ()
    cached = state_of(manager, 1)
    (copy,) = compute(manager, 1, 10)
    assert copy == BlockCopy(cached, state_of(manager, 1))
    manager.free([1])
    for sequence in (2, 3):  # and leaves it for the next one
        assert admit(manager, sequence, prompt).cached_tokens == 8
        assert state_of(manager, sequence) == cached
    for sequence in (2, 3):
        assert compute(manager, sequence, 10) == (BlockCopy(cached, state_of(manager, sequence)),)
    assert len({cached, state_of(manager, 2), state_of(manager, 3)}) == 3
    manager.free([2, 3])
    assert manager.stats().used == 0


def test_source_of_a_copied_recurrent_state_is_released_in_the_next_step() -> None:
    manager = make()
    admit(manager, 1, list(range(10)))
    compute(manager, 1, 8)
    cached = state_of(manager, 1)
    compute(manager, 1, 10)
    assert manager.pool.refs[cached] == 1
    append(manager, 1, [10])
    extend(manager, 1, 11)  # within its block
    assert manager.pool.refs[cached] == 0
    assert cached in pool_lists.all_cached(manager.core)


def test_recurrent_state_at_a_position_inside_a_block_is_no_prefix_hit() -> None:
    manager, prompt = make(interval=None), list(range(12))
    admit(manager, 1, prompt)
    compute(manager, 1, 6, 12)  # after 6 tokens, and after 12: the state after 8 was never kept
    manager.free([1])
    answer = admit(manager, 2, prompt)
    assert (answer.cached_tokens, answer.junction) == (0, 8)
    assert admit(manager, 3, [*prompt, 1, 2]).cached_tokens == 12


def test_recurrent_state_is_cached_at_the_end_of_a_prefix_that_two_prompts_share() -> None:
    manager, common = make(), list(range(12))
    admit(manager, 1, [*common, 50, 51, 52, 53, 54])
    compute(manager, 1, 16, 17)
    second = admit(manager, 2, [*common, 60, 61, 62, 63, 64])
    assert (second.cached_tokens, second.junction) == (0, 12)
    compute(manager, 2, 12, 16, 17)
    assert admit(manager, 3, [*common, 70, 71]).cached_tokens == 12
    assert admit(manager, 4, [*common, 60, 61, 62, 63, 65]).cached_tokens == 16


@pytest.mark.parametrize(("interval", "kept"), [(0, {16}), (8, {8, 16}), (None, {4, 8, 12, 16})])
def test_retention_interval_decides_which_recurrent_states_stay_cached(
    interval: int | None, kept: set[int]
) -> None:
    manager, prompt = make(interval=interval), list(range(18))
    admit(manager, 1, prompt, 16)
    compute(manager, 1, 4, 8, 12, 16, 18)
    manager.free([1])
    found = {admit(manager, end, [*prompt[:end], 99]).cached_tokens for end in (4, 8, 12, 16)}
    assert found - {0} == kept


def test_prefix_hit_ends_at_an_earlier_recurrent_state_after_eviction_of_the_last() -> None:
    manager, prompt = make(interval=None), list(range(14))
    admit(manager, 1, prompt)
    compute(manager, 1, 4, 8, 12, 14)
    manager.free([1])
    before = manager.stats().cached
    evict(manager.core, 2, BY_RESET)  # the longest released: the states after 4 and after 8
    check_invariants(manager)
    assert manager.stats().cached == before - 2
    answer = admit(manager, 2, [*prompt[:8], 99])
    assert (answer.cached_tokens, answer.junction) == (0, 8)
    assert admit(manager, 3, prompt).cached_tokens == 12


def test_equal_recurrent_states_of_two_sequences_are_cached_once() -> None:
    manager, prompt = make(), list(range(9))
    for sequence in (1, 2):
        admit(manager, sequence, prompt)
    manager.extend([1, 2], [8, 8])
    manager.commit([1, 2], [8, 8])
    check_invariants(manager)
    assert state_of(manager, 1) == state_of(manager, 2)
    copies = manager.extend([1, 2], [9, 9])
    check_invariants(manager)
    assert [copy.src for copy in copies] == [copies[0].src] * 2
    assert len({state_of(manager, 1), state_of(manager, 2), copies[0].src}) == 3


def test_forked_sequences_never_write_into_a_shared_recurrent_state() -> None:
    manager = make()
    admit(manager, 1, list(range(10)), n=3)
    compute(manager, 1, 8, 10)
    manager.fork(1, 2)
    manager.fork(1, 3)
    check_invariants(manager)
    append(manager, 1, [10])
    manager.append([2, 3], np.array([[20, 21, 22], [30, 31, 32]]))
    manager.extend([1, 2, 3], [11, 13, 13])  # 2 and 3 go on into the next block
    check_invariants(manager)
    manager.commit([1, 2, 3], [11, 13, 13])
    check_invariants(manager)
    assert len({state_of(manager, sequence) for sequence in (1, 2, 3)}) == 3
    manager.free([1, 3])
    check_invariants(manager)
    manager.free([2])
    assert manager.stats().used == 0


def test_extending_twice_before_a_commit_allocates_no_second_recurrent_state() -> None:
    manager = make()
    admit(manager, 1, list(range(20)))
    compute(manager, 1, 4)
    (first,) = extend(manager, 1, 8)
    used = manager.stats().used
    assert extend(manager, 1, 16) == ()
    assert manager.stats().used == used + 2  # of the full group
    assert state_of(manager, 1) == first.dst
    check_invariants(manager)


def test_commit_at_a_position_without_recurrent_state_is_rejected_and_changes_nothing() -> None:
    manager = make()
    admit(manager, 1, list(range(20)))
    extend(manager, 1, 16)
    before = manager.stats()
    with pytest.raises(OutOfOrder, match="recurrent state is in another block"):
        commit(manager, 1, 10)
    assert manager.stats() == before
    commit(manager, 1, 14)
    check_invariants(manager)


def test_reservation_includes_the_recurrent_state_that_is_read_and_the_one_written() -> None:
    limits = Limits(make().limits.layout, 64, 128, 8, 64, cached_states=True)
    assert group_reservation(STATE, AdmissionRequest(9, 4, n=3), limits) == 6
    assert group_reservation(STATE, AdmissionRequest(2, 2, n=3), limits) == 3  # all in one block
    assert group_reservation(STATE, AdmissionRequest(9, 4, n=3), replace(limits, cached_states=False)) == 3


def test_rejected_request_needs_blocks_for_the_recurrent_state_it_reads_and_the_one_it_writes() -> None:
    whole = AdmissionRequest(12, 4)
    assert isinstance(make(blocks=7).admit(1, list(range(12)), 4), Admitted)  # four blocks of tokens and two
    never = make(blocks=6).admit(1, list(range(12)), 4)
    assert isinstance(never, Never)
    assert (never.needed_blocks, never.usable_blocks, never.largest_prompt_tokens) == (6, 5, 8)
    plain = make(blocks=6, caching=False)
    assert isinstance(plain.admit(1, list(range(12)), whole.max_tokens), Admitted)


@pytest.mark.parametrize(
    "groups",
    [(STATE,), (KVGroup("sliding", (0,), window=8), STATE), (FULL, KVGroup("state", (1,), block_size=8))],
    ids=["states alone", "no full group", "states of other blocks"],
)
def test_model_without_full_attention_layers_caches_no_recurrent_states(groups: tuple[KVGroup, ...]) -> None:
    manager = make(*groups)
    assert not manager.cached_states
    assert not manager.prefix.enabled


@pytest.mark.parametrize("interval", [-4, 6])
def test_retention_interval_that_is_no_multiple_of_the_block_size_is_rejected(interval: int) -> None:
    with pytest.raises(CacheConfigError, match="multiple of the block size, 4"):
        make(interval=interval)


def _lose_the_state(manager: KVCacheManager) -> None:
    manager.core.tables[1, manager.row(1), 2] = 0


def _keep_the_source(manager: KVCacheManager) -> None:
    manager.rows.shared_tail[manager.row(1)] = 0


def _publish_another(manager: KVCacheManager) -> None:
    node = int(manager.tables[0][manager.row(1), 0])
    manager.core.node_blocks[1, node] = state_of(manager, 1)


@pytest.mark.parametrize(
    ("law", "damage"),
    [("tables", _lose_the_state), ("tables", _keep_the_source), ("prefix index", _publish_another)],
)
def test_violated_invariant_of_cached_recurrent_states_is_named_in_the_error(
    law: str, damage: Callable[[KVCacheManager], None]
) -> None:
    manager = make()
    admit(manager, 1, list(range(10)))
    compute(manager, 1, 8, 10)
    damage(manager)
    with pytest.raises(InvariantViolation) as caught:
        check_invariants(manager)
    assert caught.value.law == law
