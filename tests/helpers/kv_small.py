"""Small block managers for tests of single cases."""

from __future__ import annotations

import numpy as np
from invariants import check_invariants
from kv_calls import commit, extend
from own_hash import HashBlock, set_hash

from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.planner.model.layout import KVGroup, KVLayout

FULL = KVGroup("full", (0,))
SLIDING = KVGroup("sliding", (1,), window=8)


def make(
    *groups: KVGroup,
    blocks: int = 65,
    block_size: int = 4,
    seqs: int = 8,
    length: int = 128,
    budget: int = 64,
    caching: bool = True,
    hash_block: HashBlock | None = None,
) -> KVCacheManager:
    layout = KVLayout(groups or (FULL,), block_size, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)
    manager = KVCacheManager(
        layout,
        blocks,
        max_num_seqs=seqs,
        max_model_len=length,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    if hash_block is not None:
        set_hash(manager, hash_block)
    return manager


def start(
    manager: KVCacheManager, sequence: int, tokens: list[int], max_tokens: int = 8, **kwargs: object
) -> int:
    """Admit and compute the prompt; returns the cached tokens."""
    admitted = manager.admit(sequence, tokens, max_tokens, **kwargs)  # type: ignore[arg-type]
    assert isinstance(admitted, Admitted)
    extend(manager, sequence, len(tokens))
    commit(manager, sequence, len(tokens))
    check_invariants(manager)
    return admitted.cached_tokens


def blocks_of(manager: KVCacheManager, sequence: int, group: int = 0) -> list[int]:
    row = manager.tables[group][manager.row(sequence)]
    return row[: np.flatnonzero(row)[-1] + 1].tolist() if row.any() else []
