"""DeepSpeed's own estimators of model states, by their published formulas, for comparison with our figures.

They cover stages 2 and 3 with fp16 and Adam; activations, buffers and the gathered module are left out.
Sources: docs/code-docs/source/memory.rst (the documented ZeRO-2 formula, older code) and
runtime/zero/stage_1_and_2.py, stage3.py of 0.19 (the current ones).
"""

from __future__ import annotations

from typing import NamedTuple

BUFFER_FACTOR = 1.5  # additional_buffer_factor


class Estimate(NamedTuple):
    """Bytes per GPU, and of CPU memory per node."""

    gpu: int
    cpu: int


def zero2(parameters: int, gpus: int, nodes: int = 1, *, offload: bool, documented: bool = False) -> Estimate:
    """``documented``: the old 4 P + 16 P / N without offload, else the current 2 P + 18 P / N."""
    total = gpus * nodes
    if offload:
        return Estimate(2 * parameters, int(parameters * max(4 * total, 16) * BUFFER_FACTOR))
    each, shared = (4, 16) if documented else (2, 18)
    gpu = each * parameters + shared * parameters // total
    return Estimate(gpu, int(parameters * 4 * gpus * BUFFER_FACTOR))


def zero3(
    parameters: int, largest_layer: int, gpus: int, nodes: int = 1, *,
    offload_optimizer: bool, offload_param: bool, zero_init: bool,
) -> Estimate:  # fmt: skip
    """``largest_layer``: parameters of the largest leaf module."""
    total = gpus * nodes
    gpu, at_init = 4 * largest_layer, 4.0 * gpus
    if offload_optimizer and offload_param:
        share = 18 / nodes
    elif offload_optimizer:
        gpu += 2 * parameters // total
        share = 16 / nodes
    else:
        gpu += 18 * parameters // total
        if zero_init:
            return Estimate(gpu, int(largest_layer * 4 * gpus * BUFFER_FACTOR))
        return Estimate(gpu, int(parameters * 4 * gpus * BUFFER_FACTOR))
    return Estimate(gpu, int(parameters * (share if zero_init else max(at_init, share)) * BUFFER_FACTOR))
