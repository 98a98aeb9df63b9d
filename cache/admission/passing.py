"""The forecast of when the first waiting request can start.

Admission lets another request start earlier only if that does not delay this forecast start.
"""

from __future__ import annotations

from tonnage.cache.admission.outlook import Outlook
from tonnage.cache.admission.peak import Added, peak_of
from tonnage.cache.admission.reservation import split_reservation
from tonnage.cache.admission.types import AdmissionRequest, Head, Limits
from tonnage.cache.blocks.groups import num_full


def added_head(head: Head, block_size: int) -> Added:
    """Return how many KV blocks the first waiting request will hold over time, from its forecast start on."""
    prompt = head.request.prompt_tokens
    return Added(
        prompt // block_size, prompt % block_size - head.start, head.request.n, head.start + head.output_left
    )


def head_start(request: AdmissionRequest, outlook: Outlook, limits: Limits, margin: int) -> Head:
    """Return when the first waiting request (the head) is forecast to start if no other is admitted before.

    The head starts at the first end of a running request after which the forecast peak of blocks, with the
    head included, fits the pool. At a later start fewer requests still run, so the start is found by bisection.

    Args:
        request: The first waiting request.
        outlook: Forecast of the running requests, made for ``request``.
        limits: Limits of the pool.
        margin: Blocks that admission leaves free (`Policy.margin`).
    """
    block_size, groups = limits.layout.block_size, num_full(limits.layout)
    if groups == 0:  # Without a full-attention group no request passes the head, so its start is not needed.
        return Head(request, outlook.own, 0)
    _, sliding = split_reservation(request, limits)
    snapshot, growth = outlook.snapshot, outlook.growth
    room = snapshot.capacity - sliding - margin - (snapshot.used - outlook.private)
    low, high = 0, len(growth.end) - 1  # positions of running requests in the order of their forecast ends
    while low < high:
        middle = (low + high) // 2
        head = Head(request, outlook.own, int(growth.end[growth.latest_first[-1 - middle]]) + 1)
        peak = peak_of(growth, block_size, head.start, (added_head(head, block_size),))
        low, high = (low, middle) if groups * peak <= room else (middle + 1, high)
    start = int(growth.end[growth.latest_first[-1 - low]]) + 1 if high >= 0 else 0
    return Head(request, outlook.own, start)
