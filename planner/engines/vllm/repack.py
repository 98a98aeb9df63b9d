"""What a kernel's padding adds to weights after vLLM loaded them.

MXFP4 experts (model_executor/layers/quantization/mxfp4.py): the Triton kernel of Hopper GPUs pads the packed
values' hidden side to a multiple of 256, Marlin (GPUs before Hopper) pads hidden to 256 and the intermediate
size to 128, values and scales. Held against the start-up reports of gpt-oss-20b and 120b
(tests/data/field_reports.jsonl).
"""

from __future__ import annotations

from math import prod
from typing import Literal

from tonnage.planner.devices.catalogue import capability_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Deployment
from tonnage.planner.units import ceil_div

Kernel = Literal["triton", "marlin"]

_VALUE_BITS, _SCALE_BITS = 4, 0.25  # MXFP4: 32 values share one 8-bit scale


def mxfp4_kernel(gpu: str | None) -> Kernel:
    """The kernel vLLM picks on a GPU of the catalogue."""
    return "marlin" if _before_hopper(gpu) else "triton"


def _before_hopper(gpu: str | None) -> bool:
    return (capability_of(gpu) or (9, 0)) < (9, 0)


def repacking_class(gpu: str) -> str | None:
    """A GPU whose kernels pad as this one's; None: none is known."""
    return "t4-16g" if _before_hopper(gpu) else None


def kernel_padding(architecture: Architecture, scheme: str, flags: Deployment) -> int:
    """0 but for MXFP4 experts on a GPU. ``architecture``: one rank's share."""
    if scheme != "mxfp4" or flags.device == "cpu":
        return 0
    return mxfp4_padding(architecture, mxfp4_kernel(flags.gpu), 1)


def mxfp4_padding(architecture: Architecture, kernel: Kernel, ranks: int) -> int:
    """Bytes beyond the checkpoint's own that one rank holds for the experts."""
    total = 0.0
    hidden = architecture.hidden_size
    wide = ceil_div(hidden, 256) * 256
    for tensor in architecture.tensors:
        if tensor.role != "expert" or len(tensor.shape) != 3:
            continue
        elements = prod(tensor.shape) / ranks
        if kernel == "triton":
            total += elements * (wide / hidden - 1) * _VALUE_BITS / 8
            continue
        inner = next((side for side in tensor.shape[1:] if side != hidden), hidden) // tensor.matrices
        padded = ceil_div(inner, 128) * 128
        total += elements * (wide / hidden * padded / inner - 1) * (_VALUE_BITS + _SCALE_BITS) / 8
    return int(total)
