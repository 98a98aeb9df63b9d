"""Tests of the bytes that vLLM adds to a checkpoint's weights while loading them, by GPU and release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import GiB, MiB

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def plan_of(model, change=None, **flags):
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    if change is not None:
        change(config)
    return plan_source(
        ModelSource(model, model, config, "folder"), Deployment(engine="vllm", max_model_len=8192, **flags)
    )


@pytest.mark.parametrize(
    ("version", "gpu", "printed"),
    [
        ("0.12.0", "rtx5090", 13.7194),
        ("0.12.0", "a100-40g", 13.7025),
        ("0.13.0", "gb10", 13.7193),
        ("0.19.0", "a100-80g", 13.72),
    ],
)
def test_planned_weights_of_mxfp4_experts_equal_start_up_logs_with_marlin_kernels(version, gpu, printed):
    """Logs of gpt-oss-20b in public repositories; of a 5090 and a GB10, 13.44 GiB were planned before."""
    planned = plan_of("openai__gpt-oss-20b", engine_version=version, gpu=gpu).rank.weights_bytes / GiB
    assert planned == pytest.approx(printed, rel=0.002)


def test_mxfp4_experts_are_padded_to_tensorrt_llm_tile_sizes_on_b200():
    """mxfp4_round_up_hidden_size_and_intermediate_size of 0.20.1 (256) and 0.30.0 (128)."""

    def experts(version):
        plan = plan_of("openai__gpt-oss-20b", engine_version=version, gpu="b200-180g")
        return sum(term.value for term in plan.terms if "padding" in term.name)

    values = 24 * 32 * 3 * 2880 * 2880 * 4.25 / 8  # layers, experts, matrices, 4 bits and scales
    assert experts("0.29.0") == int(values * (3072 / 2880 * 3072 / 2880 - 1))
    assert experts("0.30.0") == int(values * (3072 / 2880 * 2944 / 2880 - 1))


def test_sparse_attention_indexer_adds_index_buffers_and_16_bit_key_projections():
    """GLM-5.1-FP8: 78 indexers of 128 x 6,144, and 2,048 indices of 4 bytes per token of a step."""

    def weights(version, tokens):
        return plan_of(
            "zai-org__GLM-5.1-FP8", engine_version=version, gpu="h200-141g", tensor_parallel_size=8,
            max_num_batched_tokens=tokens,
        )  # fmt: skip

    small, large = weights("0.19.0", 2048), weights("0.19.0", 8192)
    assert large.rank.weights_bytes - small.rank.weights_bytes == 4 * 2048 * (8192 - 2048)
    newer = weights("0.20.1", 8192)
    (key,) = [term for term in newer.terms if term.name.endswith("indexer.wk.weight")]
    assert key.value == 78 * 128 * 6144 * 2
    grown = newer.rank.weights_bytes - large.rank.weights_bytes
    assert grown == pytest.approx(78 * 128 * 6144, abs=32 * MiB)


def unquantized(config):
    config.pop("quantization_config", None)


@pytest.mark.parametrize(
    ("quantization", "printed", "share"),
    [("fp8", 31.47, 0.0005), (None, 58.99, 0.002)],
)
def test_planned_weights_of_gemma_4_31b_equal_start_up_logs(quantization, printed, share):
    """Logs of google/gemma-4-31B-it in public repositories; 30.73 and 58.58 GiB were planned before.

    vLLM leaves the tower in 16 bits, loads the keys of full layers as values too, and pads their rotary table.
    """
    plan = plan_of(
        "nvidia__Gemma-4-31B-IT-NVFP4", unquantized, engine_version="0.20.1", gpu="h200-141g",
        quantization=quantization,
    )  # fmt: skip
    assert plan.rank.weights_bytes / GiB == pytest.approx(printed, rel=share)


def test_vllm_0_23_quantizes_the_gemma_4_vision_tower_if_its_widths_are_multiples_of_64():
    """recursive_replace_linear in gemma4_mm.py of 0.23.0, not in 0.22.1; 4,304 is no multiple of 64."""

    def tower(version, inner):
        def change(config):
            unquantized(config)
            config["vision_config"]["intermediate_size"] = inner

        plan = plan_of(
            "nvidia__Gemma-4-31B-IT-NVFP4", change, engine_version=version, gpu="h200-141g", quantization="fp8"
        )
        return next(
            term.formula for term in plan.terms if "vision_tower" in term.name and "mlp.up" in term.name
        )

    assert "fp8" not in tower("0.22.1", 4352)
    assert "fp8" not in tower("0.23.0", 4304)
    assert "fp8" in tower("0.23.0", 4352)


@pytest.mark.parametrize(
    ("model", "part", "quantized"),
    [
        ("Qwen__Qwen3-VL-8B-Instruct", "visual", True),
        ("meta-llama__Llama-4-Scout-17B-16E-Instruct", "vision_model", False),
    ],
)
def test_vision_tower_is_quantized_only_if_its_vllm_class_passes_the_quant_config_on(model, part, quantized):
    """qwen3_vl.py passes quant_config to the tower, mllama4.py does not."""
    plan = plan_of(
        model, unquantized, engine_version="0.30.0", gpu="b300-288g", quantization="fp8", dtype="bfloat16"
    )
    matrices = [term for term in plan.terms if part in term.name and term.name.endswith(".weight")]
    towers = [term for term in matrices if ".mlp." in term.name]
    assert towers
    assert all(("fp8" in term.formula) == quantized for term in towers)
