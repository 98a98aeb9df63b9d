"""TrainingSetup: how a model is to be trained. Checked against itself here, against a model in ``plan``."""

from __future__ import annotations

from tonnage.planner.errors import DeploymentError
from tonnage.planner.records import dataclass

METHODS = ("full", "lora", "qlora", "ia3", "freeze")
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "fp8")
OPTIMIZERS = (
    "adamw", "adamw-8bit", "paged-adamw-8bit", "sgd", "sgd-momentum", "adafactor", "lion", "muon",
)  # fmt: skip
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp-no-shard")
CONVENTIONS = ("zero", "master-with-weights", "huggingface", "autocast")
CHECKPOINTING = ("none", "selective", "full")
ATTENTION = ("flash", "sdpa", "eager")
LOSSES = ("full", "fused")
KERNELS = ("foreach", "fused")
PLACES = ("none", "cpu", "nvme")
BASES = ("nf4-double", "nf4", "int8")
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """All flags of ``tonnage train``. Sizes are bytes, bandwidths bytes per second and direction; None: the
    planner chooses (and says what)."""

    method: str = "full"
    precision: str = "bf16-mixed"
    convention: str | None = None
    optimizer: str = "adamw"
    optimizer_kernel: str | None = None  # foreach | fused: temporary copies during the step (step.py)
    gradient_dtype: str | None = None
    base_dtype: str | None = None  # of frozen weights (lora, ia3, freeze)
    rank: int = 16
    target_modules: tuple[str, ...] | None = None  # None: PEFT's own defaults of the family
    trainable_layers: int = 2  # freeze: LLaMA-Factory's default
    base_quantization: str = "nf4-double"
    loss_scaling: bool = True  # fp16 and fp16-mixed only

    micro_batch: int = 1
    sequence_length: int | None = None
    gradient_accumulation: int = 1
    packing: bool = False
    materialized_mask: bool = False  # transformers 4.56 to 4.57 pass SDPA an explicit mask in training
    checkpointing: str = "none"
    checkpoint_segments: int | None = None  # None: one segment a layer
    offload_activations: bool = False
    attention: str = "flash"
    loss: str = "full"
    partition_activations: bool = False

    strategy: str = "ddp"
    gpus: int = 1  # per node
    nodes: int = 1
    shard_size: int | None = None  # fsdp-hybrid: ranks of one shard group
    fsdp_version: int = 2
    gradient_as_bucket_view: bool = False  # DDP: gradients are views of the buckets, not copies
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_micro_batches: int | None = None
    offload_optimizer: str = "none"
    offload_param: str = "none"
    zero_init: bool = True
    quantized_weights: bool = False  # ZeRO++ qwZ
    hpz_partition_size: int = 1  # ZeRO++ hpZ
    quantized_gradients: bool = False  # ZeRO++ qgZ
    bucket_elements: int = 500_000_000  # DeepSpeed reduce_bucket_size

    device_memory: int | None = None
    cpu_memory: int | None = None  # of one node
    nvme: int | None = None  # of one node
    intra_node: int | None = None
    inter_node: int | None = None
    network_share: float = 0.8

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    @property
    def model_ranks(self) -> int:
        """Ranks one copy of the model is spread over before any data parallelism."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def data_parallel(self) -> int:
        return self.world // (self.model_ranks * self.context_parallel)

    @property
    def shard_ranks(self) -> int:
        """Ranks that hold equal weights and may share them out (data x context parallel)."""
        return self.world // self.model_ranks

    @property
    def effective_batch(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.micro_batch * self.gradient_accumulation * self.data_parallel

    @property
    def zero_stage(self) -> int:
        """What is shared out: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
        return {
            "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "fsdp-hybrid": 3, "fsdp-grad-op": 2,
        }.get(self.strategy, 0)  # fmt: skip

    @property
    def is_fsdp(self) -> bool:
        return self.strategy.startswith("fsdp")

    @property
    def pure_16_bit(self) -> bool:
        """Weights, gradients and states in 16 bits, no fp32 copy."""
        return self.precision in ("bf16", "fp16")

    @property
    def fp8_kept(self) -> bool:
        """Transformer Engine keeps inputs and matrices in fp8 from forward to backward. torchao's float8, made
        for FSDP, keeps them in 16 bits and casts inside each product (torchao/float8/float8_linear.py)."""
        return self.precision == "fp8" and not self.is_fsdp

    @property
    def mixed(self) -> bool:
        return self.precision in ("bf16-mixed", "fp16-mixed", "fp8")


_CHOICES = {
    "method": METHODS, "precision": PRECISIONS, "optimizer": OPTIMIZERS, "strategy": STRATEGIES,
    "checkpointing": CHECKPOINTING, "attention": ATTENTION, "loss": LOSSES, "offload_optimizer": PLACES,
    "offload_param": PLACES, "base_quantization": BASES,
}  # fmt: skip
_OPTIONAL_CHOICES = {
    "gradient_dtype": tuple(DTYPE_BYTES), "base_dtype": tuple(DTYPE_BYTES), "optimizer_kernel": KERNELS,
}  # fmt: skip
_LIMIT = 1 << 24  # far above any cluster, batch or rank; beyond it the number is a typing error
# field -> the largest value; None stays what it is: left to the planner
_NUMBERS = dict.fromkeys(
    (
        "rank", "trainable_layers", "micro_batch", "gradient_accumulation", "gpus", "nodes", "tensor_parallel",
        "pipeline_parallel", "context_parallel", "expert_parallel", "hpz_partition_size", "checkpoint_segments",
        "shard_size", "pipeline_micro_batches",
    ),
    _LIMIT,
) | {"bucket_elements": 1 << 38, "sequence_length": 1 << 31} | dict.fromkeys(
    ("device_memory", "cpu_memory", "nvme", "intra_node", "inter_node"), 1 << 60
)  # fmt: skip
FSDP_VERSIONS = (1, 2)  # torch.distributed.fsdp: FullyShardedDataParallel, fully_shard


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def check_setup(setup: TrainingSetup) -> None:
    """What contradicts itself whatever the model. Raises DeploymentError naming the flag."""
    for field, choices in _CHOICES.items():
        value = getattr(setup, field)
        if value not in choices:
            raise DeploymentError(f"{value!r} is not one of {', '.join(choices)}", field=flag(field))
    for field, limit in _NUMBERS.items():
        value = getattr(setup, field)
        if value is not None and not 1 <= value <= limit:
            raise DeploymentError(f"{value} is not a number from 1 to {limit:,}", field=flag(field))
    if setup.fsdp_version not in FSDP_VERSIONS:
        raise DeploymentError(f"{setup.fsdp_version} is not 1 or 2", field="--fsdp-version")
    if setup.target_modules is not None and not setup.target_modules:
        raise DeploymentError(
            "names no module", field="--target-modules", hint="leave it out for PEFT's default, or all-linear"
        )
    for field, known in _OPTIONAL_CHOICES.items():
        value = getattr(setup, field)
        if value is not None and value not in known:
            raise DeploymentError(f"{value!r} is not one of {', '.join(known)}", field=flag(field))
    if not 0 < setup.network_share <= 1:
        raise DeploymentError(
            f"{setup.network_share:g} is not in (0, 1]", field="--network-share", hint="0.8 to 0.85 is usual"
        )
    _check_precision(setup)
    _check_ranks(setup)
    _check_offload(setup)


def _check_precision(setup: TrainingSetup) -> None:
    if setup.convention is not None:
        if setup.convention not in CONVENTIONS:
            raise DeploymentError(
                f"{setup.convention!r} is not one of {', '.join(CONVENTIONS)}", field="--convention"
            )
        if not setup.mixed:
            raise DeploymentError(
                f"{setup.precision} keeps no master weights, so there is no convention to choose",
                field="--convention",
                hint="leave it out, or choose --precision bf16-mixed",
            )
    if setup.precision in ("fp16", "fp16-mixed") and not setup.loss_scaling:
        raise DeploymentError(
            "fp16 gradients below 6e-8 become zero without loss scaling",
            field="--no-loss-scaling",
            hint=f"leave loss scaling on, or use --precision {setup.precision.replace('fp16', 'bf16')}",
        )
    if setup.method == "qlora" and setup.precision == "fp8":
        raise DeploymentError(
            "fp8 matrices need unquantized weights", field="--precision", hint="use bf16-mixed"
        )


def _check_ranks(setup: TrainingSetup) -> None:
    per_copy = setup.model_ranks * setup.context_parallel
    if setup.world % per_copy:
        raise DeploymentError(
            f"tensor x pipeline x context parallel = {per_copy} does not divide {setup.world} GPUs",
            field="--tensor-parallel",
        )
    if setup.shard_ranks % setup.expert_parallel:
        raise DeploymentError(
            f"{setup.expert_parallel} does not divide the {setup.shard_ranks} data-parallel ranks",
            field="--expert-parallel",
        )
    if setup.tensor_parallel > setup.gpus:
        raise DeploymentError(
            f"{setup.tensor_parallel} ranks do not fit on a node of {setup.gpus} GPUs: tensor parallelism "
            "exchanges activations in every layer and stays inside a node",
            field="--tensor-parallel",
            hint="use --pipeline-parallel between nodes",
        )
    if setup.sequence_parallel and setup.tensor_parallel == 1:
        raise DeploymentError(
            "shares out what tensor parallelism replicates, and --tensor-parallel is 1",
            field="--sequence-parallel",
            hint="use --context-parallel to split long sequences",
        )
    if setup.partition_activations and setup.tensor_parallel == 1:
        raise DeploymentError(
            "ZeRO-R partitions checkpoints over tensor-parallel ranks, and --tensor-parallel is 1",
            field="--partition-activations",
        )
    if setup.strategy == "fsdp-hybrid":
        size = hybrid_group(setup)
        if setup.shard_ranks % size:
            raise DeploymentError(
                f"groups of {size} do not divide the {setup.shard_ranks} data-parallel ranks",
                field="--shard-size",
                hint="a divisor, usually the GPUs of one node",
            )
    elif setup.shard_size is not None:
        raise DeploymentError("only for --strategy fsdp-hybrid", field="--shard-size")
    if setup.pipeline_parallel > 1 and setup.strategy in ("zero2", "zero3"):
        raise DeploymentError(
            f"{setup.strategy} reduces gradients after every micro-batch, which a pipeline does not allow",
            field="--pipeline-parallel",
            hint="use --strategy zero1",
        )


def _check_offload(setup: TrainingSetup) -> None:
    for field in ("offload_param", "offload_optimizer"):
        if getattr(setup, field) == "nvme" and setup.strategy != "zero3":
            raise DeploymentError(
                f"nvme needs ZeRO stage 3 (ZeRO-Infinity), the strategy is {setup.strategy}",
                field=flag(field),
                hint="--strategy zero3, or cpu",
            )
    if setup.offload_param != "none" and setup.zero_stage != 3:
        raise DeploymentError(
            f"weights are offloaded by stage 3 or fsdp only, the strategy is {setup.strategy}",
            field="--offload-param",
            hint="--strategy zero3, or --offload-optimizer",
        )
    if setup.offload_optimizer != "none" and setup.zero_stage == 0:
        raise DeploymentError(
            f"needs ZeRO or fsdp, the strategy is {setup.strategy}",
            field="--offload-optimizer",
            hint="--strategy zero2 works on one GPU too; --optimizer paged-adamw-8bit pages without ZeRO",
        )
    if setup.is_fsdp and (setup.offload_param == "none") != (setup.offload_optimizer == "none"):
        raise DeploymentError(
            "FSDP offloads weights, gradients and optimizer states together",
            field="--offload-param",
            hint="give both --offload-param cpu and --offload-optimizer cpu",
        )
    if setup.method == "qlora" and setup.zero_stage == 3 and not setup.is_fsdp:
        raise DeploymentError(
            "ZeRO stage 3 shares out weights by value and cannot split bitsandbytes' packed ones",
            field="--strategy",
            hint="QLoRA works with zero1 and zero2, where the quantized base is replicated; or lora with zero3",
        )
    if setup.method == "qlora" and setup.zero_stage == 3 and setup.base_quantization == "int8":
        raise DeploymentError(
            "FSDP cannot split LLM.int8 weights", field="--base-quantization", hint="nf4, or --strategy zero2"
        )
    zeropp = setup.quantized_weights or setup.quantized_gradients or setup.hpz_partition_size > 1
    if zeropp and setup.strategy != "zero3":
        raise DeploymentError(
            f"ZeRO++ extends stage 3, the strategy is {setup.strategy}", field="--zero-plus-plus", hint="zero3"
        )
    if setup.shard_ranks % setup.hpz_partition_size:
        raise DeploymentError(
            f"groups of {setup.hpz_partition_size} do not divide the {setup.shard_ranks} ranks",
            field="--hpz-partition-size",
            hint="the GPUs of one node",
        )


def hybrid_group(setup: TrainingSetup) -> int:
    """Ranks of one hybrid shard group: as asked, or the data-parallel ranks of one node."""
    return setup.shard_size or max(1, min(setup.gpus // setup.tensor_parallel, setup.shard_ranks))
