"""Models with sliding windows only: each reservation is the most a request holds, so their sum is the peak."""

from __future__ import annotations

import pytest
from invariants import check_invariants
from kv_calls import append

from tonnage.cache.admission import AdmissionMode, AdmissionRequest, Policy, Wait
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.planner.model.layout import KVGroup, KVLayout

WINDOWS = KVLayout(
    (KVGroup("sliding", (0,), window=8), KVGroup("sliding", (1,), window=8)),
    4,
    1,
    kv_heads=1,
    head_size=8,
    dtype="float32",
    dtype_bytes=4,
)


@pytest.mark.parametrize("mode", list(AdmissionMode))
def test_requests_of_a_sliding_window_model_are_admitted_while_all_reservations_fit_the_pool(
    mode: AdmissionMode,
) -> None:
    manager = KVCacheManager(
        WINDOWS, 41, max_num_seqs=16, max_model_len=200, max_num_batched_tokens=8, policy=Policy(mode)
    )
    reservation = None
    running: dict[int, int] = {}
    for number in range(16):
        answer = manager.admit(number, list(range(20)), 100)
        if isinstance(answer, Wait):
            break
        assert isinstance(answer, Admitted)
        running[number] = 0
        reservation = reservation or manager.stats().reserved
    assert reservation is not None
    reserve = int(Policy(mode).reserve * 40)
    assert len(running) == (40 - reserve) // reservation > 1
    assert isinstance(answer, Wait)
    assert answer.blocks_short == reservation - (40 - reserve) % reservation
    head = manager.admission.start_of(AdmissionRequest(20, 100))
    assert isinstance(manager.admit(99, [1], 1, head=head), Wait)  # first come, first served
    for end in range(8, 121, 8):  # every request runs to its end without a stall
        ids = list(running)
        if end > 20:
            for number in ids:
                append(manager, number, [number] * (min(end, 120) - max(running[number], 20)))
        wanted = [min(end, 120)] * len(ids)
        assert manager.grant(ids, wanted).tolist() == wanted
        manager.extend(ids, wanted)
        manager.commit(ids, wanted)
        check_invariants(manager)
        running = dict.fromkeys(ids, end)
    for number in running:
        manager.free([number])
    assert isinstance(manager.admit(99, list(range(20)), 100), Admitted)
