"""Work of one step in FLOPs and transfers, to rank tricks by what they cost. Not a prediction of seconds:
every figure is relative to the same setup without the trick."""

from __future__ import annotations

from tonnage.planner.records import dataclass
from tonnage.planner.training.build import Planner
from tonnage.planner.training.methods import Trained
from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.units import ceil_div

REFERENCE_FLOPS = 312 * 10**12 * 2 // 5  # A100 data sheet: 312 TFLOP/s bf16; 40 % of it is usual in training
PCIE = 32 * 10**9  # PCIe 4.0 x16, bytes per second and direction
NVME = (
    6 * 10**9
)  # ZeRO-Infinity (arXiv 2104.07857): about 25 GB/s read per DGX-2 node of 16 GPUs; one fast drive
QLORA_SLOWDOWN = 1.3  # QLoRA against LoRA, about 30 % (reference text; each use dequantizes the matrix)


@dataclass(frozen=True, slots=True)
class Work:
    """One optimizer step on one rank: ``flops``, bytes over PCIe and NVMe, seconds of communication (None:
    no network given); ``extra``: a factor on the compute that is quoted, not computed (QLoRA)."""

    flops: int
    pcie: int
    nvme: int
    network: float | None
    extra: float

    @property
    def seconds(self) -> float:
        """At the reference speed, transfers not hidden behind compute."""
        compute = self.flops * self.extra / REFERENCE_FLOPS
        return compute + self.pcie / PCIE + self.nvme / NVME + (self.network or 0.0)


def forward_flops(planner: Planner, trained: Trained, tokens: int, length: int) -> tuple[int, int, int]:
    """(matrices of the layers, head, attention scores) of one forward pass: 2 FLOPs a weight and token, and
    2 x 2 x heads x head size x length / 2 a token for causal scores and their product with V."""
    architecture = planner.model.architecture
    layers = sum(h.elements * h.count for h in trained.held if h.layers[0] is not None and len(h.shape) > 1)
    head = architecture.vocab_size * architecture.hidden_size
    scores = 2 * architecture.heads * architecture.head_size * length * architecture.layers
    return 2 * layers * tokens, 2 * head * tokens, scores * tokens


def work_of(planner: Planner, plan: TrainingPlan) -> Work:
    setup, trained = plan.setup, planner.trained(plan.setup)
    tokens = setup.micro_batch * plan.length
    layers, head, scores = forward_flops(planner, trained, tokens, plan.length)
    forward = layers + head + scores
    backward = 2 * forward if setup.method in ("full",) else forward + scores
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
    """Bytes over one GPU's PCIe: gradients down and weights up once a step; offloaded weights up twice and
    activations both ways for every micro-batch."""
    steps = setup.gradient_accumulation
    size = 0
    if setup.offload_optimizer != "none":
        size += 2 * ceil_div(2 * plan.trainable, setup.shard_ranks)
    if setup.offload_param != "none":
        size += 2 * steps * ceil_div(2 * plan.parameters, setup.shard_ranks)
    return size + 2 * steps * plan.line("offloaded activations", "cpu") // setup.gpus


def _nvme(setup: TrainingSetup, plan: TrainingPlan) -> int:
    size = 2 * plan.line("optimizer states", "nvme")  # read and written once a step
    return size + 2 * setup.gradient_accumulation * plan.line("weights", "nvme")
