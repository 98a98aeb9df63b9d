"""Memory of one optimizer step besides the model states, on one rank.

torch.optim updates the parameters themselves. Frameworks with fp32 master weights update the master weights.
They first make an fp32 copy of the 16-bit gradients, and their AdamW is one fused kernel without temporary
tensors:

- DeepSpeed (runtime/engine.py `_configure_basic_optimizer`: FusedAdam). Stages 1 and 2 flatten the rank's
  gradients and cast the flat copy to fp32 (runtime/zero/stage_1_and_2.py `step`). Stage 3 does so for one
  sub-group after the other (stage3.py `_prepare_fp32_grad_for_sub_group`). DeepSpeed's estimators count the
  copy as well: 18 bytes of each partitioned parameter are 2 of gradients, 4 of this copy and 12 of states.
- Megatron-LM (core/optimizer/distrib_optimizer.py `_copy_model_grads_to_main_grads`: `grad.float()` of the
  rank's shard; FusedAdam).
"""

from __future__ import annotations

from typing import NamedTuple

from tonnage.planner.training.optimizers import step_workspace
from tonnage.planner.training.precision import Convention, convention_of
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import adapter_bytes
from tonnage.planner.training.states import States
from tonnage.planner.units import ceil_div

SUB_GROUP_ELEMENTS = 10**9  # DeepSpeed 0.19, runtime/zero/config.py sub_group_size
_FP32 = 4


class StepMemory(NamedTuple):
    """The peak bytes of temporary tensors in an optimizer step; `copies` is a text on gradient copies."""

    bytes: int
    copies: str = ""


def kernel_of(setup: TrainingSetup) -> str:
    """Return the requested optimizer kernel (`fused` or `foreach`), or the training framework's default.

    The default is `fused` under DeepSpeed, with an fp32 copy of the weights, and for AdamW with --stack (a
    training library such as torchtune). Otherwise it is torch's default, `foreach`.
    """
    if setup.optimizer_kernel is not None:
        return setup.optimizer_kernel
    if setup.stack is not None and setup.optimizer == "adamw":
        return "fused"
    return "fused" if _deepspeed(setup) or convention_of(setup).master else "foreach"


def step_of(setup: TrainingSetup, convention: Convention, states: States) -> StepMemory:
    """Return the temporary GPU memory of an optimizer step on one rank; 0 if the optimizer is offloaded."""
    if setup.offload_optimizer != "none":  # the optimizer step runs on the host, so it takes no GPU memory
        return StepMemory(0)
    part = ceil_div(states.trainable, setup.shard_ranks if setup.zero_stage else 1)
    if setup.optimizer_in_backward:
        part = states.largest
    if setup.strategy == "zero3":
        part = min(part, SUB_GROUP_ELEMENTS)
    # Weight, gradient and optimizer states of an adapter have the same dtype.
    adapters = setup.method in ("lora", "qlora", "ia3")
    size, width = (adapter_bytes(setup),) * 2 if adapters else (convention.state, convention.gradients)
    kernel = step_workspace(setup.optimizer, kernel_of(setup), part, states.largest, size, states.projected)
    cast = _FP32 * part if convention.master and width < _FP32 else 0
    if _deepspeed(setup):
        flat = width * part
        words = f"flat gradients, {width}{' + 4 (fp32)' if cast else ''} bytes x {part:,}"
        return StepMemory(max(flat + cast, (cast or flat) + kernel), words)
    return StepMemory(cast + kernel, f"fp32 copy of the gradients, 4 bytes x {part:,}" if cast else "")


def _deepspeed(setup: TrainingSetup) -> bool:
    """Return whether DeepSpeed runs the optimizer step (strategies zero1 to zero3)."""
    return setup.strategy.startswith("zero")
