"""KVCacheManager, case by case: hits, salts, forks, windows, duplicates, eviction, and every refusal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pool_lists
import pytest
from invariants import check_invariants
from kv_calls import append, commit, extend
from kv_small import FULL, SLIDING, blocks_of, make, start
from own_hash import xxh64_block

from tonnage.cache.blocks.pool import enlist, unlink
from tonnage.cache.blocks.state import BY_RESET, columns
from tonnage.cache.errors import (
    CacheConfigError,
    CacheError,
    DoubleFree,
    InvalidRequest,
    OutOfOrder,
    ReservationExceeded,
    SequenceExists,
    SequenceFinished,
    UnknownSequence,
)
from tonnage.cache.manager import Admitted, BlockCopy, KVCacheManager
from tonnage.cache.prefix.index import evict
from tonnage.planner.model.layout import KVGroup


def _oldest(manager: KVCacheManager, block: int) -> None:
    """Make a listed block the first to be evicted under LRU."""
    unlink(manager.core, block)
    enlist(manager.core, block, int(manager.core.node_of[block]), 0)
    manager.counts.cached[0] += 1
    manager.core.stamp[block] -= 1000


def test_reused_request_id_refers_to_the_new_request_and_not_to_the_freed_one() -> None:
    manager = make()
    start(manager, 1, [1] * 6)
    start(manager, 2, [2] * 6)
    manager.extend([1, 2], [7, 7])
    before = [manager.row(1), manager.row(2)]
    manager.free([1])
    manager.free([2])
    manager.admit(1, [1] * 6, 8)
    manager.admit(2, [2] * 9, 8)
    assert [manager.row(1), manager.row(2)] == before[::-1]
    manager.extend([1, 2], [6, 9])
    assert [int(manager.rows.slots[manager.row(id)]) for id in (1, 2)] == [6, 9]
    check_invariants(manager)


def test_prefix_hit_shares_blocks_with_running_and_finished_sequences() -> None:
    manager = make()
    assert start(manager, 1, list(range(18))) == 0
    assert start(manager, 2, [*range(13), 99, 99, 99]) == 12
    assert blocks_of(manager, 2)[:3] == blocks_of(manager, 1)[:3]
    manager.free([1])
    manager.free([2])
    assert manager.stats().used == 0
    assert start(manager, 3, list(range(18))) == 16
    assert manager.stats().hit_tokens == 28
    assert manager.stats().query_tokens == 18 + 16 + 18


def test_prefix_hit_leaves_at_least_one_prompt_token_to_compute() -> None:
    manager = make()
    start(manager, 1, list(range(16)))
    assert start(manager, 2, list(range(16))) == 12
    assert start(manager, 3, list(range(17))) == 16


def test_prompt_of_the_next_turn_hits_the_blocks_of_generated_tokens() -> None:
    manager = make()
    start(manager, 1, list(range(6)))
    append(manager, 1, [50, 51, 52])
    extend(manager, 1, 9)
    commit(manager, 1, 9)
    manager.free([1])
    assert start(manager, 2, [0, 1, 2, 3, 4, 5, 50, 51, 60]) == 8


def test_each_cache_salt_has_an_isolated_prefix_cache() -> None:
    manager = make()
    start(manager, 1, list(range(16)), salt="a")
    assert start(manager, 2, list(range(17)), salt="b") == 0
    assert start(manager, 3, list(range(17))) == 0
    assert start(manager, 4, list(range(17)), salt=b"a") == 16
    assert start(manager, 5, list(range(17)), salt="b") == 16
    assert start(manager, 6, list(range(17)), salt="") == 16
    assert start(manager, 7, list(range(17)), salt="\ud800") == 0  # what a JSON body may carry


def test_without_prefix_caching_no_block_is_cached() -> None:
    # windows and states alone have no chain of blocks: see tonnage.cache.prefix.index
    for manager in (make(caching=False), make(SLIDING, KVGroup("state", (2,)))):
        assert not manager.prefix.enabled
        start(manager, 1, list(range(16)))
        manager.free([1])
        assert start(manager, 2, list(range(16))) == 0
        assert manager.stats().cached == 0


def test_forked_sequence_copies_a_shared_partial_block_at_its_first_write() -> None:
    manager = make()
    start(manager, 1, list(range(10)), n=3)
    manager.fork(1, 2)
    manager.fork(1, 3)
    assert blocks_of(manager, 1) == blocks_of(manager, 2) == blocks_of(manager, 3)
    assert manager.stats().used == 3
    last = blocks_of(manager, 1)[2]
    copies = manager.extend([2, 1, 3], [11, 11, 11])
    assert [copy.src for copy in copies] == [last, last]  # the last of the three keeps it
    assert copies[0] == BlockCopy(last, blocks_of(manager, 2)[2])
    assert blocks_of(manager, 3)[2] == last
    assert len({blocks_of(manager, s)[2] for s in (1, 2, 3)}) == 3
    assert {tuple(blocks_of(manager, s)[:2]) for s in (1, 2, 3)} == {tuple(blocks_of(manager, 1)[:2])}
    check_invariants(manager)
    assert manager.extend([1, 2, 3], [12, 12, 12]) == ()


def test_fork_at_a_block_boundary_copies_no_block() -> None:
    manager = make()
    start(manager, 1, list(range(8)), n=2)
    manager.fork(1, 2)
    assert extend(manager, 1, 9) == extend(manager, 2, 9) == ()
    check_invariants(manager)
    assert blocks_of(manager, 1)[2] != blocks_of(manager, 2)[2]


def test_slots_allocated_before_a_fork_cannot_be_written_until_the_sequence_is_extended_again() -> None:
    """Extend again after a fork: a write at position 10 without it would hit the child's block."""
    manager = make()
    start(manager, 1, list(range(10)), n=2)
    extend(manager, 1, 11)
    append(manager, 1, [50])
    manager.fork(1, 2)
    with pytest.raises(OutOfOrder):
        commit(manager, 1, 11)
    with pytest.raises(OutOfOrder):
        manager.slots(1, 0, 10, 11)
    assert len(extend(manager, 1, 11)) == 1
    commit(manager, 1, 11)
    check_invariants(manager)


@pytest.mark.parametrize("extended", [False, True])
def test_fork_before_any_computed_token_shares_no_recurrent_state(extended: bool) -> None:
    manager = make(FULL, KVGroup("state", (1,)), KVGroup("sliding", (2,), window=8))
    assert isinstance(manager.admit(1, [1, 2, 3], 8, n=2), Admitted)  # less than a block
    if extended:
        assert extend(manager, 1, 3) == ()
    first, second = manager.row(1), manager.fork(1, 2)
    assert (manager.states[0][first] != 0) == extended
    assert manager.states[0][second] == 0
    check_invariants(manager)
    assert manager.extend([2, 1], [3, 3]) == ()  # nothing was written: nothing is copied
    assert manager.states[0][first] != manager.states[0][second] != 0
    manager.commit([1, 2], [3, 3])
    check_invariants(manager)
    assert manager.decode([1, 2], [7, 8]) == ()
    check_invariants(manager)
    manager.free([1])
    check_invariants(manager)
    manager.free([2])
    assert manager.stats().used == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_forked_sequence_copies_the_recurrent_state_at_its_next_write(ahead: int) -> None:
    manager = make(FULL, KVGroup("state", (1,)), caching=False)
    start(manager, 1, list(range(8)), n=2)
    state = int(manager.states[0][manager.row(1)])
    child = manager.fork(1, 2)
    assert manager.states[0][child] == state
    copies = manager.extend([1, 2] if ahead else [2, 1], [9, 9])
    own = int(manager.states[0][manager.row(1 if ahead else 2)])
    assert copies == (BlockCopy(state, own),)  # on a block border the state alone
    assert own != state
    check_invariants(manager)


def test_extending_to_fewer_tokens_never_removes_slots() -> None:
    manager = make()
    start(manager, 1, list(range(6)))
    start(manager, 2, list(range(6)))
    manager.extend([1, 2], [9, 9])
    manager.extend([1, 2], [7, 10])
    assert [len(manager.slots(s, 0, 0, stop)) for s, stop in ((1, 9), (2, 10))] == [9, 10]
    check_invariants(manager)


def test_extending_sequences_in_a_batch_equals_extending_them_one_by_one() -> None:
    one, many = make(FULL, SLIDING), make(FULL, SLIDING)
    lengths = [5, 8, 11, 4]
    for manager in (one, many):
        for sequence, length in enumerate(lengths):
            start(manager, sequence, [sequence] * length, 20)
    for _ in range(15):
        lengths = [length + 1 for length in lengths]
        for sequence, length in enumerate(lengths):
            append(one, sequence, [7])
            assert extend(one, sequence, length) == ()
        for sequence, length in enumerate(lengths):
            commit(one, sequence, length)
        many.append(range(4), [7] * 4)
        assert many.extend(range(4), lengths) == ()
        many.commit(range(4), lengths)
        check_invariants(many)
        for table, other in zip(one.tables, many.tables, strict=True):
            assert (table == other).all()
    assert one.stats() == many.stats()


def test_appending_many_tokens_in_a_batch_equals_appending_them_one_by_one() -> None:
    one, many = make(FULL, SLIDING), make(FULL, SLIDING)
    more = np.arange(10, dtype=np.int32).reshape(2, 5)
    for manager in (one, many):
        for sequence in (1, 2):
            start(manager, sequence, [sequence] * 6, 8)
    for sequence, tokens in zip((1, 2), more, strict=True):
        append(one, sequence, tokens)
    many.append([1, 2], more)
    for manager in (one, many):
        manager.extend([1, 2], [11, 11])
        manager.commit([1, 2], [11, 11])
        check_invariants(manager)
    assert (one.core.tokens == many.core.tokens).all()
    assert one.stats() == many.stats()
    for wrong in (np.zeros((2, 4), np.int32), np.zeros((3, 1), np.int32), np.full((2, 1), -1)):
        with pytest.raises((ReservationExceeded, InvalidRequest)):
            many.append([1, 2], wrong)
    assert many.rows.length[[many.row(1), many.row(2)]].tolist() == [11, 11]


def test_sliding_window_layers_free_blocks_outside_the_window() -> None:
    manager = make(FULL, SLIDING, budget=8)
    manager.admit(1, list(range(40)), 8)
    for end in range(8, 41, 8):
        extend(manager, 1, end)
        commit(manager, 1, end)
        check_invariants(manager)
    # The last step computed 32..39 and looked back to 32 - 7 = 25, in block 6: blocks 0..5 are gone.
    assert blocks_of(manager, 1, group=1)[:6] == [0] * 6
    assert all(blocks_of(manager, 1, group=1)[6:])
    assert all(blocks_of(manager, 1, group=0))
    assert manager.slots(1, 1, 0, 4).tolist() == [0, 1, 2, 3]
    assert manager.slots(1, 1, 39, 40)[0] == blocks_of(manager, 1, group=1)[9] * 4 + 3


def test_prefix_hit_needs_only_the_last_window_of_sliding_window_layers() -> None:
    manager = make(FULL, SLIDING, budget=8)
    tokens = list(range(40))
    manager.admit(1, tokens, 8)
    for end in range(8, 41, 8):
        extend(manager, 1, end)
        commit(manager, 1, end)
    manager.free([1])
    admitted = manager.admit(2, [*tokens, 99], 8)
    assert isinstance(admitted, Admitted)
    assert admitted.cached_tokens == 40
    # The next query, position 40, looks back to 33, in block 8.
    assert np.flatnonzero(manager.tables[1][admitted.row]).tolist() == [8, 9]
    check_invariants(manager)


def test_prefix_hit_ends_where_all_blocks_of_the_sliding_window_are_cached() -> None:
    manager = make(FULL, SLIDING, blocks=40, budget=8)
    start(manager, 1, list(range(8)))
    manager.free([1])
    manager.admit(2, list(range(24)), 8)
    for end in (16, 24):
        extend(manager, 2, end)
        commit(manager, 2, end)
    deepest = manager.tables[0][manager.row(2), 5]
    manager.free([2])
    lost = int(manager.core.node_blocks[1, deepest])
    _oldest(manager, lost)
    evict(manager.core, 1, BY_RESET)
    assert lost not in pool_lists.all_cached(manager.core)
    admitted = manager.admit(3, list(range(25)), 8)
    assert isinstance(admitted, Admitted)
    assert admitted.cached_tokens == 20  # the full group has 24, the last sliding block is gone
    extend(manager, 3, 25)
    commit(manager, 3, 25)  # and is there again: the node takes the block just computed
    check_invariants(manager)
    again = manager.admit(4, list(range(25)), 8)
    assert isinstance(again, Admitted)
    assert again.cached_tokens == 24


@pytest.mark.parametrize("windows", [(8,), (8, 12)], ids=["one window", "two windows"])
def test_repeated_prompt_hits_its_last_window_in_a_model_without_full_attention(
    windows: tuple[int, ...],
) -> None:
    groups = [KVGroup("sliding", (at,), window=window) for at, window in enumerate(windows)]
    manager = make(*groups, blocks=40, budget=8)
    tokens = list(range(40))
    manager.admit(1, tokens, 8)
    for end in range(8, 41, 8):
        extend(manager, 1, end)
        commit(manager, 1, end)
        check_invariants(manager)
    manager.free([1])
    other = manager.admit(2, [7, *tokens[1:], 99], 8)  # equal to the last window, not to the prefix before it
    assert isinstance(other, Admitted)
    assert other.cached_tokens == 0
    manager.free([2])
    admitted = manager.admit(3, [*tokens, 99], 8)
    assert isinstance(admitted, Admitted)
    assert admitted.cached_tokens == 40
    for group, window in enumerate(windows):  # the next query, position 40, looks back to 41 - window
        needed = list(range((41 - window) // 4, 10))
        assert np.flatnonzero(manager.tables[group][admitted.row]).tolist() == needed
    check_invariants(manager)


def test_prefix_hit_without_full_attention_layers_ends_where_a_whole_window_is_cached() -> None:
    manager = make(KVGroup("sliding", (0,), window=8), blocks=40, budget=8)
    tokens = list(range(40))
    manager.admit(1, tokens, 8)
    for end in range(8, 41, 8):
        extend(manager, 1, end)
        commit(manager, 1, end)
    last = int(manager.tables[0][manager.row(1), 9])
    manager.free([1])
    _oldest(manager, last)
    evict(manager.core, 1, BY_RESET)
    assert last not in pool_lists.all_cached(manager.core)
    admitted = manager.admit(2, [*tokens, 99], 8)
    assert isinstance(admitted, Admitted)
    assert admitted.cached_tokens == 36
    check_invariants(manager)
    assert manager.prefix.hit_tokens == 36


def test_free_blocks_are_taken_first_and_then_the_last_block_of_the_oldest_prefix() -> None:
    manager = make(blocks=13)
    start(manager, 1, list(range(100, 108)))
    manager.free([1])
    start(manager, 2, list(range(10)))
    manager.free([2])
    assert (manager.stats().cached, manager.stats().free) == (4, 8)
    start(manager, 3, list(range(200, 236)), 4)  # 9 blocks: all 8 free ones, then the tail of the oldest
    assert manager.stats().evictions == 1
    check_invariants(manager)
    kept = {int(manager.core.node_tokens[node, 0]) for node in pool_lists.nodes(manager.core)}
    assert kept == {100, 0, 4, *range(200, 236, 4)}  # 104, the tail of the older one, is gone


def test_equal_blocks_of_two_sequences_are_merged_when_both_are_committed() -> None:
    manager = make()
    for sequence in (1, 2):
        manager.admit(sequence, list(range(8)), 8)
    for sequence in (1, 2):
        extend(manager, sequence, 8)
    assert not set(blocks_of(manager, 1)) & set(blocks_of(manager, 2))
    for sequence in (1, 2):
        commit(manager, sequence, 8)
        check_invariants(manager)
    assert blocks_of(manager, 1) == blocks_of(manager, 2)
    assert (manager.stats().used, manager.stats().merged) == (2, 2)


def test_hash_collision_of_different_prefixes_is_no_prefix_hit() -> None:
    manager = make(hash_block=lambda data, parent: xxh64_block(data, 0))
    start(manager, 1, [1] * 4 + [2] * 4 + [3])
    start(manager, 2, [7] * 4)
    assert start(manager, 3, [7] * 4 + [2] * 4 + [3]) == 4
    assert start(manager, 4, [1] * 4 + [2] * 4 + [3]) == 8


# -- refusals: typed, and nothing changes ---------------------------------------------------------------------


def state(manager: KVCacheManager) -> tuple[object, ...]:
    arrays = []
    for name, array in manager.core._asdict().items():
        if name == "tokens":
            # Rows without a sequence are no state: `admit` looks at a prompt in the one it would use.
            arrays.append(array[sorted(manager.sequences.row_of.values())])
        elif array.dtype.names:
            scratch = ("calls", "mark", "written", "end")  # of a call
            arrays += [column for field, column in vars(columns(array)).items() if field not in scratch]
        else:
            arrays.append(array)
    owned = [(slot, str(each)) for slot, each in manager.reservations.by_slot.items()]
    contents = tuple(array.tobytes() for array in arrays)
    return contents, owned, dict(manager.sequences.row_of), manager.stats(), manager.reservations.sequences


REFUSALS: dict[str, tuple[type[CacheError], Callable[[KVCacheManager], object]]] = {
    "unknown row": (UnknownSequence, lambda m: m.row(99)),
    "unknown extend": (UnknownSequence, lambda m: extend(m, 99, 4)),
    "unknown extend many": (UnknownSequence, lambda m: m.extend([1, 99], [11, 11])),
    "unknown append": (UnknownSequence, lambda m: append(m, 99, [1])),
    "unknown commit": (UnknownSequence, lambda m: commit(m, 99, 1)),
    "unknown free": (UnknownSequence, lambda m: m.free([99])),
    "unknown fork": (UnknownSequence, lambda m: m.fork(99, 100)),
    "unknown free many": (UnknownSequence, lambda m: m.free([1, 99])),
    "double free": (DoubleFree, lambda m: m.free([3])),
    "double free of many": (DoubleFree, lambda m: m.free([1, 3])),
    "free twice the same": (DoubleFree, lambda m: m.free([1, 2, 1])),
    "fork of a finished one": (SequenceFinished, lambda m: m.fork(3, 100)),
    "extend of a finished one": (SequenceFinished, lambda m: extend(m, 3, 4)),
    "admit twice": (SequenceExists, lambda m: m.admit(1, [1, 2], 4)),
    "fork onto a live one": (SequenceExists, lambda m: m.fork(1, 2)),
    "a fork too many": (ReservationExceeded, lambda m: m.fork(2, 100)),
    "fork before the prompt is computed": (OutOfOrder, lambda m: m.fork(4, 100)),
    "extend beyond max_tokens": (ReservationExceeded, lambda m: extend(m, 1, 19)),
    "extend many beyond max_tokens": (ReservationExceeded, lambda m: m.extend([2, 1], [12, 19])),
    "a chunk beyond the budget": (ReservationExceeded, lambda m: extend(m, 4, 65)),
    "a chunk beyond the budget, many": (ReservationExceeded, lambda m: m.extend([1, 4], [11, 65])),
    "negative extend": (InvalidRequest, lambda m: extend(m, 1, -1)),
    "negative extend many": (InvalidRequest, lambda m: m.extend([1], [-1])),
    "lengths that do not match": (InvalidRequest, lambda m: m.extend([1, 2], [11])),
    "append beyond max_tokens": (ReservationExceeded, lambda m: append(m, 1, [0] * 9)),
    "append many beyond max_tokens": (ReservationExceeded, lambda m: m.append([1, 5], [0, 0])),
    "append many twice the same": (InvalidRequest, lambda m: m.append([1, 1], [0, 0])),
    "commit many twice the same": (InvalidRequest, lambda m: m.commit([1, 1], [10, 10])),
    "commit backward": (OutOfOrder, lambda m: commit(m, 1, 9)),
    "commit without slots": (OutOfOrder, lambda m: commit(m, 4, 1)),
    "commit of unknown tokens": (OutOfOrder, lambda m: commit(m, 2, 11)),
    "commit many of unknown tokens": (OutOfOrder, lambda m: m.commit([1, 2], [10, 11])),
    "slots not made": (OutOfOrder, lambda m: m.slots(1, 0, 0, 13)),
    "slots backward": (OutOfOrder, lambda m: m.slots(1, 0, 5, 4)),
    "no prompt": (InvalidRequest, lambda m: m.admit(9, [], 4)),
    "no output": (InvalidRequest, lambda m: m.admit(9, [1], 0)),
    "float tokens": (InvalidRequest, lambda m: m.admit(9, [1.5], 4)),  # type: ignore[list-item]
    "float array": (InvalidRequest, lambda m: m.admit(9, np.array([1.5]), 4)),
    "extend many twice the same": (InvalidRequest, lambda m: m.extend([1, 1], [11, 11])),
    "decode many twice the same": (InvalidRequest, lambda m: m.decode([1, 1], [3, 3])),
    "decode many without slots": (OutOfOrder, lambda m: m.decode([1, 4], [3, 3])),
    "decode many beyond max_tokens": (ReservationExceeded, lambda m: m.decode([1, 5], [0, 0])),
    "decode many of a negative token": (InvalidRequest, lambda m: m.decode([1, 2], [0, -1])),
    "an allowed prefix below a block": (InvalidRequest, lambda m: m.allow_prefix([1, 2])),
    "a table of tokens": (InvalidRequest, lambda m: m.admit(9, np.ones((2, 2), np.int64), 4)),
    "text tokens": (InvalidRequest, lambda m: m.admit(9, "hello", 4)),  # type: ignore[arg-type]
    "bytes as tokens": (InvalidRequest, lambda m: m.admit(9, b"hell", 4)),
    "a negative token": (InvalidRequest, lambda m: m.admit(9, [1, -1], 4)),
    "a negative token in an array": (InvalidRequest, lambda m: m.admit(9, np.array([-1]), 4)),
    "a token beyond 32 bits": (InvalidRequest, lambda m: append(m, 1, [2**31])),
    "a token beyond 32 bits in an array": (InvalidRequest, lambda m: append(m, 1, np.array([2**40]))),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_block_manager_call_raises_the_expected_error_class_and_changes_nothing(case: str) -> None:
    manager = make(FULL, SLIDING, blocks=129)
    start(manager, 1, list(range(10)), n=2)
    start(manager, 2, list(range(10)))
    start(manager, 3, list(range(10)))
    extend(manager, 2, 12)
    manager.admit(4, list(range(50, 120)), 8, n=2)
    start(manager, 5, list(range(8)), 1)
    append(manager, 5, [1])
    manager.free([3])
    check_invariants(manager)
    before = state(manager)
    error, call = REFUSALS[case]
    with pytest.raises(error) as caught:
        call(manager)
    assert type(caught.value) is error
    assert caught.value.field
    assert state(manager) == before
    check_invariants(manager)


@pytest.mark.parametrize("blocks", [0, 1, -3])
def test_pool_without_usable_block_is_rejected(blocks: int) -> None:
    with pytest.raises(CacheConfigError, match="num_blocks"):
        make(blocks=blocks)


def test_token_positions_get_the_right_slots_if_the_block_size_is_no_power_of_two() -> None:
    manager = make(block_size=12)
    start(manager, 1, list(range(30)))
    slots, blocks = manager.slots(1, 0, 0, 30), manager.tables[0][manager.row(1)]
    assert slots.tolist() == [int(blocks[p // 12]) * 12 + p % 12 for p in range(30)]


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (KVGroup("cross", (0,)), "'cross' is not supported"),
        (KVGroup("chunked", (0,)), "a chunked group with window None"),
        (KVGroup("full", (0,), block_size=8), "blocks of 8 tokens in a pool of blocks of 4"),
    ],
)
def test_kv_layout_whose_groups_do_not_fit_the_pool_is_rejected(group: KVGroup, words: str) -> None:
    with pytest.raises(CacheConfigError, match=words):
        make(group)


def test_freeing_sequences_in_a_batch_equals_freeing_them_one_by_one() -> None:
    found = []
    for calls in ([[1, 2, 3, 4]], [[1], [2], [3], [4]], [[1, 4], [2, 3]]):
        manager = make(FULL, SLIDING)
        start(manager, 1, list(range(10)), n=3)
        manager.fork(1, 2)
        manager.fork(1, 3)
        start(manager, 4, list(range(10)))
        for call in calls:
            manager.free(call)
            check_invariants(manager)
        stats = manager.stats()
        assert (stats.used, stats.reserved, stats.sequences, manager.reservations.sequences) == (0, 0, 0, 0)
        found.append(start(manager, 5, list(range(10))))
    assert found == [8, 8, 8]


def test_finished_sequence_id_can_be_reused() -> None:
    manager = make(seqs=2)
    for _ in range(3):
        start(manager, 1, list(range(6)))
        start(manager, 2, list(range(6)))
        for sequence in (1, 2):
            manager.free([sequence])
        with pytest.raises(DoubleFree):
            manager.free([1])
