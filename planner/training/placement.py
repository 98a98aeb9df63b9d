"""Placement of model states under offload (GPU, CPU, NVMe), and the weights that ZeRO-3 and FSDP gather."""

from __future__ import annotations

from typing import NamedTuple

from tonnage.planner.training.methods import Trained
from tonnage.planner.training.plans import Line
from tonnage.planner.training.precision import Convention
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import stack_of
from tonnage.planner.training.states import States

# Default sizes of DeepSpeed 0.19 (runtime/zero/config.py, offload_config.py)
PREFETCH_ELEMENTS = 50_000_000  # default of stage3_prefetch_bucket_size, in parameters
MAX_LIVE_ELEMENTS = 1_000_000_000  # default of stage3_max_live_parameters
NVME_PARAM_BUFFERS = 5 * 100_000_000 * 2  # offload_param: buffer_count x buffer_size x 2 bytes
# Number of buffers for optimizer states on NVMe (offload_optimizer.buffer_count). Each buffer is as large as
# the states of the largest tensor.
NVME_OPTIMIZER_BUFFERS = 4
INIT_FACTOR_NUMERATOR, INIT_FACTOR_DENOMINATOR = 3, 2  # 3 / 2 is DeepSpeed's additional_buffer_factor


class HostBytes(NamedTuple):
    """The model states that are offloaded from the GPU, and the weights that are gathered on the GPU.

    Attributes:
        weights_off: whether weights are offloaded.
        gradients_off: whether gradients are offloaded.
        optimizer_off: whether optimizer states are offloaded.
        lines: plan lines of CPU and NVMe memory, in bytes per node.
        gathered: plan line of the weights that ZeRO-3 or FSDP gathers on the GPU.
        init: bytes of a node's CPU memory while every rank builds the model.
    """

    weights_off: bool
    gradients_off: bool
    optimizer_off: bool
    lines: tuple[Line, ...]
    gathered: Line
    init: int


def init_bytes(parameters: int, gpus: int) -> int:
    """Return the bytes of a node's CPU memory while each of its ranks builds the whole model in fp32.

    The formula is parameters x 4 x ranks x 1.5 (DeepSpeed's additional_buffer_factor).
    """
    return parameters * 4 * gpus * INIT_FACTOR_NUMERATOR // INIT_FACTOR_DENOMINATOR


def place(setup: TrainingSetup, states: States, convention: Convention, trained: Trained) -> HostBytes:
    """Return which model states the offload flags move to CPU or NVMe, and their bytes there.

    Offload moves optimizer states with their master weights and gradients (ZeRO-Offload). With `offload_param`,
    the weights move as well (ZeRO-Infinity).
    """
    node = setup.gpus
    weights_off = setup.offload_param != "none"
    optimizer_off = setup.offload_optimizer != "none"
    gradients_off = optimizer_off and setup.zero_stage >= 2
    lines: list[Line] = []

    def line(name: str, place: str, size: int, formula: str, source: str) -> None:
        """Add a line with exact bytes to the training plan: both bounds equal `size`."""
        lines.append(Line(name, place, size, size, size, formula, source))  # type: ignore[arg-type]

    if optimizer_off:
        where = "nvme" if setup.offload_optimizer == "nvme" else "cpu"
        size = states.optimizer + states.master
        if not setup.is_fsdp and not states.master and convention.weights != 4:
            # DeepSpeed's CPU optimizer adds an fp32 copy of the weights.
            size += 4 * size // max(1, 2 * convention.state)
        line("optimizer states", where, size * node, f"{node} ranks of {size:,} bytes", "--offload-optimizer")
        share = states.trainable * states.gradients // max(1, states.full_gradients)
        line("gradients", "cpu", 4 * share * node, f"fp32, 4 x {share:,} elements x {node} ranks",
             "DeepSpeed ZeRO-Offload: fp32 gradients of the partition")  # fmt: skip
        if where == "nvme":
            size = NVME_OPTIMIZER_BUFFERS * states.largest * 4 * node
            formula = "4 buffers of the largest tensor in fp32"
            line("NVMe buffers (optimizer)", "cpu", size, formula, "DeepSpeed offload_optimizer.buffer_count")
    if weights_off:
        where = "nvme" if setup.offload_param == "nvme" else "cpu"
        size = states.weights + states.frozen
        line("weights", where, size * node, f"{node} ranks of {size:,} bytes", "--offload-param")
        if where == "nvme":
            line("NVMe buffers (weights)", "cpu", NVME_PARAM_BUFFERS * node, "5 x 1e8 elements of 2 bytes",
                 "DeepSpeed offload_param.buffer_count x buffer_size")  # fmt: skip
    if setup.optimizer == "paged-adamw-8bit" and not optimizer_off:
        line("pageable optimizer states", "cpu", states.optimizer * node,
             "what is paged out when the GPU is full, at most", "bitsandbytes paged optimizers")  # fmt: skip
    # Every rank of a node first builds the whole model, instead of its own part of it.
    whole = setup.strategy in ("zero1", "zero2") or (setup.strategy == "zero3" and not setup.zero_init)
    return HostBytes(
        weights_off,
        gradients_off,
        optimizer_off,
        tuple(lines),
        _gathered(setup, states, convention),
        init_bytes(trained.parameters, setup.gpus) if whole else 0,
    )


def _gathered(setup: TrainingSetup, states: States, convention: Convention) -> Line:
    """Return a training plan's line of the weights that ZeRO-3 or FSDP holds gathered on the GPU at once.

    * DeepSpeed: the current module and the prefetch bucket, at most max_live_parameters.
    * FSDP: the current unit, the next one prefetched, and the root unit with embedding and head. The root stays
      gathered through the forward pass unless embedding and head are units of their own.
    """
    each = convention.compute
    if setup.method in ("lora", "qlora", "ia3") and states.parameters:
        each = max(1, -(-states.full_frozen // states.parameters))
    if setup.is_fsdp:
        layer, outer = states.layer_gathered, states.outer_gathered
        size, low = 2 * layer + outer, layer + outer
        formula = f"2 x {layer:,} bytes of a layer + {outer:,} of the root unit"
        if stack_of(setup).shards_ends and setup.method == "full":
            size, low = layer + max(layer, states.end_gathered), max(layer, states.end_gathered)
            formula = f"a layer, {layer:,} bytes, and one more or the head, {states.end_gathered:,}"
        elif stack_of(setup).shards_ends:
            # torchtune's configs leave custom_sharded_layers unset, so FSDP's root unit has embedding and head.
            low = max(layer, states.end_gathered)
            formula += f"; {low:,} with custom_sharded_layers, where each end is a unit of its own"
        return Line("gathered weights", "gpu", size, low, size, formula, "FSDP, one unit prefetched")
    prefetch = min(PREFETCH_ELEMENTS, states.parameters)
    live = min(states.parameters, states.layer + prefetch)
    size = max(live, states.largest) * each
    high = min(states.parameters, MAX_LIVE_ELEMENTS) * each
    formula = f"{each} bytes x ({states.layer:,} of a layer + {prefetch:,} prefetched)"
    return Line("gathered weights", "gpu", size, states.largest * each, max(size, high), formula,
                "DeepSpeed stage3_prefetch_bucket_size, stage3_max_live_parameters")  # fmt: skip
