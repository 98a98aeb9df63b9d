"""Queue isolation: a tenant over its quota delays no other tenant.

../server/vllm/test_queue_position tests the effect of priorities in front of vLLM.
"""

from __future__ import annotations

import pytest

from tonnage.cache.admission import AdmissionRequest, Head, Wait, WaitReason
from tonnage.cache.scheduler.queue import Waiting, WaitingQueue


@pytest.mark.parametrize("lookahead", [0, 8])
def test_requests_of_a_tenant_over_its_quota_do_not_block_other_tenants(lookahead: int) -> None:
    """However many stand before it, another tenant's is asked; each tenant's only to a bounded depth."""
    queue = WaitingQueue(lookahead=lookahead)
    for id in range(100):
        queue.push(Waiting(id, AdmissionRequest(10, 10, tenant="full"), float(id)))
    queue.push(Waiting(100, AdmissionRequest(10, 10, tenant="other"), 100.0))
    asked = []

    def ask(entry: Waiting, head: Head | None) -> Wait | str:
        asked.append(entry.id)
        return Wait(WaitReason.TENANT_QUOTA, 1) if entry.request.tenant == "full" else "admitted"

    taken = queue.take(ask, lambda request: Head(request, 10, 5), 0)
    assert taken is not None
    assert (taken[0].id, asked) == (100, [*range(lookahead + 1), 100])
