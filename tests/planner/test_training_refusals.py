"""Tests that impossible training setups raise an error naming flag, value and valid alternatives."""

from __future__ import annotations

import pytest

from tonnage.planner.errors import DeploymentError, DoesNotFit, TonnageError, UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import load_training_model, model_from
from tonnage.planner.training.search import largest
from tonnage.planner.training.setup import TrainingSetup


@pytest.mark.parametrize(
    ("setup", "field", "words"),
    [
        ({"method": "qlora", "strategy": "zero3", "gpus": 8}, "--strategy", ["stage 3", "zero2"]),
        ({"method": "qlora", "strategy": "fsdp", "gpus": 8, "base_quantization": "int8"}, "--base-quantization",
         ["LLM.int8"]),
        ({"strategy": "fsdp-hybrid", "gpus": 8, "shard_size": 3}, "--shard-size", ["3", "8"]),
        ({"strategy": "zero3", "gpus": 8, "hpz_partition_size": 3}, "--hpz-partition-size", ["3", "8"]),
        ({"strategy": "zero2", "gpus": 8, "hpz_partition_size": 8}, "--zero-plus-plus", ["stage 3", "zero2"]),
        ({"tensor_parallel": 3, "gpus": 3}, "--tensor-parallel", ["3", "32 attention heads", "divisors"]),
        ({"tensor_parallel": 16, "gpus": 8, "nodes": 2}, "--tensor-parallel", ["16", "8 GPUs", "node"]),
        ({"tensor_parallel": 2, "gpus": 3}, "--tensor-parallel", ["2", "3 GPUs"]),
        ({"pipeline_parallel": 64, "gpus": 64}, "--pipeline-parallel", ["64", "32 layers"]),
        ({"pipeline_parallel": 2, "gpus": 2, "strategy": "zero2"}, "--pipeline-parallel", ["zero1"]),
        ({"expert_parallel": 2, "gpus": 2}, "--expert-parallel", ["no experts"]),
        ({"sequence_parallel": True}, "--sequence-parallel", ["--tensor-parallel is 1"]),
        ({"partition_activations": True}, "--partition-activations", ["--tensor-parallel is 1"]),
        ({"method": "lora", "target_modules": ("qkv_proj",)}, "--target-modules",
         ["'qkv_proj'", "q_proj", "down_proj"]),
        ({"precision": "fp16", "loss_scaling": False}, "--no-loss-scaling", ["6e-8", "--precision bf16"]),
        ({"precision": "fp16-mixed", "loss_scaling": False}, "--no-loss-scaling", ["6e-8"]),
        ({"strategy": "zero2", "gpus": 8, "offload_optimizer": "nvme"}, "--offload-optimizer",
         ["stage 3", "zero2"]),
        ({"strategy": "ddp", "gpus": 8, "offload_param": "nvme"}, "--offload-param", ["stage 3", "ddp"]),
        ({"strategy": "zero2", "gpus": 8, "offload_param": "cpu"}, "--offload-param", ["stage 3"]),
        ({"offload_optimizer": "cpu"}, "--offload-optimizer", ["ZeRO", "ddp"]),
        ({"strategy": "fsdp", "gpus": 8, "offload_param": "cpu"}, "--offload-param", ["together"]),
        ({"method": "freeze", "trainable_layers": 33}, "--trainable-layers", ["33", "32 layers"]),
        ({"attention": "flash", "precision": "fp32"}, "--attention", ["FlashAttention", "fp32", "sdpa"]),
        ({"attention": "flash", "compute_capability": "7.5"}, "--attention", ["8.0", "7.5", "sdpa"]),
        ({"precision": "fp8", "compute_capability": "8.0"}, "--precision", ["8.9", "8.0", "bf16-mixed"]),
        ({"method": "prompt"}, "--method", ["'prompt'", "qlora"]),
        ({"optimizer": "adam9"}, "--optimizer", ["'adam9'", "adafactor"]),
        ({"convention": "zero", "precision": "fp32"}, "--convention", ["fp32", "master"]),
        ({"convention": "mine"}, "--convention", ["'mine'"]),
        ({"gradient_dtype": "int8"}, "--gradient-dtype", ["'int8'"]),
        ({"micro_batch": 0}, "--micro-batch", ["0"]),
        ({"gpus": 1 << 30}, "--gpus", ["1073741824"]),
        ({"network_share": 1.5}, "--network-share", ["1.5", "0.8"]),
    ],
)  # fmt: skip
def test_error_for_an_invalid_training_setup_names_the_setting(planner, setup, field, words):
    with pytest.raises(DeploymentError) as caught:
        planner.plan(TrainingSetup(**setup))
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


def test_rejected_training_setup_leaves_the_planner_unchanged(planner):
    before = planner.plan(TrainingSetup())
    with pytest.raises(TonnageError):
        planner.plan(TrainingSetup(tensor_parallel=3, gpus=3))
    assert planner.plan(TrainingSetup()) == before


def test_qlora_rejects_model_without_replaceable_linear_layers(config_of):
    """Falcon's linear layers are a subclass that bitsandbytes does not replace."""
    config = config_of("tiiuae/falcon-40b")
    model = Planner(model_from("falcon", build_architecture(config)))
    with pytest.raises(UnsupportedArchitecture, match="FalconForCausalLM"):
        model.plan(TrainingSetup(method="qlora"))


def test_training_quantized_checkpoint_is_rejected(folder_with, tiny_llama):
    tiny_llama["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedArchitecture, match="gptq") as caught:
        load_training_model(folder_with(tiny_llama))
    assert caught.value.field == "quantization_config"


def test_micro_batch_search_needs_device_memory_and_a_micro_batch_of_one_that_fits(planner):
    with pytest.raises(DeploymentError) as caught:
        largest(planner, TrainingSetup(), "micro_batch")
    assert caught.value.field == "--device-memory"
    with pytest.raises(DoesNotFit, match="not even micro batch 1 fits"):
        largest(planner, TrainingSetup(device_memory=10**9), "micro_batch")


@pytest.mark.parametrize("precision", ["fp16", "fp16-mixed"])
def test_fp16_training_notes_loss_scaling(planner, precision):
    notes = planner.plan(TrainingSetup(precision=precision)).notes
    assert any("loss scaling" in note for note in notes)
    assert any("GradScaler" in note for note in notes) == (precision == "fp16")


def test_qlora_plan_notes_its_limits_in_sharding_speed_and_memory(planner):
    notes = " ".join(planner.plan(TrainingSetup(method="qlora", strategy="zero2", gpus=8)).notes)
    assert "stage 3 cannot split it" in notes
    assert "30 % slower" in notes
    assert "prepare_model_for_kbit_training" in notes


def test_default_attention_is_sdpa_without_flash_attention(planner):
    """Without a flag, float32 and a T4 get SDPA, and an A100 gets FlashAttention."""
    for changes, attention in (
        ({"precision": "fp32"}, "sdpa"), ({"compute_capability": "7.5"}, "sdpa"),
        ({"compute_capability": "8.0"}, "flash"), ({}, "flash"),
    ):  # fmt: skip
        plan = planner.plan(TrainingSetup(micro_batch=32, **changes))
        found = next(line for line in plan.lines if line.name == "activations")
        assert attention in found.formula
    plan = planner.plan(TrainingSetup(compute_capability="7.5"))
    assert any("emulated" in note for note in plan.notes)
