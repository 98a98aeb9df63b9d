"""vLLM by version: what its scheduler calls by another name. A version that is not here schedules on its own.

A new version is a row here once its v1/core/sched, v1/core and v1/request.py were read against the names that
this package uses and its tests ran (``make test-vllm-versions``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Names in vLLM. ``seats``: how many may run. ``holders``: the queue of those who wait and hold blocks;
    ``mixed``: with them everybody whom a step has passed over. ``ready``: whether a request that waits for
    something else has got it. ``most_blocks``: a manager's most blocks a request. ``counts``: whether
    `prefill_capacity_bound` is set from `get_request_counts`, and not from ``bool(waiting)``."""

    seats: str = "max_num_active_reqs"
    holders: str = "kv_holding_waiting"
    mixed: bool = False
    ready: str = "_handle_blocked_waiting_request"
    most_blocks: str = "max_admission_blocks_per_request"
    counts: bool = True


_KNOWN = {
    "0.30": Rules(
        seats="max_num_running_reqs",
        holders="skipped_waiting",
        mixed=True,
        ready="_try_promote_blocked_waiting_request",
        most_blocks="_max_admission_blocks_per_request",
        counts=False,
    ),
    "0.31": Rules(),
    "0.32": Rules(),
    "0.33": Rules(),
}
KNOWN_VERSIONS = tuple(_KNOWN)


def rules_of(version: str) -> Rules | None:
    """What holds in ``version`` ("0.32.0+cpu"); None: nobody knows."""
    return _KNOWN.get(".".join(version.split(".")[:2]))
