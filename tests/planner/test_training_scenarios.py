"""Tests of common training questions, each answered by "fits" or "does not fit" with its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import model_from
from tonnage.planner.training.setup import TrainingSetup

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def planner(config: dict) -> Planner:
    return Planner(model_from("scenario", build_architecture(config)))


def read(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


LLAMA_65B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32_000, "hidden_size": 8192,
    "intermediate_size": 22_016, "num_hidden_layers": 80, "num_attention_heads": 64,
    "max_position_embeddings": 2048,
}  # fmt: skip
FALCON_180B = {
    "model_type": "falcon", "architectures": ["FalconForCausalLM"], "vocab_size": 65_024, "hidden_size": 14_848,
    "num_hidden_layers": 80, "num_attention_heads": 232, "num_kv_heads": 8, "new_decoder_architecture": True,
    "alibi": False, "bias": False, "parallel_attn": True,
}  # fmt: skip
GPT_1_4B = {  # Pythia-1.4B's shapes
    "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 50_304,
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16,
    "max_position_embeddings": 2048, "rotary_pct": 0.25, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("convention", "per"), [("zero", 16), ("huggingface", 18)])
def test_1_4b_model_with_adamw_and_ddp_does_not_fit_32_gb(convention, per):
    model = planner(GPT_1_4B)
    setup = TrainingSetup(
        convention=convention, gpus=8, micro_batch=4, device_memory=find_gpu("v100-32g").memory_bytes
    )
    plan = model.plan(setup)
    states = sum(plan.line(name) for name in ("weights", "gradients", "optimizer states"))
    assert plan.parameters == 1_414_647_808
    assert states == per * plan.parameters  # 22.4 to 25.2 GB for a nominal 1.4e9
    assert 22.4e9 <= states * 1.4e9 / plan.parameters <= 25.2e9
    assert plan.fits is False
    assert "more than the GPU's 31.73 GiB" in plan.reasons[0]
    assert f"{plan.total():,} bytes" in plan.reasons[0]


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_falcon_40b_zero1_needs_over_1_5_tb_cpu_memory_to_start(strategy):
    setup = TrainingSetup(strategy=strategy, gpus=8, cpu_memory=15 * 10**11)
    plan = planner(read("tiiuae__falcon-40b")).plan(setup)
    assert plan.cpu_init_bytes == 41_303_293_952 * 4 * 8 * 3 // 2 > 15 * 10**11
    assert plan.fits is False
    assert "while the model is built" in plan.reasons[0]
    stage3 = TrainingSetup(strategy="zero3", gpus=8, cpu_memory=15 * 10**11)
    assert planner(read("tiiuae__falcon-40b")).plan(stage3).cpu_init_bytes == 0


def test_65b_model_with_qlora_fits_one_48_gb_gpu():
    setup = TrainingSetup(
        method="qlora", checkpointing="full", optimizer="paged-adamw-8bit", sequence_length=512,
        device_memory=find_gpu("a6000").memory_bytes,
    )  # fmt: skip
    plan = planner(LLAMA_65B).plan(setup)
    assert plan.parameters == 65_285_660_672
    assert plan.fits is True
    assert 33e9 < plan.line("frozen weights") < 36e9


def test_falcon_180b_with_lora_and_zero3_fits_8_a100():
    setup = TrainingSetup(
        method="lora", strategy="zero3", gpus=8, checkpointing="full",
        device_memory=find_gpu("a100-80g").memory_bytes,
    )  # fmt: skip
    plan = planner(FALCON_180B).plan(setup)
    # the checkpoint's 179,522,565,120 counts the tied head twice
    assert plan.parameters + 65_024 * 14_848 == 179_522_565_120
    assert plan.fits is True
    full = planner(FALCON_180B).plan(
        TrainingSetup(
            strategy="zero3", gpus=8, checkpointing="full", device_memory=find_gpu("a100-80g").memory_bytes
        )
    )
    assert full.fits is False


def test_8b_model_fits_8_a100_with_zero3_but_not_ddp():
    model = planner(read("meta-llama__Meta-Llama-3.1-8B"))
    memory = find_gpu("a100-80g").memory_bytes
    assert model.plan(TrainingSetup(strategy="zero3", gpus=8, device_memory=memory)).fits is True
    assert model.plan(TrainingSetup(strategy="ddp", gpus=8, device_memory=memory)).fits is False


def test_training_plan_without_device_memory_has_no_verdict():
    assert planner(GPT_1_4B).plan(TrainingSetup()).fits is None
