"""Work of one training step in FLOPs and transfers, to rank memory-saving tricks by the time they cost.

The estimated times serve only to compare a setup with and without a trick. They do not predict the seconds of a
real step.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.training.build import Planner
from tonnage.planner.training.methods import Trained
from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.units import ceil_div

REFERENCE_FLOPS = 312 * 10**12 * 2 // 5  # an A100's 312 TFLOP/s in bf16 x 40 %, usual in training
PCIE = 32 * 10**9  # PCIe 4.0 x16, bytes per second and direction.
# NVMe bytes per second of one fast drive. ZeRO-Infinity (arXiv 2104.07857) measured about 25 GB/s of reads per
# DGX-2 node of 16 GPUs.
NVME = 6 * 10**9
QLORA_SLOWDOWN = 1.3  # QLoRA is about 30 % slower than LoRA: each use dequantizes a matrix


@dataclass(frozen=True, slots=True)
class Work:
    """The FLOPs and transfers of one optimizer step of training.

    Attributes:
        flops: floating-point operations of one rank.
        pcie: bytes over one GPU's PCIe link.
        nvme: bytes that one node reads from and writes to NVMe.
        network: seconds of communication, None if no network speed was given.
        extra: factor on the compute time, 1.3 for QLoRA and 1 otherwise.
    """

    flops: int
    pcie: int
    nvme: int
    network: float | None
    extra: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the optimizer step at a reference speed, without overlap of its transfers.

        The reference is an A100 that reaches 40 % of its 312 TFLOP/s in bf16.
        """
        compute = self.flops * self.extra / REFERENCE_FLOPS
        return compute + self.pcie / PCIE + self.nvme / NVME + (self.network or 0.0)


def forward_flops(planner: Planner, trained: Trained, tokens: int, length: int) -> tuple[int, int, int]:
    """Return the FLOPs of one forward pass as (matrices of the layers, head, attention scores).

    A weight takes 2 FLOPs per token. Causal attention scores and their product with V take 2 x heads x head
    size x length FLOPs per token and layer.
    """
    architecture = planner.model.architecture
    layers = sum(h.elements * h.count for h in trained.held if h.layers[0] is not None and len(h.shape) > 1)
    head = architecture.vocab_size * architecture.hidden_size
    scores = 2 * architecture.heads * architecture.head_size * length * architecture.layers
    return 2 * layers * tokens, 2 * head * tokens, scores * tokens


def work_of(planner: Planner, plan: TrainingPlan) -> Work:
    """Return the FLOPs and transfers of one optimizer step of a training plan."""
    setup, trained = plan.setup, planner.trained(plan.setup)
    tokens = setup.micro_batch * plan.length
    layers, head, scores = forward_flops(planner, trained, tokens, plan.length)
    forward = layers + head + scores
    backward = 2 * forward if setup.method == "full" else forward + scores
    if setup.method == "freeze":
        backward = 2 * forward * setup.trainable_layers // planner.model.architecture.layers
    recompute = 0
    if setup.checkpointing == "full":
        recompute = layers + scores
    elif setup.checkpointing == "selective":
        recompute = scores
    ranks = setup.model_ranks * setup.context_parallel
    flops = setup.gradient_accumulation * (forward + backward + recompute) // ranks
    return Work(flops, _pcie(setup, plan), _nvme(setup, plan), plan.communication.seconds,
                QLORA_SLOWDOWN if setup.method == "qlora" else 1.0)  # fmt: skip


def _pcie(setup: TrainingSetup, plan: TrainingPlan) -> int:
    """Return the bytes that offload moves over one GPU's PCIe link in an optimizer step.

    Gradients go to the CPU and updated weights come back once per step. In every micro-batch, offloaded weights
    are read twice, and offloaded activations are written and read.
    """
    steps = setup.gradient_accumulation
    size = 0
    if setup.offload_optimizer != "none":
        size += 2 * ceil_div(2 * plan.trainable, setup.shard_ranks)
    if setup.offload_param != "none":
        size += 2 * steps * ceil_div(2 * plan.parameters, setup.shard_ranks)
    return size + 2 * steps * plan.line("offloaded activations", "cpu") // setup.gpus


def _nvme(setup: TrainingSetup, plan: TrainingPlan) -> int:
    """Return the bytes that offload reads from and writes to one node's NVMe in an optimizer step."""
    size = 2 * plan.line("optimizer states", "nvme")  # Each step reads and writes the offloaded states once.
    return size + 2 * setup.gradient_accumulation * plan.line("weights", "nvme")
