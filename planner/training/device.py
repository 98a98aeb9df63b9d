"""Checks of the attention kernel and the precision against the GPU's compute capability."""

from __future__ import annotations

from tonnage.planner.errors import DeploymentError
from tonnage.planner.training.setup import TrainingSetup

# Lowest compute capability for each feature. flash-attn 2.8, csrc/flash_attn/flash_api.cpp: "FlashAttention
# only supports Ampere GPUs or newer", "only support fp16 and bf16 data type". Transformer Engine 2,
# pytorch/fp8.py check_fp8_support: 8.9 or higher.
FLASH, FP8, BF16 = (8, 0), (8, 9), (8, 0)


def capability_of(setup: TrainingSetup) -> tuple[int, int] | None:
    """Return the GPU's compute capability as (major, minor), None if it is unknown."""
    if setup.compute_capability is None:
        return None
    major, _, minor = setup.compute_capability.partition(".")
    return int(major), int(minor or 0)


def attention_of(setup: TrainingSetup) -> str:
    """Return the requested attention implementation, else `flash` if the GPU supports it, else `sdpa`."""
    if setup.attention is not None:
        return setup.attention
    capability = capability_of(setup)
    return "sdpa" if setup.precision == "fp32" or (capability or FLASH) < FLASH else "flash"


def check_device(setup: TrainingSetup) -> None:
    """Check that the setup's GPU has kernels for the attention implementation and the precision.

    Raises:
        DeploymentError: the GPU has no kernel for one of them; the error names the flag.
    """
    capability = capability_of(setup)
    if setup.attention == "flash" and setup.precision == "fp32":
        raise DeploymentError(
            "FlashAttention computes in fp16 and bf16 only, and --precision is fp32", field="--attention",
            hint="--attention sdpa, whose memory-efficient kernel takes fp32, or --precision bf16-mixed",
        )  # fmt: skip
    if capability is None:
        return
    has = f"the GPU has {capability[0]}.{capability[1]}"
    if setup.attention == "flash" and capability < FLASH:
        raise DeploymentError(
            f"FlashAttention needs compute capability 8.0 (Ampere), {has}", field="--attention",
            hint="use --attention sdpa, whose memory-efficient kernel needs no more memory",
        )  # fmt: skip
    if setup.precision == "fp8" and capability < FP8:
        raise DeploymentError(
            f"fp8 needs compute capability 8.9 (Ada, Hopper), {has}", field="--precision",
            hint="use bf16-mixed",
        )  # fmt: skip


def device_notes(setup: TrainingSetup) -> list[str]:
    """Return a note if the precision is bf16 and the GPU only emulates it, else an empty list."""
    capability = capability_of(setup)
    if capability is None or capability >= BF16 or not setup.precision.startswith("bf16"):
        return []
    has = setup.compute_capability
    return [f"bf16 is emulated below compute capability 8.0, and the GPU has {has}: fp16 is faster"]
