"""Resolved: a Deployment without open questions."""

from __future__ import annotations

from tonnage.planner.engines.version import Version
from tonnage.planner.plans import Deployment
from tonnage.planner.records import dataclass


@dataclass(frozen=True, slots=True)
class Resolved:
    """``flags`` for the Plan, and its integers without None. ``limit``: bytes of the device that the plan may
    take."""

    flags: Deployment
    version: Version
    device_memory: int
    limit: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    given_block_size: int | None = None
