"""Compilation of every CPU kernel, or loading of its cached machine code, before the weights are loaded.

The compiler's memory is then free again before the KV pool's memory is allocated. So the peak memory of the
process matches the plan.
"""

from __future__ import annotations

import numpy as np
import torch

from tonnage.server.engines.hf.kernels import attention, layer, linear, small


def compile_all() -> None:
    """Run each CPU kernel once on the smallest input, so that its machine code is in memory.

    The call takes half a second if the machine code is cached on disk, else about ten seconds.
    """
    rows = torch.zeros(16, 32, dtype=torch.bfloat16)
    linear.linear(rows[:1], rows)
    small.rms_norm(rows[:1], rows[0], 1e-5, 0.0)
    small.rms_norm(torch.zeros(small.SERIAL // 32, 32, dtype=torch.bfloat16), rows[0], 1e-5, 0.0)
    small.rotate(torch.zeros(1, 1, 32, dtype=torch.bfloat16), rows[:1], rows[:1])
    small.peaks(rows)
    block = torch.zeros(2, 1, 2, 16, 1, 32, dtype=torch.bfloat16)
    token = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    items, shares = attention.cut(np.array([0, 1]), np.array([1], np.int64), 1, 1, 1)
    scratch = np.empty((1, attention.scratch_floats(32)), np.float32)
    out = torch.zeros_like(token)
    places = [tensor.data_ptr() for tensor in (token, token, token, out, block)]
    write, tables = np.array([32], np.int64), np.array([[1]], np.int32)
    # Block size in tokens, bytes of a block, number of heads, number of KV heads, head size.
    geometry = (16, 2 * 16 * 64, 1, 1, 32)
    numbers = (np.float32(1.0), np.float32(0.0))
    step = (write, tables, items, shares, *geometry, *numbers, 0, scratch)
    attention.attend(*places, *step)
    # Run a whole decoder layer on one row, with all weights zero.
    memory = torch.zeros(2048 + linear.gate_values(1), dtype=torch.bfloat16)
    weights = np.full(len(layer.WEIGHTS), memory.data_ptr(), np.int64)
    answer = torch.zeros_like(token)
    x, work, gates = (tensor.data_ptr() for tensor in (token, memory[1024:], memory[2048:]))
    one = np.float32(1.0)
    layer.layer(
        x, answer.data_ptr(), work, gates, weights, x, x, 1, 32, 32, one, one, one, one, block.data_ptr(), *step
    )
