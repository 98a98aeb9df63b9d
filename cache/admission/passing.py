"""The start forecast of the first waiting request, so that a request that overtakes it does not delay it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.peak import Growth, growth_of, peak_of
from tonnage.cache.admission.reservation import split_reservation
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.admission.types import AdmissionRequest, Head, Limits
from tonnage.cache.blocks.groups import num_full


def with_head(growth: Growth, head: Head, block_size: int) -> Growth:
    """Return the block forecast of the running requests, with the first waiting one added from its start on."""
    prompt = head.request.prompt_tokens
    return growth.with_one(
        prompt // block_size, prompt % block_size - head.start, head.request.n, head.start + head.output_left
    )


def head_start(
    request: AdmissionRequest,
    request_left: int,
    snapshot: RunningSnapshot,
    output_left: npt.NDArray[np.integer],
    limits: Limits,
    margin: int,
) -> Head:
    """Return the forecast start of the first waiting request (the head) if no other is admitted before.

    It is the first end of a running request after which the forecast peak, with the head included, fits the
    pool. A later start leaves fewer requests running beside it, so the start is found by bisection.

    Args:
        request: The first waiting request.
        request_left: Output tokens forecast for it.
        snapshot: The running requests.
        output_left: Output tokens forecast for each running request.
        limits: Limits of the pool.
        margin: Blocks that admission leaves free (`Policy.margin`).
    """
    block_size, groups = limits.layout.block_size, num_full(limits.layout)
    if groups == 0:  # without a full-attention group no request overtakes the head
        return Head(request, request_left, 0)
    _, sliding = split_reservation(request, limits)
    capacity = snapshot.capacity - sliding - margin
    growth = growth_of(snapshot, output_left, block_size, limits.max_num_batched_tokens, groups)
    common = snapshot.used - growth.private
    starts = np.unique(growth.end) + 1
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        head = Head(request, request_left, int(starts[middle]))
        peak = peak_of(with_head(growth, head, block_size), block_size, head.start)
        low, high = (low, middle) if common + groups * peak <= capacity else (middle + 1, high)
    return Head(request, request_left, int(starts[low]) if len(starts) else 0)
