"""Compile every kernel of the block manager before the first request, or read it from disk."""

from __future__ import annotations

import functools

import numpy as np

from tonnage.cache.admission import Policy
from tonnage.cache.admission.loops import compile_loops
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.planner.model.layout import KVLayout


@functools.cache
def compile_manager(layout: KVLayout, policy: Policy | None = None) -> None:
    """Call every method of a small block manager of ``layout``, so that all its kernels are compiled.

    It takes half a second with machine code on disk and some 20 s without. Compiled code depends on the types
    of its arrays, not on their lengths, so it serves a pool of any size.
    """
    compile_loops()
    size = layout.block_size
    manager = KVCacheManager(
        layout,
        64 * len(layout.groups),
        max_num_seqs=4,
        max_model_len=16 * size,
        max_num_batched_tokens=4 * size,
        policy=policy,
    )
    prompt = np.arange(3 * size + 1, dtype=np.int32)
    # use more blocks than the pool has, so that prefix hits, copies and evictions run
    for sequence in range(0, 60, 3):
        tokens = prompt if sequence % 2 else prompt + sequence * len(prompt)
        if not isinstance(manager.admit(sequence, tokens, 2 * size, n=2), Admitted):
            raise AssertionError("an empty pool of 64 blocks did not admit a request of 9 blocks")
        manager.grant([sequence], [len(tokens)])
        manager.extend([sequence], [len(tokens)])
        manager.commit([sequence], [len(tokens)])
        manager.fork(sequence, sequence + 1)
        both = [sequence, sequence + 1]
        for step in range(1, size):
            manager.append(both, [step, step + size])
            manager.grant(both, [len(tokens) + step] * 2)
            manager.extend(both, [len(tokens) + step] * 2)
            manager.commit(both, [len(tokens) + step] * 2)
        manager.decode(both, [1, 2])
        rows = np.array([manager.row(each) for each in both])
        manager.slot_mapping(0, rows, np.array([0, 1]))
        manager.running()
        manager.stats()
        manager.free(both)
    manager.sample_invariants()
    manager.reset_prefix_cache()
