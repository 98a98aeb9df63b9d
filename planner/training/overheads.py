"""Training memory that is neither state nor activation: buckets, library workspaces, the CUDA context.

Each overhead is a plan line with its own bounds and source.
"""

from __future__ import annotations

from tonnage.planner.training.plans import Line
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.states import States
from tonnage.planner.units import GiB

# Default cuBLAS workspaces in torch 2.13 (ATen/cuda/CUDABlas.cpp, CublasHandlePool.cpp) are ":4096:2:16:8"
# before Hopper and ":4096:8" on Hopper. The forward thread and autograd's thread have one workspace each.
CUBLAS_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
CUBLAS_WORKSPACE_HOPPER = 8 * 4096 * 1024

# CONTEXT is the memory of the CUDA context, NCCL that of NCCL's buffers. Start-up logs of vLLM on H100 and B200
# print 0.07 to 0.14 GiB of memory outside PyTorch on one GPU, and 0.55 GiB with two GPUs, which need NCCL
# (tests/data/training/measured_receipts.tsv). vramcalc measured 0.75 GB on an A6000 under CUDA 13.
CONTEXT, CONTEXT_LOW, CONTEXT_HIGH = GiB // 2, int(0.07 * GiB), 750 * 10**6
NCCL, NCCL_LOW, NCCL_HIGH = int(0.41 * GiB), int(0.2 * GiB), GiB

# Transformer Engine's DelayedScaling keeps amax_history_len = 1,024 maxima. A linear module has five
# quantizers: input, weight and output in the forward pass, two gradients in the backward pass
# (pytorch/module/base.py, set_meta_tensor).
FP8_HISTORY, FP8_QUANTIZERS = 1024, 5


def overheads_of(setup: TrainingSetup, states: States, modules: int, in_layer: bool = True) -> list[Line]:
    """Return the plan lines of memory that is neither model state nor activation, such as the CUDA context.

    Args:
        setup: the flags of the training.
        states: the rank's model states.
        modules: number of the rank's linear modules that multiply in fp8.
        in_layer: whether the memory peak falls into a layer's backward pass.
    """
    out = [
        Line(
            "cuBLAS workspaces", "gpu", 2 * CUBLAS_WORKSPACE, CUBLAS_WORKSPACE, 2 * CUBLAS_WORKSPACE_HOPPER,
            "2 x 8,519,680 (forward and backward thread)", "ATen/cuda/CublasHandlePool.cpp",
        ),
        Line(
            "CUDA context", "gpu", CONTEXT, CONTEXT_LOW, CONTEXT_HIGH,
            "measured elsewhere, outside the allocator",
            "vLLM start-up logs (0.07 to 0.14 GiB), vramcalc (0.75 GB on an A6000)",
        ),
    ]  # fmt: skip
    if setup.fp8_kept:
        size = modules * FP8_QUANTIZERS * (FP8_HISTORY + 1) * 4
        out.append(
            Line("fp8 scales", "gpu", size, 0, size,
                     f"{modules} modules x {FP8_QUANTIZERS} quantizers x (1,024 maxima + 1 scale) in fp32",
                     "Transformer Engine DelayedScaling; block scaling keeps no history")
        )  # fmt: skip
    if setup.world == 1:
        return out
    out.append(
        Line("NCCL buffers", "gpu", NCCL, NCCL_LOW, NCCL_HIGH, "channels of one communicator",
                 "vLLM start-up logs: 0.55 GiB non-torch with 2 GPUs, 0.14 with 1")
    )  # fmt: skip
    each = 2 if (setup.mixed and setup.strategy.startswith("zero")) or setup.pure_16_bit else 4
    if setup.strategy in ("zero1", "zero2", "zero3"):
        bucket = setup.bucket_elements * each
        out.append(
            Line("reduce bucket", "gpu", bucket, bucket, 2 * bucket,
                     f"{setup.bucket_elements:,} elements x {each} bytes (twice with overlap_comm)",
                     "DeepSpeed reduce_bucket_size, contiguous_gradients")
        )  # fmt: skip
    elif setup.strategy in ("ddp", "fsdp-no-shard") and setup.shard_ranks > 1:
        size = 0 if setup.gradient_as_bucket_view else states.full_gradients
        out.append(
            Line("DDP buckets", "gpu", size, 0, size, "a copy of all gradients unless gradient_as_bucket_view",
                     "torch/csrc/distributed/c10d/reducer.cpp")
        )  # fmt: skip
    elif setup.is_fsdp:
        unit = states.layer_trained * each
        out.append(
            Line("unsharded gradients", "gpu", 2 * unit * in_layer, unit * in_layer,
                     2 * unit + states.outer_trained * each,
                     "gradients of one unit before, and of one in, the reduce-scatter",
                     "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py")
        )  # fmt: skip
    return out
