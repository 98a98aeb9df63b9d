"""Bytes that kernels add to the weights by padding and copying after vLLM loaded them.

MXFP4 experts (model_executor/layers/quantization/mxfp4.py and fused_moe/oracle/mxfp4.py) have two kernels:

- Triton, on Hopper GPUs, rounds a rank's intermediate size up to 64. It pads the packed values to a multiple of
  256 along the reduced dimension (hidden for gate and up, intermediate for down).
- Marlin, on GPUs before Hopper, pads hidden to 256 and the intermediate size to 128, for values and scales.

The formulas were compared with start-up reports of gpt-oss-20b and 120b on one GPU
(tests/data/field_reports.jsonl).
"""

from __future__ import annotations

from math import prod
from typing import Literal

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div

Kernel = Literal["triton", "marlin"]

_VALUE_BITS, _SCALE_BITS = 4, 0.25  # bits per value in MXFP4, where 32 values share one 8-bit scale


def mxfp4_kernel(gpu: str | None) -> Kernel:
    """Return the MXFP4 kernel that vLLM selects on a catalogue GPU."""
    return "marlin" if _before_hopper(gpu) else "triton"


def _before_hopper(gpu: str | None) -> bool:
    return (capability_of(gpu) or (9, 0)) < (9, 0)


def repacking_class(gpu: str) -> str | None:
    """Return a catalogue GPU whose kernels pad weights like those of ``gpu``, or None if none is known."""
    return "t4-16g" if _before_hopper(gpu) else None


def kernel_padding(architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
    """Return the bytes that padding and copies add on one rank; ``architecture`` is its share of the model."""
    if flags.device == "cpu":
        return 0
    copies = latent_copies(architecture, quantization, flags)
    if quantization.scheme != "mxfp4":
        return copies
    return copies + mxfp4_padding(architecture, mxfp4_kernel(flags.gpu), 1)


def most_kernel_padding(architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
    """Return the upper bound of `kernel_padding` over the MXFP4 kernels that vLLM may select while loading.

    On Hopper and later it falls back to Marlin where Triton's kernels are not installed: gpt-oss-120b then
    takes 65.97 GiB on an H100, not 64.38 (vllm-project/vllm issue 23278).
    """
    planned = kernel_padding(architecture, quantization, flags)
    if flags.device == "cpu" or quantization.scheme != "mxfp4" or mxfp4_kernel(flags.gpu) == "marlin":
        return planned
    return max(
        planned, latent_copies(architecture, quantization, flags) + mxfp4_padding(architecture, "marlin", 1)
    )


def latent_copies(architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
    """Return the bytes of 16-bit copies of MLA's quantized up-projections.

    vLLM multiplies by these projections in 16 bits (process_weights_after_loading in mla_attention.py, 0.19 to
    0.32). Unquantized projections need no copy, only a view.
    """
    if quantization.scheme == "none" or not any(layer.kind == "mla" for layer in architecture.cache_layers):
        return 0
    return sum(
        tensor.elements * DTYPE_BYTES[flags.dtype]
        for tensor in architecture.tensors
        if tensor.name.endswith("kv_b_proj.weight") and quantization.converts(tensor)
    )


def mxfp4_padding(architecture: Architecture, kernel: Kernel, ranks: int) -> int:
    """Return the bytes of padding that one rank holds for MXFP4 experts."""
    total = 0.0
    hidden = architecture.hidden_size
    wide = ceil_div(hidden, 256) * 256
    for tensor in architecture.tensors:
        if tensor.role != "expert" or len(tensor.shape) != 3:
            continue
        elements = prod(tensor.shape) / ranks
        if kernel == "triton":
            inner = round(elements / (tensor.shape[0] * hidden * tensor.matrices))
            padded = ceil_div(inner, 64) * 64
            scales = tensor.shape[0] * tensor.matrices * padded * hidden * _SCALE_BITS
            across = hidden * ceil_div(padded, 256) * 256 if tensor.matrices == 1 else 2 * padded * wide
            values = tensor.shape[0] * across * _VALUE_BITS
            total += (values + scales - elements * (_VALUE_BITS + _SCALE_BITS)) / 8
            continue
        inner = next((side for side in tensor.shape[1:] if side != hidden), hidden) // tensor.matrices
        padded = ceil_div(inner, 128) * 128
        total += elements * (wide / hidden * padded / inner - 1) * (_VALUE_BITS + _SCALE_BITS) / 8
    return int(total)
