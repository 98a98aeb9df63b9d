"""DeepSpeed's own estimators of model states, reproduced exactly for `--emit deepspeed-estimate`.

The estimators cover ZeRO stages 2 and 3 with fp16 and Adam. They leave out activations, buffers and gathered
modules, so a plan is larger. Sources, DeepSpeed 0.19.8: `runtime/zero/stage_1_and_2.py` and `stage3.py`
(`estimate_zero2_model_states_mem_needs`, `estimate_zero3_...` and their `_all_live`), and
docs/code-docs/source/memory.rst, which has an older ZeRO-2 formula.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.units import GiB

BUFFER_FACTOR = 1.5  # factor on the CPU bytes, DeepSpeed's additional_buffer_factor


class StateEstimate(NamedTuple):
    """Bytes of model states by DeepSpeed's estimators.

    Attributes:
        gpu: bytes on each GPU.
        cpu: bytes of CPU memory on each node.
    """

    gpu: int
    cpu: int


def zero2(
    parameters: int, gpus: int, nodes: int = 1, *, offload: bool, documented: bool = False
) -> StateEstimate:
    """Return DeepSpeed's estimate of model states with ZeRO-2.

    With P parameters on N GPUs, the current formula without offload is 2 P + 18 P / N bytes per GPU.
    `documented` selects the older formula of DeepSpeed's documentation, 4 P + 16 P / N.
    """
    total = gpus * nodes
    if offload:
        return StateEstimate(2 * parameters, int(parameters * max(4 * total, 16) * BUFFER_FACTOR))
    each, shared = (4, 16) if documented else (2, 18)
    gpu = each * parameters + int(shared * parameters / total)
    return StateEstimate(gpu, int(parameters * 4 * gpus * BUFFER_FACTOR))


def zero3(
    parameters: int, largest_layer: int, gpus: int, nodes: int = 1, *,
    offload_optimizer: bool, offload_param: bool, zero_init: bool,
) -> StateEstimate:  # fmt: skip
    """Return DeepSpeed's estimate of model states with ZeRO-3, from parameter counts and offload flags.

    `largest_layer` is the number of parameters of the largest leaf module.
    """
    total = gpus * nodes
    gpu, each_node = 4 * largest_layer, 1 / nodes
    if not offload_optimizer:
        gpu += int(18 * parameters / total)
        built = largest_layer if zero_init else parameters
        return StateEstimate(gpu, int(built * 4 * gpus * BUFFER_FACTOR))
    share = (18 if offload_param else 16) * each_node
    if not offload_param:
        gpu += int(2 * parameters / total)
    return StateEstimate(gpu, int(parameters * (share if zero_init else max(4 * gpus, share)) * BUFFER_FACTOR))


def counts(architecture: Architecture) -> tuple[int, int]:
    """Return the number of parameters of a model (tied tensors once) and of its largest module."""
    modules = Counter[str]()
    for tensor in architecture.tensors:
        if tensor.is_parameter:
            modules[tensor.module] += tensor.elements
    return architecture.parameters, max(modules.values(), default=0)


def tables(architecture: Architecture, gpus: int, nodes: int) -> str:
    """Return the table that DeepSpeed's `..._all_live` estimators print for a model (their GB is GiB)."""
    return tables_of(*counts(architecture), gpus, nodes)


def tables_of(parameters: int, largest: int, gpus: int, nodes: int) -> str:
    """Return the table that DeepSpeed's `..._all_cold` estimators print for given parameter counts."""
    head = (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node.\n"
        f"SW: Model with {int(parameters / 1e6)}M total params"
    )
    columns = "  per CPU  |  per GPU |   Options"
    two = [f"{head}.", columns]
    for offload in (True, False):
        two.append(_row(zero2(parameters, gpus, nodes, offload=offload), f"offload_optimizer={_at(offload)}"))
    three = [f"{head}, {int(largest / 1e6)}M largest layer params.", columns]
    for optimizer, param in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            found = zero3(
                parameters, largest, gpus, nodes, offload_optimizer=optimizer, offload_param=param,
                zero_init=init,
            )  # fmt: skip
            options = f"offload_param={_at(param)}, offload_optimizer={_at(optimizer)}, zero_init={int(init)}"
            three.append(_row(found, options))
    return "\n".join([*two, *three])


def _at(offload: bool) -> str:
    """Return the offload device as DeepSpeed's tables print it: `cpu ` if offloaded, else `none`."""
    return "cpu " if offload else "none"


def _row(found: StateEstimate, options: str) -> str:
    """Return one line of DeepSpeed's table of model states: CPU and GPU memory in GiB, and the options."""
    return f" {found.cpu / GiB:7.2f}GB | {found.gpu / GiB:6.2f}GB | {options}"
