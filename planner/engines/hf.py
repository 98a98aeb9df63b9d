"""This project's engine: blocks as planner/kv.py lays them out; sliding groups keep window and step."""

from __future__ import annotations

from tonnage.planner import kv
from tonnage.planner.architecture import Architecture
from tonnage.planner.engines.pool import Demand, Pool


def build_pool(architecture: Architecture, dtype: str, block_size: int, max_num_batched_tokens: int) -> Pool:
    """Raises UnsupportedArchitecture for caches the engine does not store."""
    layout = kv.build_layout(architecture, "hf", dtype, block_size)
    demands = []
    for group in layout.groups:
        size = group.block_size or block_size
        if group.window is None:
            demands.append(Demand(size))
        else:
            # one more block because the window may begin inside one
            demands.append(Demand(size, most=group.window - 1 + max_num_batched_tokens, extra=1))
    return Pool(layout, tuple(demands))
