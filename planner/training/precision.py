"""Bytes per parameter of weights, master weights and gradients, under each named precision convention.

A convention is a training framework's way to store weights, their fp32 copy and gradients. With AdamW, a
parameter takes 16 bytes (conventions zero, master-with-weights, fp32), 18 (huggingface), 16 to 18 (autocast) or
8 (bf16, fp16). fp8 is only a precision of matrix products. With it, weights, gradients and states follow one of
the mixed conventions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.planner.training.setup import DTYPE_BYTES, TrainingSetup


@dataclass(frozen=True, slots=True)
class Convention:
    """A training framework's way to store each trainable parameter, in bytes per parameter.

    Attributes:
        weights: bytes of the weight that the forward pass reads.
        master: bytes of the optimizer's fp32 copy of the weight, 0 without a copy.
        gradients: bytes of a gradient.
        state: bytes of one optimizer state.
        compute: bytes of an element in matrix products.
        autocast: whether torch.autocast casts the weights for matrix products.
        master_with_weights: whether a plan counts the fp32 copy with the weights instead of the optimizer
            states.
        used_by: text that names the frameworks that use the convention.
    """

    name: str
    weights: int
    master: int
    gradients: int
    state: int
    compute: int
    autocast: bool
    master_with_weights: bool
    used_by: str

    @property
    def bytes_per_parameter(self) -> int:
        """Return the bytes per parameter with AdamW: weight, fp32 copy, gradient and two optimizer states."""
        return self.weights + self.master + self.gradients + 2 * self.state


_CONVENTIONS = {
    "zero": Convention(
        "zero", 2, 4, 2, 4, 2, False, False,
        "ZeRO paper 3.1 (2 + 2 + 12): DeepSpeed fp16 and bf16, Megatron-LM with 16-bit gradients",
    ),
    "master-with-weights": Convention(
        "master-with-weights", 2, 4, 2, 4, 2, False, True,
        "the same 16 bytes, master weights printed with the weights (6 + 2 + 8)",
    ),
    "huggingface": Convention(
        "huggingface", 2, 4, 4, 4, 2, False, True,
        "Hugging Face's guide (6 + 4 + 8) and Megatron-LM with fp32 gradients",
    ),
    "autocast": Convention(
        "autocast", 4, 0, 4, 4, 2, True, False,
        "torch.autocast: HF Trainer and Accelerate with bf16=True (4 + 4 + 8, and casts while they live)",
    ),
    "fp32": Convention("fp32", 4, 0, 4, 4, 4, False, False, "everything in fp32"),
    "bf16": Convention("bf16", 2, 0, 2, 2, 2, False, False, "model.to(bfloat16), no master weights"),
    "fp16": Convention("fp16", 2, 0, 2, 2, 2, False, False, "model.half(), no master weights"),
}  # fmt: skip
"""Name -> convention, for mixed precision (--convention) and for the pure precisions (--precision)."""


def convention_of(setup: TrainingSetup) -> Convention:
    """Return how a setup stores weights, their fp32 copies and gradients, in bytes per parameter.

    With mixed precision, --convention selects it. The default is DeepSpeed's way with ZeRO, else that of
    torch.autocast.
    """
    default = "zero" if setup.strategy.startswith("zero") else "autocast"
    chosen = _CONVENTIONS[setup.convention or default if setup.mixed else setup.precision]
    if setup.is_fsdp and chosen.autocast:
        # FSDP1's MixedPrecision and FSDP2's MixedPrecisionPolicy cast a unit's weights when they are gathered.
        # The shards are therefore fp32, and the residual stream has 16 bits.
        used_by = "FSDP MixedPrecision: fp32 shards, 16-bit gathered units"
        chosen = replace(chosen, autocast=False, used_by=used_by)
    if setup.precision == "fp8":
        backend = "Transformer Engine" if setup.fp8_kept else "torchao float8"
        chosen = replace(chosen, used_by=f"{chosen.used_by}; matrix products in fp8 by {backend}")
    if setup.gradient_dtype is not None:
        chosen = replace(chosen, gradients=DTYPE_BYTES[setup.gradient_dtype])
    return chosen


def frozen_bytes(setup: TrainingSetup) -> int:
    """Return the bytes per frozen weight: those of --base-dtype, else 4 in fp32 training and 2 otherwise."""
    default = "fp32" if setup.precision == "fp32" else "bf16"
    return DTYPE_BYTES[setup.base_dtype or default]
