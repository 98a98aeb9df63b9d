"""Training stacks (torchtune, unsloth, ...): how each differs in memory from a plain loop over transformers.

A `Stack` lists the behaviours of a training library on which memory depends, each with the source file that
shows it. No figure is fitted. A benchmark compares the plans with the totals that the libraries publish
(benchmarks/training_accuracy.py --stacks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tonnage.planner.errors import DeploymentError
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.values import Kernels


class StackDefault(NamedTuple):
    """A flag value that a training library (--stack) sets if the user does not give the flag.

    Attributes:
        flag: field of `TrainingSetup`.
        value: the value that the library sets.
        source: the library's file that has the default.
        methods: training methods to which the default applies; empty means all methods.
    """

    flag: str
    value: Any
    source: str
    methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """The properties of a training library (torchtune, unsloth, ...) that decide how much memory it takes.

    Attributes:
        name: name of the stack, empty for a plain loop.
        version: version of the stack whose sources were read.
        sources: (subject, behaviour with its source file) pairs.
        kernels: how the library's modules differ from transformers' in the tensors that they keep.
        adapter: bytes of one value of an adapter's weight, gradient and states; 0 means the model's dtype.
        keeps_logits: whether the training loop holds the model's output until the backward pass ends.
        frees_gradients: whether zero_grad sets gradients to None. Without gradient accumulation, no gradients
            then exist during the forward pass.
        head_in_fp32: whether the logits are cast to fp32 before the loss, without keeping the 16-bit ones.
        shards_ends: whether embedding and head are FSDP units of their own in full training. With adapters this
            is optional.
        offloads_ends: whether activation offloading includes tensors outside the layers (embedding, final
            norm).
        upcasts: whether the unquantized weights of a quantized model become fp32.
        nf4: the package whose NF4 packing the stack uses.
        dequantized: temporary bytes per weight while a quantized matrix is unpacked. With torch.compile,
            every library needs 2.
        states_in_fp32: whether the stack's 8-bit optimizers may compute in fp32 copies of a whole tensor.
        model_types: model types for which the stack has modules of its own; empty means transformers' modules.
        defaults: flag values that the stack sets.
    """

    name: str
    version: str
    sources: tuple[tuple[str, str], ...]
    kernels: Kernels = Kernels()
    adapter: int = 4
    keeps_logits: bool = False
    frees_gradients: bool = True
    head_in_fp32: bool = False
    shards_ends: bool = False
    offloads_ends: bool = False
    upcasts: bool = False
    nf4: str = "bitsandbytes"
    dequantized: int = 2
    states_in_fp32: bool = False
    model_types: tuple[str, ...] = ()
    defaults: tuple[StackDefault, ...] = ()

    @property
    def shown(self) -> str:
        """Return the training library's name and version as text."""
        return f"{self.name} {self.version}".strip()


_LORA = ("lora", "qlora")
_YAML = "recipes/configs/llama3_1/8B_{full,lora,qlora}_single_device.yaml"

PLAIN = Stack(
    "", "", (("gradients", "kept between steps, as with zero_grad(set_to_none=False)"),),
    keeps_logits=True, frees_gradients=False, dequantized=0,
)  # fmt: skip
"""The training loop planned without --stack: transformers' modules and PEFT, keeping gradients and logits."""

STACKS = {
    "transformers": Stack(
        "transformers", "5.19",
        (
            ("gradients", "trainer.py: model.zero_grad(), which sets them to None"),
            ("AdamW", "training_args.py optim: adamw_torch_fused, from torch 2.8 on"),
            ("logits", "trainer.py compute_loss: the outputs are dropped with its frame"),
            ("adapters", "peft 0.21 tuners_utils.py autocast_adapter_dtype: fp32"),
            ("not quantized", "peft 0.21 utils/other.py prepare_model_for_kbit_training: fp32"),
            ("NF4", "bitsandbytes 0.50 autograd/_functions.py MatMul4Bit: dequantized for each product"),
        ),
        upcasts=True,
    ),
    "torchtune": Stack(
        "torchtune", "0.6.1",
        (
            ("gradients", "recipes/*_single_device.py: zero_grad(set_to_none=True)"),
            ("AdamW", f"{_YAML}: fused"),
            ("logits", "modules/transformer.py unembed: .float(), or chunks; the recipe's del logits"),
            ("norms", "modules/rms_norm.py: F.rms_norm(x.float()), two fp32 tensors; until 0.4 one"),
            ("attention", "modules/attention.py: K and V expanded to all heads, then SDPA or flex_attention"),
            ("rotary tables", "modules/position_embeddings.py: taken by position for Q and K when packed"),
            ("adapters", "modules/peft/lora.py: in the model's type, the input read as it is"),
            ("NF4", "torchao dtypes/nf4tensor.py: int8 scalers, one factor of 256; get_original_weight"),
            ("FSDP", "recipes/configs/llama3_1/70B_{full,lora}.yaml custom_sharded_layers: embedding, output"),
            ("offloading", "training/_activation_offloading.py: all but the output head's"),
            ("8-bit states", "torchao optim/adam.py single_param_adam, in fp32; bitsandbytes' are in place"),
            ("compile", "training/_compile.py: each layer, flex_attention apart; the chunked loss"),
        ),
        kernels=Kernels(as_input=True, fp32_norm=True, repeats_kv=True, tables="buffer", layers_only=True),
        adapter=0, head_in_fp32=True, shards_ends=True, offloads_ends=True, nf4="torchao", dequantized=15,
        states_in_fp32=True,
        model_types=("llama", "mistral", "qwen2", "gemma"),
        defaults=(
            StackDefault("precision", "bf16", f"{_YAML} dtype"),
            StackDefault("checkpointing", "full", f"{_YAML} enable_activation_checkpointing"),
            StackDefault("loss", "chunked", f"{_YAML} loss: CEWithChunkedOutputLoss"),
            StackDefault("attention", "sdpa", "modules/attention_utils.py"),
            StackDefault("optimizer", "paged-adamw-8bit", f"{_YAML} optimizer", ("full",)),
            StackDefault("optimizer_in_backward", True, f"{_YAML} optimizer_in_bwd", ("full",)),
            StackDefault("rank", 8, f"{_YAML} lora_rank", _LORA),
            StackDefault(
                "target_modules", ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
                f"{_YAML} lora_attn_modules, apply_lora_to_mlp", _LORA,
            ),
        ),
    ),
    "llama-factory": Stack(
        "llama-factory", "0.9.5",
        (
            ("trained weights", "model/adapter.py cast_trainable_params_to_fp32, unless pure_bf16: fp32"),
            ("not quantized", "model/model_utils/checkpointing.py: 16-bit, unless upcast_layernorm"),
            ("gradients, logits, AdamW", "train/sft/trainer.py: transformers' Trainer"),
        ),
        defaults=(
            StackDefault("checkpointing", "full", "hparams/model_args.py disable_gradient_checkpointing"),
            StackDefault("rank", 8, "hparams/finetuning_args.py lora_rank", _LORA),
            StackDefault("target_modules", ("all-linear",), "hparams/finetuning_args.py lora_target", _LORA),
            StackDefault("galore_rank", 16, "hparams/finetuning_args.py galore_rank"),
        ),
    ),
    "unsloth": Stack(
        "unsloth", "2026.10.9",
        (
            ("norms, MLP, adapters", "kernels/rms_layernorm.py, fast_lora.py: inputs and gate and up only"),
            ("adapters", "unsloth_zoo training_utils.py float32_mixed_precision: fp32"),
            ("loss", "unsloth_zoo fused_losses/cross_entropy_loss.py: 16 bytes a logit, in chunks up to 4 GiB"),
            ("NF4", "kernels/utils.py fast_dequantize: one buffer of the largest matrix"),
            ("gradients, AdamW", "transformers' Trainer"),
        ),
        kernels=Kernels(as_input=True, compiled="least"),
        defaults=(
            StackDefault("checkpointing", "full", "models/llama.py use_gradient_checkpointing='unsloth'"),
            StackDefault(
                "offload_activations", True, "unsloth_zoo gradient_checkpointing.py: inputs go to the CPU"
            ),
            StackDefault("loss", "fused", "unsloth_zoo fused_losses"),
            StackDefault("rank", 16, "models/llama.py get_peft_model r", _LORA),
            StackDefault(
                "target_modules",
                ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
                "models/llama.py _DEFAULT_TARGET_MODULES", _LORA,
            ),
        ),
        model_types=("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
    ),
    "axolotl": Stack(
        "axolotl", "0.19.0",
        (
            ("not quantized", "loaders/model.py _configure_embedding_dtypes: 16 bits again for FlashAttention"),
            ("gradients, logits", "core/trainers: transformers' Trainer"),
            ("AdamW", "utils/schemas/training.py optimizer: adamw_torch_fused"),
        ),
    ),
}  # fmt: skip


def stack_of(setup: TrainingSetup) -> Stack:
    """Return the description of the setup's training library (--stack), `PLAIN` without one."""
    return PLAIN if setup.stack is None else STACKS[setup.stack]


def adapter_bytes(setup: TrainingSetup) -> int:
    """Return the bytes per value of an adapter's weights, gradients and optimizer states."""
    return stack_of(setup).adapter or (4 if setup.precision == "fp32" else 2)


def gradients_held(setup: TrainingSetup) -> bool:
    """Return whether the gradients of a training setup take memory during a forward pass.

    Gradients take memory with gradient accumulation, in DeepSpeed's flat buffers and in FSDP's shards. They
    also do if the training loop does not set them to None after a step.
    """
    kept = setup.gradient_accumulation > 1 or setup.zero_stage > 0
    return kept or not (stack_of(setup).frees_gradients or setup.optimizer_in_backward)


def kernels_of(setup: TrainingSetup) -> Kernels:
    """Return how the training library's modules differ from transformers' in the tensors that they keep.

    The result depends on packing, training method and --compile.
    """
    stack = stack_of(setup)
    kernels = stack.kernels._replace(
        tables="taken" if stack.kernels.tables == "buffer" and setup.packing else stack.kernels.tables,
        quantized=stack.upcasts and setup.method == "qlora",
    )
    return kernels._replace(compiled="inductor") if setup.compile and not kernels.compiled else kernels


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Return the `given` training flags, completed by the defaults of the library that --stack names."""
    stack = STACKS.get(given.get("stack") or "")
    if stack is None:
        return given
    method = given.get("method", "full")
    taken = {d.flag: d.value for d in stack.defaults if not d.methods or method in d.methods}
    alone = given.get("gpus", 1) * given.get("nodes", 1) == 1 and given.get("strategy", "ddp") == "ddp"
    # torchtune's recipe for several GPUs (recipes/configs/llama3_1/8B_full.yaml) uses torch's AdamW, which has
    # no 8-bit states.
    if not alone:
        taken.pop("optimizer", None)
    if not alone or given.get("gradient_accumulation", 1) > 1:
        taken.pop("optimizer_in_backward", None)
    if taken.get("offload_activations") and given.get("checkpointing", "full") != "full":
        del taken["offload_activations"]
    return {**taken, **given}


def stack_notes(setup: TrainingSetup) -> list[str]:
    """Return notes for a training plan: which defaults of the training library (such as Unsloth) apply.

    If gradients are freed after each step, a further note says so.
    """
    out = []
    stack = stack_of(setup)
    if stack.name:
        taken = [d for d in stack.defaults if not d.methods or setup.method in d.methods]
        as_set = [
            f"{d.flag.replace('_', '-')} {_shown(d.value)}" for d in taken if getattr(setup, d.flag) == d.value
        ]
        said = f"; its defaults: {', '.join(as_set)}" if as_set else ""
        out.append(f"{stack.shown} by its sources (--explain names them){said}")
        if not gradients_held(setup):
            out.append("gradients come and go with each step; --gradient-accumulation 2 and more keeps them")
    if setup.optimizer_in_backward:
        out.append("optimizer in backward: no gradient clipping, no gradient accumulation")
    return out


def _shown(value: object) -> str:
    """Return a training flag's value as text for a note."""
    return "+".join(value) if isinstance(value, tuple) else "on" if value is True else str(value)


def check_stack(setup: TrainingSetup, model_type: str) -> None:
    """Reject flags that the setup's training library (--stack) does not support.

    Raises:
        DeploymentError: for such a flag; the error names it.
    """
    stack = stack_of(setup)
    if stack.model_types and model_type not in stack.model_types:
        raise DeploymentError(
            f"{stack.shown} replaces modules of the model; this is planned only for "
            f"{', '.join(stack.model_types)}, and the model is {model_type}",
            field="--stack", hint="--stack transformers",
        )  # fmt: skip
    if setup.stack == "torchtune":
        if setup.mixed:
            raise DeploymentError(
                f"torchtune trains in bf16 or fp32 without autocast, and --precision is {setup.precision}",
                field="--precision", hint="use bf16",
            )  # fmt: skip
        if setup.attention == "eager":
            raise DeploymentError(
                "torchtune has no eager attention, only SDPA and flex_attention", field="--attention",
                hint="use sdpa",
            )  # fmt: skip
        if setup.strategy.startswith("zero"):
            raise DeploymentError(
                f"torchtune shards with FSDP2 only, and the strategy is {setup.strategy}", field="--strategy",
                hint="use fsdp",
            )  # fmt: skip
        if setup.method == "qlora" and setup.base_quantization != "nf4-double":
            raise DeploymentError(
                f"torchtune quantizes to NF4 with double quantization only, not to {setup.base_quantization}",
                field="--base-quantization",
                hint="use nf4-double",
            )
        if setup.method in ("ia3", "freeze"):
            raise DeploymentError(
                f"torchtune has no training method {setup.method}", field="--method",
                hint="use full, lora or qlora",
            )  # fmt: skip
    elif setup.loss == "chunked":
        raise DeploymentError(
            "only torchtune has the chunked loss", field="--loss", hint="--loss fused, or --stack torchtune"
        )
    if setup.optimizer_in_backward:
        _check_in_backward(setup)


def _check_in_backward(setup: TrainingSetup) -> None:
    """Reject --optimizer-in-backward with adapters, gradient accumulation or several ranks."""
    field = "--optimizer-in-backward"
    if setup.method != "full":
        raise DeploymentError(f"this flag needs --method full, and the method is {setup.method}", field=field)
    if setup.gradient_accumulation > 1:
        raise DeploymentError(
            "each gradient is freed right after its use, so gradients cannot be accumulated", field=field,
            hint="--gradient-accumulation 1",
        )  # fmt: skip
    if setup.zero_stage or setup.shard_ranks > 1:
        raise DeploymentError(
            "this flag works on one GPU only, because several ranks must first reduce each gradient",
            field=field,
            hint="--no-optimizer-in-backward",
        )  # fmt: skip


def nf4_torchao_bytes(elements: int) -> int:
    """Return the bytes of a matrix of `elements` weights, stored as torchao's NF4Tensor for bf16.

    Each value takes half a byte. In addition there are an int8 scaler per 64 values, a 16-bit factor per 256
    scalers, their mean, and the table of 16 values.
    """
    return elements // 2 + elements // 64 + 2 * (elements // (64 * 256)) + 2 + 2 * 16
