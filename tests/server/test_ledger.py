"""Reservations for an engine that counts its own blocks."""

from __future__ import annotations

import asyncio

import pytest

from tonnage.cache.admission import AdmissionRequest, Limits
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.server.engines.errors import EngineDead, NeverFits
from tonnage.server.engines.vllm.ledger import ReservationLedger

LAYOUT = KVLayout(
    groups=(KVGroup("full", (0, 1)),),
    block_size=16,
    layer_slots=2,
    kv_heads=2,
    head_size=8,
    dtype="bfloat16",
    dtype_bytes=2,
)


def ledger(blocks: int = 10, sequences: int = 8) -> ReservationLedger:
    limits = Limits(
        LAYOUT, usable_blocks=blocks, max_model_len=400, max_num_seqs=sequences, max_num_batched_tokens=64
    )
    return ReservationLedger(limits)


def counted(book: ReservationLedger) -> dict[tuple[str, str], int]:
    return {(outcome, reason): count for outcome, reason, count in book.counts}


async def test_first_come_first_served() -> None:
    book = ledger(blocks=10)
    await book.enter("a", AdmissionRequest(64, 32))  # 6 blocks
    big = asyncio.create_task(book.enter("big", AdmissionRequest(64, 64)))  # 8
    small = asyncio.create_task(book.enter("small", AdmissionRequest(8, 8)))  # 1: would fit, but came later
    await asyncio.sleep(0)
    assert (book.reserved, book.running, book.waiting) == (6, 1, 2)
    assert not book.idle.is_set()
    book.leave("a")
    await asyncio.gather(big, small)
    assert (book.reserved, book.running, book.waiting) == (9, 2, 0)
    book.leave("big")
    book.leave("small")
    assert (book.reserved, book.running, book.waiting) == (0, 0, 0)
    assert book.idle.is_set()
    assert counted(book) == {("admit", "fits"): 3, ("wait", "blocks"): 2}


async def test_who_gives_up_waiting_lets_the_next_in() -> None:
    book = ledger(blocks=10)
    await book.enter("a", AdmissionRequest(64, 32))
    big = asyncio.create_task(book.enter("big", AdmissionRequest(64, 64)))
    small = asyncio.create_task(book.enter("small", AdmissionRequest(8, 8)))
    await asyncio.sleep(0)
    big.cancel()
    with pytest.raises(asyncio.CancelledError):
        await big
    await small
    assert (book.reserved, book.waiting) == (7, 0)


async def test_cancelled_in_the_moment_of_its_turn() -> None:
    book = ledger(blocks=6)
    await book.enter("a", AdmissionRequest(64, 32))
    late = asyncio.create_task(book.enter("late", AdmissionRequest(64, 32)))
    await asyncio.sleep(0)
    book.leave("a")  # late's turn has come, but it has not run yet
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert (book.reserved, book.running, book.waiting) == (0, 0, 0)
    assert book.idle.is_set()


async def test_hanging_up_in_the_round_in_which_another_leaves() -> None:
    """Its future is cancelled at once, its own clean-up runs a round later: between the two, others leave."""
    book = ledger(blocks=6)
    await book.enter("a", AdmissionRequest(64, 32))
    gone = asyncio.create_task(book.enter("gone", AdmissionRequest(64, 32)))
    behind = asyncio.create_task(book.enter("behind", AdmissionRequest(64, 32)))
    await asyncio.sleep(0)
    gone.cancel()
    book.leave("a")
    await behind
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (book.reserved, book.running, book.waiting) == (6, 1, 0)
    assert counted(book)["admit", "fits"] == 2  # nothing was reserved for who had gone
    book.leave("behind")
    assert book.idle.is_set()


async def test_hanging_up_in_the_round_in_which_the_engine_dies() -> None:
    book = ledger(blocks=6)
    await book.enter("a", AdmissionRequest(64, 32))
    gone = asyncio.create_task(book.enter("gone", AdmissionRequest(64, 32)))
    behind = asyncio.create_task(book.enter("behind", AdmissionRequest(64, 32)))
    await asyncio.sleep(0)
    gone.cancel()
    book.fail(EngineDead("gone"))
    with pytest.raises(EngineDead):
        await asyncio.wait_for(behind, 5)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (book.running, book.waiting) == (1, 0)


async def test_the_last_to_hang_up_leaves_it_idle() -> None:
    book = ledger(blocks=6)
    await book.enter("a", AdmissionRequest(64, 32))
    gone = asyncio.create_task(book.enter("gone", AdmissionRequest(64, 32)))
    await asyncio.sleep(0)
    gone.cancel()
    book.leave("a")
    assert book.idle.is_set()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (book.reserved, book.running, book.waiting) == (0, 0, 0)


async def test_sequences_are_limited_too() -> None:
    book = ledger(blocks=100, sequences=2)
    await book.enter("a", AdmissionRequest(8, 8, n=2))
    waiting = asyncio.create_task(book.enter("b", AdmissionRequest(8, 8)))
    await asyncio.sleep(0)
    assert book.waiting == 1
    assert counted(book)["wait", "sequences"] == 1
    book.leave("a")
    await waiting


async def test_forks_share_nothing() -> None:
    book = ledger(blocks=100)
    await book.enter("a", AdmissionRequest(64, 16, n=3))
    assert book.reserved == 3 * 5


async def test_never_comes_with_numbers_that_hold() -> None:
    book = ledger(blocks=10)
    request = AdmissionRequest(100, 16, n=2)  # 2 x 8 blocks
    with pytest.raises(NeverFits, match=r"needs 16 KV blocks, the pool has 10; .* 64 tokens fits"):
        await book.enter("a", request)
    assert (book.reserved, book.waiting) == (0, 0)
    assert book.idle.is_set()
    await book.enter("b", AdmissionRequest(64, 16, n=2))  # what it said would fit does
    assert book.reserved == 10
    book.leave("b")
    with pytest.raises(NeverFits):
        await book.enter("c", AdmissionRequest(65, 16, n=2))
    assert counted(book)["never", "blocks"] == 2


async def test_a_dead_engine_sends_the_line_away() -> None:
    book = ledger(blocks=6)
    await book.enter("a", AdmissionRequest(64, 32))
    waiting = asyncio.create_task(book.enter("b", AdmissionRequest(64, 32)))
    await asyncio.sleep(0)
    book.fail(EngineDead("gone"))
    with pytest.raises(EngineDead):
        await waiting
    assert book.waiting == 0
