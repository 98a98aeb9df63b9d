"""The profile run: one full step before the first request, so that the plan is corrected by what it took.

A step of max_num_batched_tokens tokens in max_num_seqs rows (decodes and one prefill chunk) is computed and its
tokens are drawn; what the process holds at its highest beside what it held before are the activations.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.sampling.draw import sample
from tonnage.server.engines.process_memory import PeakSampler
from tonnage.server.engines.request import SamplingParams

# Seconds between two looks at /proc; a step of the demo model takes half a second.
_INTERVAL = 0.005


def profile(runner: ModelRunner) -> int:
    """Bytes one full step takes beside weights, pool and framework.

    Writes into blocks of the pool that no request owns yet. On a CPU only: elsewhere the device counts.
    """
    if runner.device.type == "cuda":
        return _profile_cuda(runner)
    sampler = PeakSampler(os.getpid(), _INTERVAL)
    before = sampler.sample()
    with sampler:
        _step(runner)
    return max(0, sampler.peak - before)


def _profile_cuda(runner: ModelRunner) -> int:
    torch.cuda.synchronize(runner.device)
    torch.cuda.reset_peak_memory_stats(runner.device)
    _step(runner)
    torch.cuda.synchronize(runner.device)
    # What a kernel was given to work in at the load counts too.
    return torch.cuda.max_memory_allocated(runner.device) - runner.weights_bytes - runner.pool.nbytes


def device_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that are taken, by whomever: the CUDA context and what torch's allocator keeps beside its
    tensors are in no other figure. None on a CPU, where the process itself is measured."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _step(runner: ModelRunner) -> None:
    batch = full_batch(runner)
    logits = runner.forward(batch).float()  # as where somebody draws at random
    rows = len(logits)
    generators = [np.random.default_rng(row) for row in range(rows)]
    sample(logits, [SamplingParams(max_tokens=1, top_p=0.9)] * rows, generators)


def full_batch(runner: ModelRunner) -> Batch:
    """max_num_seqs rows, all but the last of one token. What gathers its context pays for its length: there
    one decode and the chunk are as long as one sequence gets."""
    limits = limits_of(runner.plan)
    layout = runner.plan.kv_cache.layout
    rows = limits.max_num_seqs
    chunk = min(limits.max_num_batched_tokens - (rows - 1), limits.max_model_len)
    counts = np.array([1] * (rows - 1) + [chunk], dtype=np.int64)
    kv_len = counts.copy()
    if runner.attention == "gather":
        longest = min(limits.max_model_len, max(chunk, runner.plan.kv_cache.usable_blocks * layout.block_size))
        kv_len[0] = kv_len[-1] = longest
    start = np.concatenate(([0], np.cumsum(counts)))
    owner = np.repeat(np.arange(rows), counts)
    positions = np.arange(start[-1]) - start[:-1][owner] + (kv_len - counts)[owner]
    # Rows share blocks: what is computed means nothing, and no pool is too small for it.
    width = -(-int(kv_len.max()) // layout.block_size)
    blocks = 1 + np.arange(width) % max(1, runner.pool.tensor.shape[0] - 1)
    table = np.tile(blocks.astype(np.int32), (rows, 1))
    slots = table[owner, positions // layout.block_size].astype(np.int64) * layout.block_size
    slots += positions % layout.block_size
    groups = len(layout.groups)
    return Batch(
        token_ids=np.arange(len(positions), dtype=np.int64) % runner.vocab_size,
        positions=positions,
        query_start=start,
        kv_len=kv_len,
        slots=(slots,) * groups,
        tables=(table,) * groups,
        logits_at=start[1:] - 1,
    )
