"""Tests of `EvictionOrder`, the eviction rule for a block pool that another program manages.

tests/server/vllm/test_eviction.py compares its decisions with our own pool's, in vLLM's block manager.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from order_invariants import check_order

from tonnage.cache.eviction.order import EvictionOrder

BLOCK = 4


def chain(*names: object) -> np.ndarray:
    """Return the hash of each block, computed over all names up to it."""
    prefixes = [repr(names[: at + 1]).encode() for at in range(len(names))]
    return np.array([xxhash.xxh3_64_intdigest(prefix) for prefix in prefixes], np.uint64)


def live(order: EvictionOrder, names: str, blocks: list[int], *, hit: int = 0) -> Callable[[], None]:
    """Run a request over one block per name, with ``hit`` cached blocks; return the call that ends it."""
    hashes, tokens = chain(*names), len(names) * BLOCK + 1
    turn = order.start(hashes, blocks[:hit], tokens, 0)
    order.take(blocks[:hit])

    def end() -> None:
        order.end(hashes, blocks, tokens - BLOCK, tokens, turn)
        order.release(blocks[::-1])
        check_order(order)

    return end


@pytest.fixture
def order() -> EvictionOrder:
    return EvictionOrder(16, BLOCK, 8)


def test_last_block_of_a_request_is_evicted_before_its_earlier_blocks(order: EvictionOrder) -> None:
    live(order, "abc", [1, 2, 3])()
    live(order, "xyz", [4, 5, 6])()
    assert order.blocks() == [3, 2, 1, 6, 5, 4]
    assert order.pop(4) == [3, 2, 1, 6]
    check_order(order)
    assert order.cached == 2
    assert order.evicted == 4
    with pytest.raises(ValueError, match="cannot evict 3 blocks, because only 2 are cached"):
        order.pop(3)


def test_blocks_of_a_shared_prefix_are_evicted_after_the_blocks_that_extend_it(order: EvictionOrder) -> None:
    live(order, "abc", [1, 2, 3])()
    live(order, "abcde", [1, 2, 3, 4, 5], hit=3)()
    live(order, "abcxy", [1, 2, 3, 6, 7], hit=3)()
    live(order, "n", [8])()
    assert order.pop(5) == [5, 4, 7, 6, 3]
    check_order(order)


def test_block_in_use_is_not_evicted(order: EvictionOrder) -> None:
    live(order, "abc", [1, 2, 3])()
    order.take([1, 2])
    check_order(order)
    assert order.pop(1) == [3]
    with pytest.raises(ValueError, match="cannot evict 1 blocks, because only 0 are cached"):
        order.pop(1)
    order.release([2, 1])
    check_order(order)
    assert order.pop(2) == [2, 1]


def test_duplicate_block_is_evicted_first(order: EvictionOrder) -> None:
    end = [live(order, "ab", [1, 2]), live(order, "ab", [3, 4])]
    end[0]()
    live(order, "x", [5])()
    end[1]()
    assert order.pop(3) == [4, 3, 5], "the two spare ones, then the one released before the second request"
    check_order(order)
    assert order.evicted == 1


def test_duplicate_block_in_use_after_a_hit_is_not_evicted(order: EvictionOrder) -> None:
    end = [live(order, "ab", [1, 2]), live(order, "ab", [3, 4])]
    for each in end:
        each()
    order.take([3, 4])
    check_order(order)
    assert order.pop(2) == [2, 1]
    end[1]()  # whose blocks are the only ones of their content now
    assert order.pop(2) == [4, 3]
    check_order(order)


def test_cached_blocks_whose_continuation_is_in_use_are_evicted_last(order: EvictionOrder) -> None:
    ab, abc = live(order, "ab", [1, 2]), live(order, "abc", [3, 4, 5])
    ab()
    hashes = chain(*"abc")
    order.end(hashes, [3, 4, 5], 8, 13, 1)  # another request with hits on them ends: 5 is known, behind 2
    check_order(order)
    assert order.pop(2) == [2, 1]
    check_order(order)
    abc()
    assert order.pop(3) == [5, 4, 3]


def test_block_removed_from_the_prefix_cache_is_evicted_first_unless_cached_blocks_extend_it(
    order: EvictionOrder,
) -> None:
    live(order, "abc", [1, 2, 3])()
    live(order, "x", [4])()
    order.forget([2, 4, 9])
    check_order(order)
    assert order.pop(1) == [4]
    live(order, "ab", [5, 6])()  # 2 is not found any more
    assert order.pop(5) == [5, 3, 2, 6, 1]
    check_order(order)


def test_reset_of_the_eviction_order_frees_all_blocks(order: EvictionOrder) -> None:
    live(order, "abc", [1, 2, 3])()
    live(order, "abd", [1, 2, 4], hit=2)()
    assert sorted(order.reset()) == [1, 2, 3, 4]
    assert (order.cached, order.evicted) == (0, 0)
    check_order(order)


def test_sliding_window_blocks_are_evicted_by_their_position_in_the_prompt(order: EvictionOrder) -> None:
    hashes = chain(*"abcd")
    turn = order.start(hashes, [], 17, 0)
    order.release([9])  # left by the window while the request ran
    order.end(hashes, [1, 2, 3, 4], 16, 17, turn)
    order.follow(hashes[1::2], [5, 6], 2 * BLOCK, 7, full=True)
    order.follow(np.zeros(0, np.uint64), [0, 0, 10, 11], BLOCK, 8, full=False)
    order.release([4, 3, 2, 1])
    order.release([6, 5])
    order.release([11, 10])
    check_order(order)
    given = order.pop(9)
    check_order(order)
    assert sorted(given) == [1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert given[0] == 9
    assert given.index(6) < given.index(5)


@pytest.mark.parametrize("seed", range(6))
def test_eviction_order_invariants_hold_in_random_runs(seed: int) -> None:
    """Check the laws in a pool of 40 blocks whose user duplicates, forgets and resets blocks at random."""
    world = random.Random(seed)
    order = EvictionOrder(40, BLOCK, 12)
    unused, running = list(range(1, 40)), []
    content: dict[int, int] = {}  # block -> hash of what can be found in it
    for _ in range(400):
        action = world.random()
        if action < 0.5:
            names = [world.choice("ab") for _ in range(world.randint(1, 6))]
            hashes = chain(*names)
            held = {block for _, blocks, _, _ in running for block in blocks}
            hit: list[int] = []
            for value in hashes[: len(names) - 1].tolist():
                found = [block for block, known in content.items() if known == value]
                if not found:
                    break
                hit.append(found[0])
            wanted = len(names) - len(hit)
            free = len(unused) + order.cached - len([block for block in hit if block not in held])
            if wanted > free:
                continue
            turn = order.start(hashes, hit, len(names) * BLOCK + 1, len(unused))
            order.take(hit)
            fresh = [unused.pop() for _ in range(min(wanted, len(unused)))]
            fresh += order.pop(wanted - len(fresh))
            for block in fresh:
                assert block not in held, "in use"
                content.pop(block, None)
            blocks = hit + fresh
            content.update(zip(blocks, hashes.tolist(), strict=True))
            running.append((hashes, blocks, len(names), turn))
        elif action < 0.9 and running:
            hashes, blocks, count, turn = running.pop(world.randrange(len(running)))
            order.end(hashes, blocks, count * BLOCK, count * BLOCK + 1, turn)
            check_order(order)
            held = {block for _, others, _, _ in running for block in others}
            order.release([block for block in reversed(blocks) if block not in held])
        elif action < 0.95 and content:
            block = world.choice(list(content))
            if not any(block in blocks for _, blocks, _, _ in running):
                del content[block]
                order.forget([block])
        elif not running:
            unused += order.reset()
            content.clear()
        check_order(order)
        held = {block for _, blocks, _, _ in running for block in blocks}
        assert len(unused) + order.cached + len(held) == 39
