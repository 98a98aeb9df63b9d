"""Bytes that kernels add to the weights by padding and copying after vLLM loaded them.

MXFP4 experts (model_executor/layers/quantization/mxfp4.py and fused_moe/oracle/mxfp4.py) have four kernels:

- Triton, on Hopper GPUs, rounds a rank's intermediate size up to 64. It pads the packed values to a multiple of
  256 along the reduced dimension (hidden for gate and up, intermediate for down).
- TensorRT-LLM, on data centre GPUs with Blackwell, pads the hidden and the intermediate size to 256, for values
  and scales. From 0.30 on, it pads the intermediate size to 128.
- Triton, on AMD GPUs, pads the hidden and the intermediate size to 256, for values and scales
  (mxfp4_round_up_hidden_size_and_intermediate_size of 0.32; a log of gpt-oss-20b on an R9700 under 0.11.2).
- Marlin, on all other GPUs, pads the hidden size to 256 and the intermediate size to 128, for values and
  scales. Up to 0.10.2, vLLM used Marlin only on GPUs before Hopper (get_mxfp4_backend of 0.10.2 and 0.11.0).

The formulas were compared with start-up reports of gpt-oss-20b and 120b on one GPU
(tests/data/field_reports.jsonl).
"""

from __future__ import annotations

from math import prod
from typing import Literal

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of, is_amd
from tonnage.planner.engines.version import Version
from tonnage.planner.engines.vllm.versions import NEWEST, rules, version_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div

Kernel = Literal["triton", "rocm", "trtllm", "marlin"]

# First vLLM release whose TensorRT-LLM kernel pads the intermediate size to 128 instead of 256
# (mxfp4_round_up_hidden_size_and_intermediate_size of 0.20.1 and 0.30.0 in fused_moe/oracle/mxfp4.py).
_SMALLER_TILE = (0, 30, 0)
_VALUE_BITS, _SCALE_BITS = 4, 0.25  # bits per value in MXFP4, where 32 values share one 8-bit scale


def mxfp4_kernel(flags: Deployment) -> Kernel:
    """Return the MXFP4 kernel that vLLM selects on the deployment's GPU; an unnamed GPU is taken as an H100."""
    if is_amd(flags.gpu):
        return "rocm"
    capability = capability_of(flags.gpu) or (9, 0)
    if capability[0] == 10:
        return "trtllm"
    if capability < (9, 0) or (capability >= (11, 0) and rules(version_of(flags)).marlin_beyond_hopper):
        return "marlin"
    return "triton"


def repacking_class(gpu: str) -> str | None:
    """Return a GPU whose kernels pad weights as on ``gpu``; None if ``gpu`` uses Hopper's kernels."""
    if is_amd(gpu):
        return "r9700-32g"
    capability = capability_of(gpu) or (9, 0)
    if capability < (9, 0):
        return "t4-16g"
    if capability[0] == 10:
        return "b200-180g"
    return "rtx5090-32g" if capability >= (11, 0) else None


def kernel_padding(architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
    """Return the bytes that kernels add to the weights of one rank by padding and copies.

    ``architecture`` is the rank's share of the model.
    """
    if flags.device == "cpu":
        return 0
    copies = latent_copies(architecture, quantization, flags)
    if quantization.scheme != "mxfp4":
        return copies
    return copies + mxfp4_padding(architecture, mxfp4_kernel(flags), 1, version_of(flags))


def most_kernel_padding(architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
    """Return the most bytes that kernels may add to a rank's weights, whichever MXFP4 kernel runs.

    On Hopper and later GPUs, vLLM falls back to Marlin if Triton's kernels are not installed. For example,
    gpt-oss-120b then takes 65.97 GiB on an H100, not 64.38 GiB (vllm-project/vllm issue 23278).
    """
    planned = kernel_padding(architecture, quantization, flags)
    if flags.device == "cpu" or quantization.scheme != "mxfp4" or mxfp4_kernel(flags) in ("marlin", "rocm"):
        return planned
    copies = latent_copies(architecture, quantization, flags)
    return max(planned, copies + mxfp4_padding(architecture, "marlin", 1, version_of(flags)))


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


def mxfp4_padding(architecture: Architecture, kernel: Kernel, ranks: int, version: Version = NEWEST) -> int:
    """Return the bytes of padding that one rank holds for MXFP4 experts."""
    total = 0.0
    tile = 256 if kernel == "rocm" or (kernel == "trtllm" and version < _SMALLER_TILE) else 128
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
        padded = ceil_div(inner, tile) * tile
        total += elements * (wide / hidden * padded / inner - 1) * (_VALUE_BITS + _SCALE_BITS) / 8
    return int(total)
