"""Optimizer states of one tensor in bytes, as the optimizers allocate them.

Measured against torch 2.13 and bitsandbytes 0.50 by tests/planner/test_training_real.py (difference 0).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from tonnage.planner.units import ceil_div

# bitsandbytes 0.50, optim/optimizer.py: min_8bit_size, block size of the block-wise states, and the two
# dynamic maps of 256 fp32 values shared by all tensors of a device.
BNB_MIN_ELEMENTS = 4096
BNB_BLOCK = 256
BNB_MAPS_BYTES = 2 * 256 * 4
STEP_BYTES = 4  # torch.optim: one fp32 counter per tensor, on the host unless fused or capturable


class Optimizer(NamedTuple):
    """``states``: full-size states per parameter; ``counter``: keeps a step counter per tensor."""

    name: str
    states: int
    counter: bool
    formula: str


OPTIMIZER = {
    "adamw": Optimizer("adamw", 2, True, "2 states"),
    "adamw-8bit": Optimizer("adamw-8bit", 2, False, "2 x (1 + 4/256) bytes, fp32 below 4,096 values"),
    "paged-adamw-8bit": Optimizer("paged-adamw-8bit", 2, False, "as adamw-8bit, in pageable memory"),
    "sgd": Optimizer("sgd", 0, False, "no state"),
    "sgd-momentum": Optimizer("sgd-momentum", 1, False, "1 state"),
    "adafactor": Optimizer("adafactor", 1, True, "row + column statistics of a matrix"),
    "lion": Optimizer("lion", 1, False, "1 state"),
    "muon": Optimizer("muon", 1, False, "1 state for hidden matrices, AdamW's 2 for the rest"),
    "galore-adamw": Optimizer("galore-adamw", 2, False, "2 states and a projection of rank r a matrix, else 2"),
    "galore-adamw-8bit": Optimizer(
        "galore-adamw-8bit", 2, False, "projections of rank r, projected 8-bit states, 8-bit ones of the rest"
    ),
}


def is_projected(name: str, shape: tuple[int, ...], role: str) -> bool:
    """GaLore projects the layers' matrices, whichever module they are of: embedding, head and norms are not
    (llamafactory 0.9.5 train/trainer_utils.py; GaLore's torchrun_main.py: attention and MLP)."""
    return name.startswith("galore") and len(shape) == 2 and role in ("attention", "mlp")


@lru_cache(maxsize=4096)
def state_bytes(name: str, shape: tuple[int, ...], role: str, state: int, rank: int = 0) -> int:
    """Bytes of the states of one tensor of ``shape``; ``state`` is the size of one state value. ``rank``: of
    GaLore's projection, [rank, short side], and of its states, [rank, long side] (galore-torch 1.0).

    8-bit AdamW keeps its block-wise states whatever ``state`` says; Adafactor (torch.optim) keeps
    ``shape[:-1] + (1,)`` and ``shape[:-2] + (1, last)``; Muon (torch.optim) takes matrices only, and by its
    authors' advice not the embedding and the head, which AdamW trains.
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
    """Bytes kept once per device."""
    return BNB_MAPS_BYTES if "8bit" in name else 0


def step_workspace(name: str, kernel: str, trainable: int, largest: int, state: int, projected: int = 0) -> int:
    """Temporary bytes of one step over ``trainable`` elements on the rank, ``largest`` in one tensor.

    AdamW's denominator is a list of copies of the second state (torch/optim/adamw.py, 2.13,
    ``_multi_tensor_adamw``: ``_foreach_sqrt``); fused kernels keep none. Adafactor, Lion and Muon go tensor
    by tensor with two temporaries; SGD and bitsandbytes update in place. GaLore (galore-torch 1.0) takes two
    for each tensor, or, where its largest ``projected`` matrix gets a new projection, that matrix, U and V of
    its singular value decomposition in fp32.
    """
    if name.startswith("galore"):
        return max(2 * state * min(largest, trainable), 3 * 4 * projected)
    if kernel == "fused" or "8bit" in name or name.startswith("sgd"):
        return 0
    return state * (trainable if name == "adamw" else 2 * min(largest, trainable))
