"""The sum rule: a request is admitted while the sum of all reservations stays within the usable blocks.

**Why an allocation inside a reservation cannot fail.** Call *held* the number of distinct blocks in the block
tables of a request's sequences. `reserved_blocks` bounds *held* at every moment of every schedule (argued in
`tonnage.cache.admission.reservation`). Blocks in use are the union over requests, so ``used <= sum(held) <=
sum(reserved) <= usable``. Whoever is about to allocate holds strictly less than its reservation, so ``used <
usable`` at that moment and a block is free or cached and unreferenced, hence evictable. Nothing here speaks of
an order: prefill chunks of any size, decodes and stalls may interleave as they like.

**Why no credit for prefix hits.** A hit on a block in use saves an allocation, but the other owner may leave
and the block then lives on this request's reservation alone; a hit on an unreferenced cached block turns an
evictable block into a used one, exactly as an allocation would. Charging every request as if it shared
nothing covers both: the shared block is in the union once and in the sum at least once.

It needs no cooperation from the scheduler, which makes it right for an engine that counts its own blocks; it
also leaves most of the pool unused (TensorRT-LLM's GUARANTEED_NO_EVICT and mini-sglang use it).
"""

from __future__ import annotations

from tonnage.cache.admission.reservation import refusal, reserved_blocks
from tonnage.cache.admission.types import (
    AdmissionRequest,
    Admit,
    Decision,
    Limits,
    ReservedTotals,
    Wait,
    WaitReason,
)


def decide(request: AdmissionRequest, snapshot: ReservedTotals, limits: Limits) -> Decision:
    """Admit now, wait, or never; changes nothing.

    A request that can never fit is told apart from one that cannot fit now, so that no queue waits for it.
    """
    never = refusal(request, limits)
    if never is not None:
        return never
    needed = reserved_blocks(request, limits)
    sequences_short = snapshot.running + request.n - limits.max_num_seqs
    blocks_short = snapshot.reserved_blocks + needed - limits.usable_blocks
    if sequences_short > 0:
        return Wait(WaitReason.SEQUENCES, max(0, blocks_short), sequences_short)
    if blocks_short > 0:
        return Wait(WaitReason.BLOCKS, blocks_short, 0)
    return Admit(needed)
