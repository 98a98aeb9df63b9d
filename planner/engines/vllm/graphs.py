"""vLLM on a GPU: CUDA graphs, as vLLM estimates them before it sizes the pool.

From 0.18 on two graphs of each kind are captured on trial: the largest, and one more that stands for all others
(v1/worker/gpu_model_runner.py profile_cudagraph_memory). The sum comes off the pool from 0.20 on; before, what
is captured lies outside the share of --gpu-memory-utilization. How many there are follows from the flags; what
one takes is the driver's, in steps of 2 MiB, and fitted: the estimate was 0.7 to 2.2 times what was captured.
"""

from __future__ import annotations

from tonnage.planner.engines.runtime.estimate import Coefficients
from tonnage.planner.engines.vllm.versions import on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved

_LARGEST = 512  # tokens of the largest graph (config/vllm.py _set_cudagraph_sizes, 0.13 to 0.33)


def largest(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Tokens of the largest graph."""
    return min(2 * max_num_seqs, _LARGEST, max_num_batched_tokens)


def sizes(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """How many batch sizes are captured: 1, 2, 4, multiples of 8 below 256, of 16 from there on, up to twice
    the sequences."""
    most = largest(max_num_seqs, max_num_batched_tokens)
    return (
        sum(size <= most for size in (1, 2, 4))
        + len(range(8, min(most, 255) + 1, 8))
        + len(range(256, most + 1, 16))
    )


def per_size(architecture: Architecture, fitted: Coefficients) -> int:
    """Bytes of each batch size after the first: a graph of all layers, and one of each piece between two
    attentions."""
    layers = len({layer.layer for layer in architecture.cache_layers}) or architecture.layers
    return fitted.graph_each + layers * fitted.graph_layer


def first(chosen: Resolved, fitted: Coefficients) -> int:
    """Bytes of the largest batch size, in proportion to its tokens."""
    return fitted.graph_first * largest(chosen.max_num_seqs, chosen.max_num_batched_tokens) // _LARGEST


def estimated(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> tuple[int, int]:
    """(bytes, batch sizes) of vLLM's own estimate on one rank, whose share ``architecture`` is; (0, 0) where it
    captures none."""
    if chosen.flags.enforce_eager or not rules(chosen.version).graphs_estimated:
        return 0, 0
    count = sizes(chosen.max_num_seqs, chosen.max_num_batched_tokens)
    return first(chosen, fitted) + (count - 1) * per_size(architecture, fitted), count


def subtracted(architecture: Architecture, chosen: Resolved) -> bool:
    """Whether the estimate comes off the pool: the second model runner's was 0 until it had one
    (v1/worker/gpu/model_runner.py profile_cudagraph_memory, vllm#49224), though it captures as many."""
    known = rules(chosen.version)
    return known.graphs_subtracted and (known.runner_v2_graphs or not on_second_runner(architecture, known))
