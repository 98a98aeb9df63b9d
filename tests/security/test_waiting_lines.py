"""Who waits for whom: a priority is worth a bounded wait, and a tenant over its quota holds up nobody."""

from __future__ import annotations

import asyncio

import pytest

from tonnage.cache.admission import AdmissionRequest, Head, Limits, Wait, WaitReason
from tonnage.cache.scheduler.queue import Waiting, WaitingQueue
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.server.engines.vllm.ledger import ReservationLedger

LAYOUT = KVLayout(
    groups=(KVGroup("full", (0, 1)),),
    block_size=16, layer_slots=2, kv_heads=2, head_size=8, dtype="bfloat16", dtype_bytes=2,
)  # fmt: skip


async def test_nobody_waits_for_ever_behind_higher_priorities() -> None:
    """The line in front of vLLM: one of priority 0 behind arrivals of -10, one a second and each to its end."""
    now = 0.0
    limits = Limits(LAYOUT, usable_blocks=10, max_model_len=400, max_num_seqs=8, max_num_batched_tokens=64)
    book = ReservationLedger(limits, clock=lambda: now)
    wish = AdmissionRequest(64, 64)  # 8 of 10 blocks: one runs at a time
    await book.enter("0", wish, -10)
    patient = asyncio.create_task(book.enter("patient", wish))
    await asyncio.sleep(0)
    others, ends = [], 0
    for ends in range(2000):
        now += 1.0
        others.append(asyncio.create_task(book.enter(f"{ends + 1}", wish, -10)))
        await asyncio.sleep(0)
        if patient.done():
            break
        book.leave(f"{ends}")
        await asyncio.sleep(0)
    # Ten steps of priority are worth a hundred seconds: who came later than that stands behind it.
    assert ends in range(98, 104)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@pytest.mark.parametrize("lookahead", [0, 8])
def test_entries_over_a_quota_hold_up_nobody(lookahead: int) -> None:
    """However many stand before it, another tenant's is asked; each tenant's only to a bounded depth."""
    queue = WaitingQueue(lookahead=lookahead)
    for id in range(100):
        queue.push(Waiting(id, AdmissionRequest(10, 10, tenant="full"), float(id)))
    queue.push(Waiting(100, AdmissionRequest(10, 10, tenant="other"), 100.0))
    asked = []

    def ask(entry: Waiting, head: Head | None) -> Wait | str:
        asked.append(entry.id)
        return Wait(WaitReason.TENANT_QUOTA, 1) if entry.request.tenant == "full" else "admitted"

    taken = queue.take(ask, lambda entry: Head(entry.request, 10, 5), 0)
    assert taken is not None
    assert (taken[0].id, asked) == (100, [*range(lookahead + 1), 100])
