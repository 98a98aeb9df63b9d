"""DeepSpeed's own estimators of model states, answer for answer: what ``--emit deepspeed-estimate`` prints.

They cover stages 2 and 3 with fp16 and Adam; activations, buffers and the gathered module are left out, so the
plan is the larger figure. Sources: ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` of 0.19.8
(``estimate_zero2_model_states_mem_needs``, ``estimate_zero3_...`` and their ``_all_live``), and
docs/code-docs/source/memory.rst, which still has an older ZeRO-2 formula.
"""

from __future__ import annotations

from typing import NamedTuple

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.units import GiB

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
    gpu = each * parameters + int(shared * parameters / total)
    return Estimate(gpu, int(parameters * 4 * gpus * BUFFER_FACTOR))


def zero3(
    parameters: int, largest_layer: int, gpus: int, nodes: int = 1, *,
    offload_optimizer: bool, offload_param: bool, zero_init: bool,
) -> Estimate:  # fmt: skip
    """``largest_layer``: parameters of the largest leaf module."""
    total = gpus * nodes
    gpu, each_node = 4 * largest_layer, 1 / nodes
    if not offload_optimizer:
        gpu += int(18 * parameters / total)
        built = largest_layer if zero_init else parameters
        return Estimate(gpu, int(built * 4 * gpus * BUFFER_FACTOR))
    share = (18 if offload_param else 16) * each_node
    if not offload_param:
        gpu += int(2 * parameters / total)
    return Estimate(gpu, int(parameters * (share if zero_init else max(4 * gpus, share)) * BUFFER_FACTOR))


def counts(architecture: Architecture) -> tuple[int, int]:
    """``model_to_params``: (parameters, shared ones once; those of the module that has most of its own)."""
    total, modules = 0, dict[str, int]()
    for tensor in architecture.tensors:
        if tensor.is_parameter:
            total += tensor.elements if tensor.tied_to is None else 0
            modules[tensor.module] = modules.get(tensor.module, 0) + tensor.elements
    return total, max(modules.values(), default=0)


def tables(architecture: Architecture, gpus: int, nodes: int) -> str:
    """What ``estimate_zero2_model_states_mem_needs_all_live`` and ``estimate_zero3_...`` print (GB: GiB)."""
    return tables_of(*counts(architecture), gpus, nodes)


def tables_of(parameters: int, largest: int, gpus: int, nodes: int) -> str:
    """The same for a model of ``counts``: their ``_all_cold``."""
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
    return "cpu " if offload else "none"


def _row(found: Estimate, options: str) -> str:
    return f" {found.cpu / GiB:7.2f}GB | {found.gpu / GiB:6.2f}GB | {options}"
