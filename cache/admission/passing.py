"""Passing: when the waiting head of the queue begins, so that whoever passes it does not delay it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.peak import Growth, growth_of, peak_of
from tonnage.cache.admission.reservation import split_reservation
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.admission.types import AdmissionRequest, Limits
from tonnage.cache.blocks.groups import num_full


@dataclass(frozen=True, slots=True)
class Head:
    """The first of the queue, waiting for room; ``start`` steps from now it begins if all goes as forecast."""

    request: AdmissionRequest
    output_left: int
    start: int


def with_head(growth: Growth, head: Head, block_size: int) -> Growth:
    """What the running requests will hold with the head from its start on."""
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
    """When the waiting head of the queue begins if all goes as forecast and nobody else is admitted.

    ``request_left`` and ``output_left`` [running]: output tokens forecast for it and for each running request;
    ``margin`` as `Policy.margin`. The first end of a running request after which the peak with the head fits;
    the later the start, the less there is beside it, so it is found by bisection.
    """
    block_size, groups = limits.layout.block_size, num_full(limits.layout)
    if groups == 0:  # nobody passes it
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
