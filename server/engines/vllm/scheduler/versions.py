"""Names in vLLM's scheduler that differ between its versions. With an unknown version, vLLM schedules alone.

To add a version, compare its v1/core/sched, v1/core and v1/request.py with the names that this package uses,
run `make test-vllm-versions`, and add an entry.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmNames:
    """Names of scheduler attributes and methods that differ between vLLM versions.

    Attributes:
        seats: name of the attribute with the upper bound of running requests.
        holders: name of the attribute with the queue of waiting requests that hold blocks.
        mixed: whether that queue also has requests that a step skipped.
        ready: name of the method that returns whether a request that waits for a grammar or for data can
            continue.
        most_blocks: name of a KV cache manager's attribute with the upper bound of blocks per request.
        counts: whether vLLM sets `prefill_capacity_bound` from `get_request_counts`, not from `bool(waiting)`.
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
    """Return the names of scheduler attributes in vLLM `version` ("0.32.0+cpu"); None if it is unknown."""
    return _KNOWN.get(".".join(version.split(".")[:2]))
