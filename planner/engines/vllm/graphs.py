"""CUDA graphs of vLLM on a GPU, as vLLM estimates them before it sizes the pool.

From 0.18 on, vLLM captures two graphs of each kind to estimate the memory of all graphs: the largest, and one
more that represents the others (profile_cudagraph_memory in v1/worker/gpu_model_runner.py). From 0.20 on, vLLM
subtracts this estimate from the pool. Earlier versions capture graphs outside the share of
--gpu-memory-utilization. The planner derives the number of graphs from the flags. A graph's bytes depend on the
GPU driver, in steps of 2 MiB, so the planner fits them to logs. vLLM's estimates were 0.7 to 2.2 times the
memory of the captured graphs.
"""

from __future__ import annotations

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of, shares_memory
from tonnage.planner.engines.runtime.estimate import Coefficients
from tonnage.planner.engines.version import Version
from tonnage.planner.engines.vllm.versions import on_second_runner, rules
from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved
from tonnage.planner.units import GiB

_LARGEST, _LARGEST_WIDE = 512, 1024  # maximum tokens of a CUDA graph, in general and on SM10x (config/vllm.py)
_FREED = GiB  # bytes that other processes may free during the estimate, on devices that share the host's memory
_FLAG = "--cudagraph-capture-sizes"
_OLD = (0, 12)  # last vLLM release with --cuda-graph-sizes (engine/arg_utils.py)


def given_sizes(text: str | None) -> tuple[int, ...]:
    """Return the batch sizes of --cudagraph-capture-sizes, such as ``1,2,4``, in ascending order.

    Returns an empty tuple if ``text``, the flag's value, is None.

    Raises:
        DeploymentError: the text is no list of positive integers.
    """
    if text is None:
        return ()
    parts = text.strip().strip("[]").replace(",", " ").split()
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise DeploymentError(f"{text[:60]!r} is no list of batch sizes", field=_FLAG, hint="such as 1,2,4,8")
    return tuple(sorted({int(part) for part in parts}))


def check(flags: Deployment, version: Version) -> None:
    """Raise DeploymentError for sizes of CUDA graphs that the vLLM version refuses."""
    found = given_sizes(flags.cudagraph_capture_sizes)
    most = flags.max_cudagraph_capture_size
    if found and most is not None and found[-1] != most:
        raise DeploymentError(
            f"{most} differs from {found[-1]}, the largest size of {_FLAG}: vLLM does not start",
            field="--max-cudagraph-capture-size", hint="leave one of the two options out",
        )  # fmt: skip
    if flags.cuda_graph_sizes and version[:2] > _OLD:
        raise DeploymentError(
            f"vLLM {'.'.join(map(str, version))} has no --cuda-graph-sizes; 0.12 is the last version with it",
            field="--cuda-graph-sizes", hint=_FLAG,
        )  # fmt: skip


def capture_sizes(chosen: Resolved) -> tuple[int, ...]:
    """Return the batch sizes in tokens for which CUDA graphs are captured.

    By default they are 1, 2, 4, multiples of 8 below 256, and multiples of 16 from 256 on. The maximum is twice
    the tokens of a decode step with ``max_num_seqs`` sequences (_set_cudagraph_sizes in config/vllm.py).
    """
    flags, known, tokens = chosen.flags, rules(chosen.version), chosen.max_num_batched_tokens
    if given := given_sizes(flags.cudagraph_capture_sizes):
        return tuple(size for size in given if size <= tokens)
    wide = known.wide_graphs and (capability_of(flags.gpu) or (0, 0))[0] == _SM10X
    query = 1 + flags.num_speculative_tokens if known.draft_graphs else 1
    ceiling = flags.max_cudagraph_capture_size
    most = ceiling or min(2 * chosen.max_num_seqs * query, _LARGEST_WIDE if wide else _LARGEST)
    found = set(_grid(min(most, tokens)))
    if known.step_graph and tokens <= most:
        found.add(tokens)
    if known.uniform_graphs and ceiling is None:
        # In a decode step all sequences have the same number of tokens, so graph sizes are multiples of it.
        requests = min(chosen.max_num_seqs, _LARGEST_WIDE if wide else _LARGEST)
        counts = {*_grid(requests), requests} if query > 1 else {chosen.max_num_seqs}
        found |= {count * query for count in counts if count * query <= min(most, tokens)}
    return tuple(sorted(found))


_SM10X = 10  # major compute capability of data centre GPUs with Blackwell


def _grid(most: int) -> tuple[int, ...]:
    """Return the default CUDA graph sizes: 1, 2, 4, multiples of 8 below 256, then of 16, up to ``most``."""
    small = (size for size in (1, 2, 4) if size <= most)
    return (*small, *range(8, min(most, 255) + 1, 8), *range(256, most + 1, 16))


def per_size(architecture: Architecture, fitted: Coefficients) -> int:
    """Return the bytes of the CUDA graphs of one batch size that is not the largest.

    Each batch size has one full graph and one piecewise graph per part of the model.
    """
    layers = len({layer.layer for layer in architecture.cache_layers}) or architecture.layers
    return fitted.graph_each + layers * fitted.graph_layer


def first(chosen: Resolved, fitted: Coefficients) -> int:
    """Return the bytes of the CUDA graphs of the largest batch size.

    vLLM captures the largest size first. The first capture of a kind also loads kernels and allocates
    workspaces, whose bytes do not shrink with the tokens. vLLM logs 0.26 to 0.61 GiB for starts whose largest
    graph has 1 to 24 tokens (tests/planner/test_graphs.py).
    """
    largest = max(capture_sizes(chosen), default=0)
    return fitted.graph_first * max(_LARGEST, largest) // _LARGEST


def estimated(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> tuple[int, int]:
    """Return the bytes that vLLM estimates for one rank's CUDA graphs, and the number of captured sizes.

    ``architecture`` is the rank's share of the model. Returns (0, 0) if vLLM captures no graphs.
    """
    count = len(capture_sizes(chosen))
    if chosen.flags.enforce_eager or not rules(chosen.version).graphs_estimated or not count:
        return 0, 0
    return first(chosen, fitted) + (count - 1) * per_size(architecture, fitted), count


def is_small(chosen: Resolved) -> bool:
    """Return whether the largest CUDA graph has fewer tokens than vLLM's default.

    The coefficients of the graphs were not fitted to a start-up log of such a deployment.
    """
    return max(capture_sizes(chosen), default=0) < _LARGEST


def bounds(chosen: Resolved, size: int) -> tuple[int, int]:
    """Return (low, high) bounds of the bytes of CUDA graphs that vLLM estimates at ``size`` bytes.

    vLLM captures two graphs of each kind and measures each by the change of free device memory. It multiplies
    the second measurement by the number of sizes, so an error of this measurement is multiplied too. The bounds
    were widened until they contained at least 90 % of 35 starts in public logs. They also contain 9 of the 10
    starts that were read afterwards (tests/planner/test_graphs.py). On devices that share the host's memory,
    other processes may free memory during the measurement, and logs print down to -0.90 GiB.
    """
    low, high = (size // 8, 4 * size) if is_small(chosen) else (size // 2, 3 * size)
    return (low - _FREED if shares_memory(chosen.flags.gpu) else low), high


def subtracted(architecture: Architecture, chosen: Resolved) -> bool:
    """Return whether vLLM subtracts its estimate of CUDA graphs from the KV pool.

    In older versions, vLLM's V2 model runner estimated 0 bytes, although it captures as many graphs as the V1
    model runner (profile_cudagraph_memory in v1/worker/gpu/model_runner.py, vllm#49224).
    """
    known = rules(chosen.version)
    return known.graphs_subtracted and (known.runner_v2_graphs or not on_second_runner(architecture, known))
