"""Names in vLLM's scheduler that differ between its versions. An unknown version schedules on its own.

A new version becomes a row here once its v1/core/sched, v1/core and v1/request.py were compared with the names
that this package uses, and its tests passed (`make test-vllm-versions`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmNames:
    """Attribute names in one vLLM version.

    Attributes:
        seats: the upper bound of running requests.
        holders: the queue of waiting requests that hold blocks.
        mixed: whether that queue also has the requests that a step passed over.
        ready: the method that tells whether a request that waits for a grammar or for data can go on.
        most_blocks: a manager's upper bound of blocks per request.
        counts: whether `prefill_capacity_bound` is set from `get_request_counts` and not from `bool(waiting)`.
    """

    seats: str = "max_num_active_reqs"
    holders: str = "kv_holding_waiting"
    mixed: bool = False
    ready: str = "_handle_blocked_waiting_request"
    most_blocks: str = "max_admission_blocks_per_request"
    counts: bool = True


_KNOWN = {
    "0.30": VllmNames(
        seats="max_num_running_reqs",
        holders="skipped_waiting",
        mixed=True,
        ready="_try_promote_blocked_waiting_request",
        most_blocks="_max_admission_blocks_per_request",
        counts=False,
    ),
    "0.31": VllmNames(),
    "0.32": VllmNames(),
    "0.33": VllmNames(),
}
KNOWN_VERSIONS = tuple(_KNOWN)


def names_of(version: str) -> VllmNames | None:
    """Return the names of vLLM `version` ("0.32.0+cpu"), or None when the version is unknown."""
    return _KNOWN.get(".".join(version.split(".")[:2]))
