"""Optimizer states of one tensor in bytes, as the optimizers allocate them.

Tests compare the bytes with the states of torch 2.13 and bitsandbytes 0.50, with difference 0
(tests/planner/test_training_real.py).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from tonnage.planner.units import ceil_div

# Constants of bitsandbytes 0.50, optim/optimizer.py: the smallest tensor with 8-bit states (min_8bit_size), the
# block size of these states, and two maps of 256 fp32 values that all tensors of a device share.
BNB_MIN_ELEMENTS = 4096
BNB_BLOCK = 256
BNB_MAPS_BYTES = 2 * 256 * 4
STEP_BYTES = 4  # bytes of torch.optim's fp32 step counter per tensor, in host memory unless fused or capturable


class Optimizer(NamedTuple):
    """The states that an optimizer keeps for each parameter and tensor.

    Attributes:
        states: number of states per parameter that have the parameter's size.
        counter: whether the optimizer keeps a step counter per tensor.
        formula: description of the states, for a plan line.
    """

    states: int
    counter: bool
    formula: str


OPTIMIZER = {
    "adamw": Optimizer(2, True, "2 states"),
    "adamw-8bit": Optimizer(2, False, "2 x (1 + 4/256) bytes, fp32 below 4,096 values"),
    "paged-adamw-8bit": Optimizer(2, False, "as adamw-8bit, in pageable memory"),
    "sgd": Optimizer(0, False, "no state"),
    "sgd-momentum": Optimizer(1, False, "1 state"),
    "adafactor": Optimizer(1, True, "row + column statistics of a matrix"),
    "lion": Optimizer(1, False, "1 state"),
    "muon": Optimizer(1, False, "1 state for hidden matrices, AdamW's 2 for the rest"),
    "galore-adamw": Optimizer(2, False, "2 states and a projection of rank r a matrix, else 2"),
    "galore-adamw-8bit": Optimizer(
        2, False, "projections of rank r, projected 8-bit states, 8-bit ones of the rest"
    ),
}


def is_projected(name: str, shape: tuple[int, ...], role: str) -> bool:
    """Return whether the optimizer is GaLore and projects the tensor's gradient to a low rank.

    GaLore projects the gradients of attention and MLP matrices, not those of embedding, head and norms.

    Sources: llamafactory 0.9.5 train/trainer_utils.py, GaLore's torchrun_main.py.
    """
    return name.startswith("galore") and len(shape) == 2 and role in ("attention", "mlp")


@lru_cache(maxsize=4096)
def state_bytes(name: str, shape: tuple[int, ...], role: str, state: int, rank: int = 0) -> int:
    """Return the bytes of the optimizer states of one tensor.

    * 8-bit AdamW keeps states of one byte per value with a scale per block, regardless of `state`.
    * Adafactor (torch.optim) keeps states of the shapes `shape[:-1] + (1,)` and `shape[:-2] + (1, last)`.
    * Muon (torch.optim) trains matrices only. AdamW trains the embedding and the head, as Muon's authors
      advise.
    * GaLore (galore-torch 1.0) keeps a projection [rank, short side] and states [rank, long side].

    Args:
        name: the optimizer.
        shape: the tensor's shape.
        role: the tensor's role in the model.
        state: bytes of one state value.
        rank: rank of GaLore's projection.
    """
    n = prod(shape)
    if is_projected(name, shape, role):
        rank = min(rank, *shape)
        base = name.removeprefix("galore-")
        return rank * min(shape) * state + state_bytes(base, (rank, max(shape)), role, state)
    name = name.removeprefix("galore-")
    if name in ("adamw-8bit", "paged-adamw-8bit"):
        if n < BNB_MIN_ELEMENTS:
            return 8 * n
        return 2 * (n + 4 * ceil_div(n, BNB_BLOCK))
    if name == "adafactor":
        return state * (n // shape[-1] + n // shape[-2] if len(shape) > 1 else n)
    if name == "muon" and (len(shape) != 2 or role in ("embedding", "head")):
        return 2 * state * n
    return OPTIMIZER[name].states * state * n


def shared_bytes(name: str) -> int:
    """Return the bytes that an optimizer keeps once per device, for all tensors together.

    They are the two quantization maps of an 8-bit optimizer, and 0 for other optimizers.
    """
    return BNB_MAPS_BYTES if "8bit" in name else 0


def step_workspace(name: str, kernel: str, trainable: int, largest: int, state: int, projected: int = 0) -> int:
    """Return the bytes of temporary tensors in one optimizer step on a rank.

    * AdamW's foreach kernel computes the update's denominators for all tensors at once, in copies of the second
      state (torch/optim/adamw.py, 2.13, `_multi_tensor_adamw`: `_foreach_sqrt`). Fused kernels make no copies.
    * Adafactor, Lion and Muon update tensor by tensor, with two temporary tensors. SGD and the optimizers of
      bitsandbytes update in place.
    * GaLore (galore-torch 1.0) has two temporary tensors per tensor. A step that computes a new projection
      takes more: the matrix, and U and V of its singular value decomposition, in fp32.

    Args:
        name: the optimizer.
        kernel: `fused` or `foreach`.
        trainable: trained elements on the rank.
        largest: elements of the largest tensor.
        state: bytes of one state value.
        projected: elements of the largest matrix that GaLore projects.
    """
    if name.startswith("galore"):
        return max(2 * state * min(largest, trainable), 3 * 4 * projected)
    if kernel == "fused" or "8bit" in name or name.startswith("sgd"):
        return 0
    return state * (trainable if name == "adamw" else 2 * min(largest, trainable))
