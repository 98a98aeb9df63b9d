"""The profile run: one full step before the first request, whose measured memory corrects the plan.

The step has max_num_batched_tokens tokens in max_num_seqs sequences (decodes and one prefill chunk), and
samples a token for each. The activations are the peak memory of the process minus its memory before the step.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.hf.batch import Batch, batch_of
from tonnage.server.engines.hf.model.device import CudaMemory, memory_of
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.sampling.draw import sample
from tonnage.server.engines.process_memory import PeakSampler
from tonnage.server.engines.request import SamplingParams

# Seconds between two memory samples; a step of the demo model takes half a second.
_INTERVAL = 0.005


def profile(runner: ModelRunner) -> int:
    """Return the bytes of memory that the largest step takes in addition to weights, KV pool and framework.

    The step (`full_batch`) writes to blocks of the pool, so it must run before the first request. On a CPU the
    process memory is measured, on a GPU the device memory of torch's allocator.
    """
    memory = memory_of(runner.device)
    if memory is not None:
        return _profile_device(runner, memory)
    sampler = PeakSampler(os.getpid(), _INTERVAL)
    before = sampler.sample()
    sampler.start()
    _step(runner)
    return max(0, sampler.stop() - before)


def _profile_device(runner: ModelRunner, memory: CudaMemory) -> int:
    memory.wait()
    memory.reset_peak()
    _step(runner)
    memory.wait()
    # The result includes workspaces that kernels allocated during the load; the plan counts them as
    # activations.
    return memory.peak() - runner.weights_bytes - runner.pool.nbytes


def device_bytes(device: torch.device) -> int | None:
    """Return the bytes of device memory that all processes take on a GPU, or None for a CPU.

    They include the CUDA context and the unused memory of torch's allocator, which `profile` does not measure.
    """
    memory = memory_of(device)
    return None if memory is None else memory.used()


def _step(runner: ModelRunner) -> None:
    batch = full_batch(runner)
    logits = runner.forward(batch).float()  # float32, as in a step with random sampling
    rows = len(logits)
    generators = [np.random.default_rng(row) for row in range(rows)]
    sample(logits, [SamplingParams(max_tokens=1, top_p=0.9)] * rows, generators)


def full_batch(runner: ModelRunner) -> Batch:
    """Return the largest batch of a step: max_num_seqs sequences, decodes and one prefill chunk at the end.

    With the gather attention, whose memory grows with the context, the first and the last sequence have the
    longest possible context.
    """
    limits = limits_of(runner.plan)
    layout = runner.plan.kv_cache.layout
    rows = limits.max_num_seqs
    chunk = min(limits.max_num_batched_tokens - (rows - 1), limits.max_model_len)
    counts = np.array([1] * (rows - 1) + [chunk], dtype=np.int64)
    kv_len = counts.copy()
    if runner.attention == "gather":
        longest = min(limits.max_model_len, max(chunk, runner.plan.kv_cache.usable_blocks * layout.block_size))
        kv_len[0] = kv_len[-1] = longest
    # All sequences have the same block table, so the batch fits even a small pool. Its results are not used.
    width = -(-int(kv_len.max()) // layout.block_size)
    blocks = 1 + np.arange(width) % max(1, runner.pool.tensor.shape[0] - 1)
    table = np.tile(blocks.astype(np.int32), (rows, 1))
    token_ids = np.arange(counts.sum(), dtype=np.int64) % runner.vocab_size
    tables, last = [table] * len(layout.groups), np.cumsum(counts) - 1
    return batch_of(token_ids, kv_len - counts, counts, tables, layout.block_size, last)
