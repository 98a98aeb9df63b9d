"""vLLM by version: a row for each release at which something the planner counts changed.

A new version is a row here (an empty one where nothing changed): the last is the newest whose rules are known.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from tonnage.planner.engines.version import Version
from tonnage.planner.records import dataclass, replace


@dataclass(frozen=True, slots=True)
class Rules:
    """What differs between versions; the defaults are those of 0.7."""

    large_batches: bool = False  # devices of 70 GiB and more have defaults of their own
    hybrid_groups: bool = False  # False: sliding layers keep every token beside full ones
    chunked_on_rocm: bool = False  # AMD GPUs run on V1, with chunked prefill
    huge_batches: bool = False  # and those of 160 GiB and more
    fused_sampler: bool = False  # one top-k/top-p kernel instead of a sort: fewer bytes per logit
    # "blocks": num_blocks // groups x smallest block; "concurrency": concurrency x length
    token_line: Literal["blocks", "concurrency"] = "blocks"
    graphs_subtracted: bool = False  # the estimate of the CUDA graphs comes off the KV budget
    default_utilization: float = 0.9
    in_flight_batches: int = 1  # batches whose tokens a sliding layer still holds, on a GPU
    hybrid_prefix_caching: bool = False  # prefix caching of hybrids with recurrent state is on by default
    prefill_checkpoint: bool = False  # Mamba-2 keeps a state of the prefill beside the running one
    compressed_cache: bool = False  # layers that compress tokens (DeepSeek-V4) as planned here
    one_mrope_length: bool = False  # a table of one length for models whose positions do not run ahead


# (from this version on, what changed)
_CHANGES: tuple[tuple[Version, dict[str, Any]], ...] = (
    # pull request 17885 and before: 256 and 2,048 for all in 0.7
    ((0, 8, 3), {"large_batches": True}),
    # V1's hybrid KV cache manager
    ((0, 9, 2), {"hybrid_groups": True}),
    # before, AMD GPUs ran on V0 (reports of 0.9.2 on an MI300X in tests/data/field_reports.jsonl)
    ((0, 10, 0), {"chunked_on_rocm": True}),
    # 0.9.2 to 0.13 gave an MI300X (192 GiB) the 70 GiB defaults
    ((0, 14, 0), {"huge_batches": True}),
    # bytes per logit in logs up to 0.15 and from 0.17 on
    ((0, 16, 0), {"fused_sampler": True}),
    # pull request 38364; logs up to 0.19.1 and from 0.25.1
    ((0, 20, 0), {"token_line": "concurrency"}),
    # pull request 38284
    ((0, 21, 0), {"graphs_subtracted": True, "default_utilization": 0.92}),
    # pull request 47728 (July 2026; not yet in 0.25.1's logs)
    ((0, 26, 0), {"in_flight_batches": 2}),
    # pull request 50991 (August 2026; off in 0.25.1's logs, on in 0.32.0)
    ((0, 28, 0), {"hybrid_prefix_caching": True, "prefill_checkpoint": True}),
    # models/deepseek_v4; models/qwen3_vl.py mrope_positions_factor (pull request 44738 measured four times the
    # length for Qwen3-VL in June 2026)
    ((0, 32, 0), {"compressed_cache": True, "one_mrope_length": True}),
)
OLDEST = (0, 5, 4)  # the oldest start-up log in tests/data/field_reports.jsonl
NEWEST = _CHANGES[-1][0]


@cache
def rules(version: Version) -> Rules:
    """What holds in ``version``."""
    found = Rules()
    for since, changed in _CHANGES:
        if version >= since:
            found = replace(found, **changed)
    return found
