"""Configuration files for training tools: DeepSpeed JSON, Accelerate YAML, arguments for Trainer and PEFT.

The module also returns DeepSpeed's own estimates as text. Key names are those of DeepSpeed 0.19, Accelerate
1.15, transformers 5.19 and PEFT 0.21.
"""

from __future__ import annotations

import json
from typing import Any

from tonnage.planner.errors import DeploymentError, did_you_mean
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.training import deepspeed as deepspeed_estimates
from tonnage.planner.training.methods import default_targets
from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.step import kernel_of

KINDS = ("deepspeed", "accelerate", "trainer", "peft", "deepspeed-estimate")

_OPTIM = {
    "adamw": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit", "paged-adamw-8bit": "paged_adamw_8bit",
    "sgd": "sgd", "sgd-momentum": "sgd", "adafactor": "adafactor", "lion": "lion_32bit",
    "galore-adamw": "galore_adamw", "galore-adamw-8bit": "galore_adamw_8bit",
}  # fmt: skip


def emit(kind: str, plan: TrainingPlan, architecture: Architecture) -> str:
    """Return the training configuration of a plan as text, for the tool that `kind` names.

    Raises:
        DeploymentError: for an unknown kind, or a setup that the tool cannot express.
    """
    if kind == "deepspeed":
        return json.dumps(deepspeed(plan.setup), indent=2)
    if kind == "accelerate":
        return _yaml(accelerate(plan.setup))
    if kind == "trainer":
        return json.dumps(trainer(plan.setup), indent=2)
    if kind == "peft":
        return json.dumps(peft(plan.setup, architecture.model_type), indent=2)
    if kind == "deepspeed-estimate":
        return deepspeed_estimates.tables(architecture, plan.setup.gpus, plan.setup.nodes)
    raise DeploymentError(
        f"{kind!r} is not one of {', '.join(KINDS)}", field="--emit", hint=did_you_mean(kind, KINDS)
    )


def deepspeed(setup: TrainingSetup) -> dict[str, Any]:
    """Return a setup's DeepSpeed config, for `deepspeed.initialize` or `TrainingArguments(deepspeed=...)`."""
    if not setup.strategy.startswith("zero"):
        raise DeploymentError(
            f"{setup.strategy} is not a DeepSpeed strategy",
            field="--emit",
            hint="--strategy zero1, zero2 or zero3",
        )
    zero: dict[str, Any] = {
        "stage": setup.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": setup.bucket_elements,
    }
    if setup.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if setup.quantized_weights:
            zero["zero_quantized_weights"] = True
        if setup.quantized_gradients:
            zero["zero_quantized_gradients"] = True
        if setup.hpz_partition_size > 1:
            zero["zero_hpz_partition_size"] = setup.hpz_partition_size
    for field in ("offload_optimizer", "offload_param"):
        where = getattr(setup, field)
        if where != "none":
            zero[field] = {"device": where, "pin_memory": True}
            if where == "nvme":
                zero[field]["nvme_path"] = "/local_nvme"
    out: dict[str, Any] = {
        "train_batch_size": setup.effective_batch,
        "train_micro_batch_size_per_gpu": setup.micro_batch,
        "gradient_accumulation_steps": setup.gradient_accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    if setup.precision.startswith("bf16") or setup.precision == "fp8":
        out["bf16"] = {"enabled": True}
    elif setup.precision.startswith("fp16"):
        out["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    if setup.partition_activations:
        out["activation_checkpointing"] = {
            "partition_activations": True,
            "cpu_checkpointing": setup.offload_activations,
            "contiguous_memory_optimization": True,
        }
    return out


def accelerate(setup: TrainingSetup) -> dict[str, Any]:
    """Return a setup's Accelerate config, for `accelerate launch --config_file`."""
    precision = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8": "fp8"}.get(setup.precision, "no")
    out: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": precision,
        "num_machines": setup.nodes,
        "num_processes": setup.world,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if setup.precision == "fp8":
        out["fp8_config"] = {"backend": "TE" if setup.fp8_kept else "AO"}
    if setup.strategy.startswith("zero"):
        out["distributed_type"] = "DEEPSPEED"
        out["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": setup.zero_init,
        }
    elif setup.is_fsdp and setup.strategy != "fsdp-no-shard":
        out["distributed_type"] = "FSDP"
        out["fsdp_config"] = _fsdp(setup)
    elif setup.world > 1:
        out["distributed_type"] = "MULTI_GPU"
    return out


def _fsdp(setup: TrainingSetup) -> dict[str, Any]:
    """Return the object `fsdp_config` of a setup's Accelerate config."""
    out: dict[str, Any] = {
        "fsdp_version": setup.fsdp_version,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": setup.offload_param != "none",
        "fsdp_activation_checkpointing": setup.checkpointing == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }
    if setup.fsdp_version == 2:
        out["fsdp_reshard_after_forward"] = setup.strategy != "fsdp-grad-op"
    else:
        names = {"fsdp": "FULL_SHARD", "fsdp-grad-op": "SHARD_GRAD_OP", "fsdp-hybrid": "HYBRID_SHARD"}
        out["fsdp_sharding_strategy"] = names[setup.strategy]
        out["fsdp_backward_prefetch"] = "BACKWARD_PRE"
        out["fsdp_use_orig_params"] = True
    return out


def trainer(setup: TrainingSetup) -> dict[str, Any]:
    """Return the keyword arguments of `transformers.TrainingArguments` for a training setup."""
    if setup.stack == "torchtune":
        raise DeploymentError(
            "torchtune is configured by the YAML file of a recipe, not by TrainingArguments",
            field="--emit",
            hint="tune run with its YAML files",
        )
    galore = setup.optimizer.startswith("galore")
    if setup.optimizer_in_backward and not galore:
        raise DeploymentError(
            "TrainingArguments runs the optimizer in the backward pass for GaLore only",
            field="--optimizer-in-backward",
            hint="--optimizer galore-adamw",
        )  # fmt: skip
    if setup.optimizer not in _OPTIM:
        raise DeploymentError(
            f"TrainingArguments has no optimizer {setup.optimizer}", field="--optimizer", hint=", ".join(_OPTIM)
        )
    out: dict[str, Any] = {
        "per_device_train_batch_size": setup.micro_batch,
        "gradient_accumulation_steps": setup.gradient_accumulation,
        "gradient_checkpointing": setup.checkpointing == "full",
        "bf16": setup.precision in ("bf16-mixed", "fp8"),
        "fp16": setup.precision == "fp16-mixed",
        "optim": _OPTIM[setup.optimizer],
        "dataloader_pin_memory": True,
        "dataloader_num_workers": 4,
    }
    if setup.optimizer == "adamw" and kernel_of(setup) == "fused":
        out["optim"] = "adamw_torch_fused"
    if galore:
        out["optim"] += "_layerwise" if setup.optimizer_in_backward else ""
        out["optim_target_modules"] = ["attn", "mlp"]
        out["optim_args"] = f"rank={setup.galore_rank}"
    if setup.compile:
        out["torch_compile"] = True
    if setup.optimizer == "sgd-momentum":
        out["optim_args"] = "momentum=0.9"
    if setup.checkpointing == "full":
        out["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if setup.loss == "fused":
        out["use_liger_kernel"] = True
    if setup.strategy.startswith("zero"):
        out["deepspeed"] = "deepspeed.json"
    return out


def peft(setup: TrainingSetup, model_type: str) -> dict[str, Any]:
    """Return a setup's `peft.LoraConfig` or `IA3Config` as a dict of its fields.

    For QLoRA, the dict also has the fields of a BitsAndBytesConfig, under `quantization_config`.
    """
    if setup.method not in ("lora", "qlora", "ia3"):
        raise DeploymentError(
            f"--method {setup.method} trains no adapters", field="--emit", hint="--method lora"
        )
    targets = list(setup.target_modules or default_targets(setup, model_type) or ())
    modules: Any = "all-linear" if targets == ["all-linear"] else targets
    if setup.method == "ia3":
        return {"peft_type": "IA3", "task_type": "CAUSAL_LM", "target_modules": modules}
    out: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": setup.rank, "lora_alpha": 2 * setup.rank,
        "lora_dropout": 0.0, "bias": "none", "target_modules": modules,
    }  # fmt: skip
    if setup.method == "qlora":
        out["quantization_config"] = {"load_in_8bit": True} if setup.base_quantization == "int8" else {
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_use_double_quant": setup.base_quantization == "nf4-double",
        }  # fmt: skip
    return out


def _yaml(value: dict[str, Any], indent: int = 0) -> str:
    """Return the dict `value` as YAML; it has strings, numbers, booleans and one level of nesting."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines.append(" " * indent + f"{key}:")
            lines.append(_yaml(item, indent + 2))
        else:
            text = str(item).lower() if isinstance(item, bool) else str(item)
            if isinstance(item, str) and item.lower() in ("no", "yes", "on", "off", "true", "false"):
                text = f"'{item}'"
            lines.append(" " * indent + f"{key}: {text}")
    return "\n".join(lines)
