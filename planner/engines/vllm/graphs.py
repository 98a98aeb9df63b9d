"""CUDA graphs of vLLM on a GPU, as vLLM estimates them before it sizes the pool.

From 0.18 on, vLLM captures two graphs of each kind on trial: the largest, and one more that represents the
others (profile_cudagraph_memory in v1/worker/gpu_model_runner.py). From 0.20 on, the estimate is subtracted
from the pool. Earlier versions capture graphs outside the share of --gpu-memory-utilization. The number of
graphs follows from the flags. The driver decides a graph's bytes, in steps of 2 MiB, so they are fitted: the
estimate was 0.7 to 2.2 times the captured memory.
"""

from __future__ import annotations

from tonnage.planner.engines.runtime.estimate import Coefficients
from tonnage.planner.engines.vllm.versions import on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved

_LARGEST = 512  # maximum tokens of a graph (config/vllm.py _set_cudagraph_sizes, 0.13 to 0.33)


def largest(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the number of tokens of the largest captured CUDA graph."""
    return min(2 * max_num_seqs, _LARGEST, max_num_batched_tokens)


def sizes(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the number of batch sizes for which CUDA graphs are captured.

    The sizes are 1, 2, 4, multiples of 8 below 256 and multiples of 16 from there, up to twice max_num_seqs.
    """
    most = largest(max_num_seqs, max_num_batched_tokens)
    return (
        sum(size <= most for size in (1, 2, 4))
        + len(range(8, min(most, 255) + 1, 8))
        + len(range(256, most + 1, 16))
    )


def per_size(architecture: Architecture, fitted: Coefficients) -> int:
    """Return the bytes of the CUDA graphs of each batch size after the first: a full and piecewise graphs."""
    layers = len({layer.layer for layer in architecture.cache_layers}) or architecture.layers
    return fitted.graph_each + layers * fitted.graph_layer


def first(chosen: Resolved, fitted: Coefficients) -> int:
    """Return the bytes of the CUDA graphs of the largest batch size, proportional to its tokens."""
    return fitted.graph_first * largest(chosen.max_num_seqs, chosen.max_num_batched_tokens) // _LARGEST


def estimated(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> tuple[int, int]:
    """Return (bytes, batch sizes) of vLLM's own estimate of CUDA graphs on one rank.

    ``architecture`` is the rank's share of the model. Returns (0, 0) if vLLM captures no graphs.
    """
    if chosen.flags.enforce_eager or not rules(chosen.version).graphs_estimated:
        return 0, 0
    count = sizes(chosen.max_num_seqs, chosen.max_num_batched_tokens)
    return first(chosen, fitted) + (count - 1) * per_size(architecture, fitted), count


def subtracted(architecture: Architecture, chosen: Resolved) -> bool:
    """Return whether vLLM subtracts its estimate of CUDA graphs from the pool.

    The second model runner's estimate was 0 in older versions, although it captures as many graphs
    (profile_cudagraph_memory in v1/worker/gpu/model_runner.py, vllm#49224).
    """
    known = rules(chosen.version)
    return known.graphs_subtracted and (known.runner_v2_graphs or not on_second_runner(architecture, known))
