"""The pool of an engine that gives out single tokens: a block is one token slot (a cell) of all layers."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture
from tonnage.planner.engines.pool import Demand, PoolSpec
from tonnage.planner.layout import KVGroup, KVLayout


def token_pool(architecture: Architecture, size: int, dtype: str, dtype_bytes: int) -> PoolSpec:
    """``size``: bytes of a token in all layers; ``dtype_bytes``: of one value of ``dtype``."""
    layers = tuple(layer.layer for layer in architecture.cache_layers if layer.shares is None)
    layout = KVLayout(
        groups=(KVGroup("full", layers),),
        block_size=1,
        layer_slots=1,
        kv_heads=architecture.kv_heads,
        head_size=architecture.head_size,
        dtype=dtype,
        dtype_bytes=dtype_bytes,
        page_bytes=size,
    )
    return PoolSpec(layout, (Demand(1),))
