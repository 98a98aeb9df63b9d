"""Flags of `tonnage train` (`TrainingSetup`), and the checks of the flags against each other."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import check_values, flag, flags_of
from tonnage.planner.training.links import parse_speed

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ADAPTERS = ("lora", "qlora", "ia3")  # methods that add trained modules to the model
_PLACES = ("none", "cpu", "nvme")
_MOST = 1 << 24  # largest value of flags such as GPUs, batch sizes and LoRA rank

_METHOD, _BATCH, _RANKS = "method", "batch and activations", "GPUs and how the model is spread over them"
_MEMORY = "memory and network"


def _capability(text: str, field: str) -> str:
    """Return `text` if it is a compute capability such as 8.0; raise DeploymentError otherwise."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise DeploymentError(f"{text[:40]!r} is not a compute capability", field=field, hint="for example 8.0")
    return text


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A training setup: one field per flag of `tonnage train`.

    Sizes are in bytes, bandwidths in bytes per second and direction. A value of None lets the planner choose;
    the plan reports the choice. planner/flags.py generates the command's options from the fields.
    """

    stack: str | None = flag(
        None, "training stack with its modules, loss and defaults (default: a plain loop that keeps gradients)",
        group=_METHOD, choices=("transformers", "torchtune", "llama-factory", "unsloth", "axolotl"),
    )  # fmt: skip
    method: str = flag(
        "full", "training method", group=_METHOD, choices=("full", "lora", "qlora", "ia3", "freeze")
    )
    precision: str = flag(
        "bf16-mixed", "precision of weights and matrix products", group=_METHOD,
        choices=("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "fp8"),
    )  # fmt: skip
    convention: str | None = flag(
        None, "where mixed precision keeps fp32 copies (default: as the framework does)", group=_METHOD,
        choices=("zero", "master-with-weights", "huggingface", "autocast"),
    )  # fmt: skip
    optimizer: str = flag(
        "adamw", "optimizer", group=_METHOD,
        choices=(
            "adamw", "adamw-8bit", "paged-adamw-8bit", "sgd", "sgd-momentum", "adafactor", "lion", "muon",
            "galore-adamw", "galore-adamw-8bit",
        ),
    )  # fmt: skip
    galore_rank: int = flag(  # 128 is the rank in galore-torch's README and in transformers' galore_adamw
        128, "rank of GaLore's projections", group=_METHOD, most=_MOST
    )
    optimizer_in_backward: bool = flag(
        False, "update each parameter in the backward pass and free its gradient at once", group=_METHOD
    )
    optimizer_kernel: str | None = flag(  # optimizers.py computes each kernel's memory
        None, "kernel of the step (default: foreach; fused with DeepSpeed or an fp32 master)", group=_METHOD,
        choices=("foreach", "fused"),
    )  # fmt: skip
    gradient_dtype: str | None = flag(
        None, "dtype of the gradients (default: as the convention has it)", group=_METHOD,
        choices=tuple(DTYPE_BYTES),
    )  # fmt: skip
    base_dtype: str | None = flag(
        None, "dtype of frozen weights with lora, ia3 and freeze (default: 16-bit)", group=_METHOD,
        choices=tuple(DTYPE_BYTES),
    )  # fmt: skip
    rank: int = flag(16, "LoRA rank", group=_METHOD, most=_MOST)
    target_modules: tuple[str, ...] | None = flag(
        None, "modules with adapters, or all-linear (default: PEFT's modules for the family)", group=_METHOD,
        metavar="A,B", hint="leave it out for PEFT's default, or all-linear",
    )  # fmt: skip
    trainable_layers: int = flag(  # LLaMA-Factory trains the last 2 layers by default
        2, "number of last layers that --method freeze trains", group=_METHOD, most=_MOST
    )
    base_quantization: str = flag(
        "nf4-double", "quantization of the base weights with qlora", group=_METHOD,
        choices=("nf4-double", "nf4", "int8"),
    )  # fmt: skip
    loss_scaling: bool = flag(True, "loss scaling with fp16 and fp16-mixed (default: on)", group=_METHOD)

    micro_batch: int = flag(1, "sequences per rank and forward pass", group=_BATCH, most=_MOST)
    sequence_length: int | None = flag(
        None, "tokens per sequence (default: 2,048, or the model's limit if shorter)", group=_BATCH
    )
    gradient_accumulation: int = flag(1, "forward passes per optimizer step", group=_BATCH, most=_MOST)
    packing: bool = flag(False, "several documents in one sequence", group=_BATCH)
    materialized_mask: bool = flag(
        False, "SDPA is given an explicit mask, as transformers 4.56 and 4.57 do in training", group=_BATCH
    )
    checkpointing: str = flag(
        "none", "activations that the backward pass recomputes", group=_BATCH,
        choices=("none", "selective", "full"),
    )  # fmt: skip
    checkpoint_segments: int | None = flag(
        None, "segments of full checkpointing (default: one per layer)", group=_BATCH, most=_MOST
    )
    offload_activations: bool = flag(
        False, "keep activations in CPU memory until the backward pass", group=_BATCH
    )
    attention: str | None = flag(
        None, "attention implementation (default: flash where the GPU has it, else sdpa)", group=_BATCH,
        choices=("flash", "sdpa", "eager"),
    )  # fmt: skip
    loss: str = flag(
        "full", "how the loss is computed: full logits, fused with the head (Liger), or in torchtune's chunks",
        group=_BATCH, choices=("full", "fused", "chunked"),
    )  # fmt: skip
    loss_chunks: int = flag(
        8, "number of chunks of --loss chunked (num_output_chunks)", group=_BATCH, most=_MOST
    )
    compile: bool = flag(False, "use torch.compile, which recomputes pointwise operations", group=_BATCH)
    partition_activations: bool = flag(
        False, "divide checkpoints among tensor-parallel ranks (ZeRO-R)", group=_BATCH
    )

    strategy: str = flag(
        "ddp", "sharding strategy", group=_RANKS,
        choices=("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp-no-shard"),
    )  # fmt: skip
    gpus: int = flag(1, "GPUs per node", group=_RANKS, most=_MOST)
    nodes: int = flag(1, "number of nodes", group=_RANKS, most=_MOST)
    shard_size: int | None = flag(
        None, "ranks of one fsdp-hybrid group (default: one node)", group=_RANKS, most=_MOST
    )
    fsdp_version: int = flag(  # FSDP 1 is torch's class FullyShardedDataParallel, FSDP 2 is fully_shard
        2, "version of FSDP, 1 or 2", group=_RANKS, most=2
    )
    gradient_as_bucket_view: bool = flag(
        False, "gradients are views of DDP's buckets, without a second copy", group=_RANKS
    )
    tensor_parallel: int = flag(1, "tensor-parallel ranks", group=_RANKS, most=_MOST)
    pipeline_parallel: int = flag(1, "pipeline stages", group=_RANKS, most=_MOST)
    context_parallel: int = flag(1, "ranks that share one sequence", group=_RANKS, most=_MOST)
    expert_parallel: int = flag(1, "ranks that share the experts", group=_RANKS, most=_MOST)
    sequence_parallel: bool = flag(
        False, "divide norms and the residual stream among tensor-parallel ranks", group=_RANKS
    )
    pipeline_micro_batches: int | None = flag(
        None, "most micro-batches in flight (default: --gradient-accumulation)", group=_RANKS, most=_MOST
    )
    offload_optimizer: str = flag(
        "none", "where optimizer states and gradients are offloaded", group=_MEMORY, choices=_PLACES
    )
    offload_param: str = flag("none", "where weights are offloaded", group=_MEMORY, choices=_PLACES)
    zero_init: bool = flag(
        True, "each rank builds its own part only (default: on), else the whole model first",
        group=_RANKS,
    )  # fmt: skip
    quantized_weights: bool = flag(False, "ZeRO++ qwZ: int8 all-gather", group=_RANKS)
    hpz_partition_size: int = flag(
        1, "ZeRO++ hpZ: secondary partition, usually --gpus", group=_RANKS, most=_MOST
    )
    quantized_gradients: bool = flag(False, "ZeRO++ qgZ: int4 reduction", group=_RANKS)
    bucket_elements: int = flag(500_000_000, "DeepSpeed reduce_bucket_size", group=_RANKS, most=1 << 38)

    device_memory: int | None = flag(None, "memory of one GPU", group=_MEMORY, unit="bytes")
    compute_capability: str | None = flag(
        None, "compute capability of the GPU, known with --gpu", group=_MEMORY, metavar="X.Y", read=_capability
    )
    cpu_memory: int | None = flag(None, "CPU memory of one node", group=_MEMORY, unit="bytes")
    nvme: int | None = flag(None, "NVMe capacity of one node", group=_MEMORY, unit="bytes")
    intra_node: int | None = flag(
        None, "between GPUs: nvlink3|nvlink4|nvlink5|pcie3|pcie4|pcie5 or 300GB/s", group=_MEMORY, unit="bytes",
        metavar="SPEED", read=parse_speed,
    )  # fmt: skip
    inter_node: int | None = flag(
        None, "between nodes, per node: hdr|ndr|xdr|efa|100gbe or 400Gbps", group=_MEMORY, unit="bytes",
        metavar="SPEED", read=parse_speed,
    )  # fmt: skip
    network_share: float = flag(
        0.8, "achieved share of the links' specified speed", group=_MEMORY, unit="share",
        hint="0.8 to 0.85 is usual",
    )  # fmt: skip

    @property
    def world(self) -> int:
        """Return the number of GPUs on all nodes together."""
        return self.gpus * self.nodes

    @property
    def model_ranks(self) -> int:
        """Return the number of ranks per copy of the model: tensor-parallel ranks times pipeline stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def data_parallel(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.world // (self.model_ranks * self.context_parallel)

    @property
    def shard_ranks(self) -> int:
        """Return the number of ranks among which ZeRO or FSDP may shard weights: data x context parallel."""
        return self.world // self.model_ranks

    @property
    def effective_batch(self) -> int:
        """Return the number of sequences that all ranks process in one optimizer step."""
        return self.micro_batch * self.gradient_accumulation * self.data_parallel

    @property
    def zero_stage(self) -> int:
        """Return the ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights."""
        return {
            "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "fsdp-hybrid": 3, "fsdp-grad-op": 2,
        }.get(self.strategy, 0)  # fmt: skip

    @property
    def is_fsdp(self) -> bool:
        """Return whether the setup shards with FSDP (--strategy fsdp, fsdp-grad-op and so on)."""
        return self.strategy.startswith("fsdp")

    @property
    def pure_16_bit(self) -> bool:
        """Return whether weights, gradients and optimizer states have 16 bits, without fp32 master weights."""
        return self.precision in ("bf16", "fp16")

    @property
    def fp8_kept(self) -> bool:
        """Return whether inputs and weights of linear layers stay in fp8 until the backward pass.

        Transformer Engine does so. torchao's float8, made for FSDP, keeps them in 16 bits and casts inside each
        product (torchao/float8/float8_linear.py).
        """
        return self.precision == "fp8" and not self.is_fsdp

    @property
    def mixed(self) -> bool:
        """Return whether --precision is a mixed one: bf16-mixed, fp16-mixed or fp8."""
        return self.precision in ("bf16-mixed", "fp16-mixed", "fp8")


def check_setup(setup: TrainingSetup) -> None:
    """Reject a training setup whose flags contradict each other, whatever the model is.

    Raises:
        DeploymentError: for a contradiction; the error names the flag.
    """
    check_values(setup)
    if setup.target_modules is not None and setup.method not in ADAPTERS:
        raise DeploymentError(
            f"--method {setup.method} adds no adapters to modules",
            field="--target-modules",
            hint=f"choose a --method with adapters: {', '.join(ADAPTERS)}",
        )
    _check_precision(setup)
    _check_ranks(setup)
    _check_offload(setup)


def _check_precision(setup: TrainingSetup) -> None:
    """Raise DeploymentError for flags that contradict the training setup's --precision."""
    if setup.convention is not None and not setup.mixed:
        raise DeploymentError(
            f"{setup.precision} keeps no master weights, so there is no convention to choose",
            field="--convention",
            hint="leave out --convention, or choose --precision bf16-mixed",
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
    """Raise DeploymentError if parallel sizes do not divide the GPUs or contradict another flag."""
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
            "sequence parallelism shards tensors that tensor parallelism replicates; --tensor-parallel is 1",
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
                f"the {setup.shard_ranks} data-parallel ranks cannot be divided into groups of {size}",
                field="--shard-size",
                hint="choose a divisor, usually the number of GPUs of one node",
            )
    elif setup.shard_size is not None:
        raise DeploymentError("this flag is only for --strategy fsdp-hybrid", field="--shard-size")
    if setup.pipeline_parallel > 1 and setup.strategy in ("zero2", "zero3"):
        raise DeploymentError(
            f"{setup.strategy} reduces gradients after every micro-batch, which a pipeline does not allow",
            field="--pipeline-parallel",
            hint="use --strategy zero1",
        )


def _check_offload(setup: TrainingSetup) -> None:
    """Raise DeploymentError for offload or ZeRO++ flags that the sharding strategy does not support."""
    for field in ("offload_param", "offload_optimizer"):
        if getattr(setup, field) == "nvme" and setup.strategy != "zero3":
            raise DeploymentError(
                f"offload to nvme needs ZeRO stage 3 (ZeRO-Infinity), and the strategy is {setup.strategy}",
                field=flags_of(TrainingSetup)[field].option,
                hint="--strategy zero3, or cpu",
            )
    if setup.offload_param != "none" and setup.zero_stage != 3:
        raise DeploymentError(
            f"only ZeRO stage 3 and FSDP offload weights, and the strategy is {setup.strategy}",
            field="--offload-param",
            hint="--strategy zero3, or --offload-optimizer",
        )
    if setup.offload_optimizer != "none" and setup.zero_stage == 0:
        raise DeploymentError(
            f"only ZeRO and FSDP offload optimizer states, and the strategy is {setup.strategy}",
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
            "ZeRO stage 3 cannot shard the packed weights of bitsandbytes",
            field="--strategy",
            hint="QLoRA works with zero1 and zero2, where the quantized base is replicated; or lora with zero3",
        )
    if setup.method == "qlora" and setup.zero_stage == 3 and setup.base_quantization == "int8":
        raise DeploymentError(
            "FSDP cannot split LLM.int8 weights", field="--base-quantization",
            hint="use nf4, or --strategy zero2",
        )  # fmt: skip
    zeropp = setup.quantized_weights or setup.quantized_gradients or setup.hpz_partition_size > 1
    if zeropp and setup.strategy != "zero3":
        raise DeploymentError(
            f"ZeRO++ needs ZeRO stage 3, and the strategy is {setup.strategy}",
            field="--zero-plus-plus",
            hint="use --strategy zero3",
        )
    if setup.shard_ranks % setup.hpz_partition_size:
        raise DeploymentError(
            f"the {setup.shard_ranks} data-parallel ranks cannot be divided into groups of "
            f"{setup.hpz_partition_size}",
            field="--hpz-partition-size",
            hint="choose a divisor, usually the number of GPUs of one node",
        )


def hybrid_group(setup: TrainingSetup) -> int:
    """Return the number of ranks that shard one copy of the model with --strategy fsdp-hybrid.

    It is --shard-size, or else the number of data-parallel ranks of one node.
    """
    return setup.shard_size or max(1, min(setup.gpus // setup.tensor_parallel, setup.shard_ranks))
