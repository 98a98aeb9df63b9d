"""Tests of quantization formats: worked numbers, published totals, exclusion rules and rejections."""

from __future__ import annotations

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import ConfigError, DeploymentError, TonnageError, UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.folder import modules_in
from tonnage.planner.planning.build import make_plan
from tonnage.planner.planning.checkpoint import checkpoint_size
from tonnage.planner.quantization.formats.bitsandbytes import FOUR_BITS, INT8
from tonnage.planner.quantization.formats.compressed_tensors import PACKED
from tonnage.planner.quantization.formats.fp8 import FP8
from tonnage.planner.quantization.formats.gptq import AWQ, GPTQ
from tonnage.planner.quantization.formats.hqq import HQQ
from tonnage.planner.quantization.formats.microscaling import MXFP4, MXFP8
from tonnage.planner.quantization.formats.modelopt import NVFP4
from tonnage.planner.quantization.linear import LinearFormat
from tonnage.planner.quantization.read import flag_formats, read_quantization
from tonnage.planner.quantization.rules import compile_patterns

N = 4096 * 14336


@pytest.mark.parametrize(
    ("made", "total"),
    [
        (LinearFormat(INT8), N + 4 * 14336),
        (LinearFormat(FOUR_BITS), N // 2 + 64 + 4 * N // 64),
        (LinearFormat(FOUR_BITS, double=True), N // 2 + 64 + N // 64 + 4 * N // 64 // 256 + 1024 + 4),
        (LinearFormat(GPTQ), N // 2 + 32 * 14336 // 2 + 32 * 14336 * 2 + 4096 * 4),
        (LinearFormat(AWQ), N // 2 + 32 * 14336 // 2 + 32 * 14336 * 2),
        (LinearFormat(FP8), N + 4),
        (LinearFormat(FP8, input_scale=True), N + 8),
        (LinearFormat(FP8, block=(1, 0)), N + 4 * 14336),
        (LinearFormat(FP8, block=(128, 128)), N + 4 * 112 * 32),
        (LinearFormat(PACKED, scale_bytes=2, zero_points=False), N // 2 + 2 * N // 128 + 16),
        (LinearFormat(MXFP4), N // 2 + N // 32),
        (LinearFormat(NVFP4, input_scale=True), N // 2 + N // 16 + 8),
        (LinearFormat(MXFP8), N + N // 32),
        (LinearFormat(HQQ, group_size=64), N // 2 + 4 * N // 64),
    ],
)
def test_quantized_matrix_has_the_expected_bytes_in_each_format(made, total):
    assert sum(made.parts(14336, 4096).values()) == total


def test_each_quantization_flag_is_in_one_format_module():
    modules = list(modules_in("tonnage.planner.quantization.formats", ()))
    assert all(module.READERS and isinstance(module.FLAGS, dict) for module in modules)
    assert sum(len(module.FLAGS) for module in modules) == len(flag_formats())
    for scheme in flag_formats():
        assert read_quantization({}, scheme).scheme == scheme


def test_fp4_is_stored_like_nf4(folder_with, tiny_llama):
    for scheme in ("nf4", "fp4", "fp4-double"):
        plan = make_plan(folder_with(tiny_llama), Deployment(device_memory=1 << 34, quantization=scheme))
        assert {made.dtype for made in plan.weight_formats if made.quantization == scheme} == {"uint8"}


def test_gpt_oss_20b_checkpoint_is_13_761_264_768_bytes(config_of):
    """The published file has experts at 4 + 8/32 bits and the rest in bf16."""
    config = config_of("openai/gpt-oss-20b")
    size = checkpoint_size(build_architecture(config), read_quantization(config, None), config, "bfloat16")
    assert (size.low, size.high) == (13_761_264_768, 13_761_264_768)


def test_awq_keeps_embedding_and_lm_head_in_16_bits(config_of):
    """Llama-3.1-8B takes 5.73 GB by AWQ; 4.25 bits for every tensor would be 4.53."""
    config = config_of("meta-llama/Meta-Llama-3.1-8B") | {
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    }
    size = checkpoint_size(build_architecture(config), read_quantization(config, None), config, "float16")
    assert round(size.low / 1e9, 2) == 5.73


@pytest.mark.parametrize(
    ("patterns", "module", "matches"),
    [
        (["lm_head"], "lm_head", True),
        (["gate"], "model.layers.3.mlp.gate", True),
        (["gate"], "model.layers.3.mlp.gate_proj", False),
        (["model.layers.1.mlp"], "model.layers.1.mlp.down_proj", True),
        (["model.layers.1.mlp"], "model.layers.10.mlp.down_proj", False),
        (["model.layers.0*"], "model.language_model.layers.0.mlp.up_proj", True),
        (["language_model.model.layers.2.self_attn*"], "model.language_model.layers.2.self_attn.q_proj", True),
        (["re:.*\\.self_attn\\.q_proj$"], "model.layers.7.self_attn.q_proj", True),
        (["re:.*\\.self_attn\\.q_proj$"], "model.layers.7.self_attn.k_proj", False),
        (["*.mlp.shared_expert.*"], "model.language_model.layers.0.mlp.shared_expert.up_proj", True),
        (["backbone.layers.4.mixer.in_proj"], "model.layers.4.mixer.in_proj", True),
        (["model.layers.0.block_sparse_moe.gate"], "model.layers.0.mlp.gate", True),
        (["model.layers.*.self_attn"], "model.layers.11.self_attn.o_proj", True),
    ],
)
def test_quantization_exclusion_patterns_match_modules(patterns, module, matches):
    assert compile_patterns(patterns, "f").match(module) is matches


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:(.*)*", "re:[", "a b"])
def test_exclusion_patterns_with_unbounded_backtracking_are_rejected(pattern):
    with pytest.raises(UnsupportedArchitecture):
        compile_patterns([pattern], "quantization_config.ignore")


def test_nvfp4_experts_have_scales_per_expert(config_of):
    config = config_of("nvidia/Qwen3.5-122B-A10B-NVFP4")
    architecture, quantization = build_architecture(config), read_quantization(config, None)
    expert = next(t for t in architecture.tensors if t.name.endswith("experts.gate_up_proj"))
    count, rows, hidden = expert.shape
    each = rows // 2 * hidden
    assert quantization.bytes_after_load(expert, "bfloat16") == 2 * count * (each // 2 + each // 16 + 8)
    attention = next(t for t in architecture.tensors if t.name.endswith("linear_attn.out_proj.weight"))
    assert not quantization.converts(attention)  # in the file's own ignore list


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"quant_method": "quip"}, UnsupportedArchitecture),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ConfigError),
        ({"quant_method": "fp8", "activation_scheme": "often"}, UnsupportedArchitecture),
        ({"quant_method": "awq", "bits": 3}, ConfigError),
        ({"quant_method": "awq", "bits": 4, "version": "exllama"}, UnsupportedArchitecture),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up.*": {"bits": 8}}}, UnsupportedArchitecture),
        ({"quant_method": "compressed-tensors"}, ConfigError),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 2}}}},
            UnsupportedArchitecture,
        ),
        ({"quant_method": "modelopt", "quant_algo": "INT3"}, UnsupportedArchitecture),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ConfigError),
        ({"quant_method": "torchao", "quant_type": "int2"}, UnsupportedArchitecture),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, ConfigError),
    ],
)  # fmt: skip
def test_unsupported_quantization_config_is_named_in_error(change, error, tiny_llama):
    with pytest.raises(error) as caught:
        read_quantization({**tiny_llama, "quantization_config": change}, None)
    assert caught.value.field.startswith("quantization_config")


def test_every_published_quantization_config_is_read(config_of):
    """All real configs are read; the two that mix unsupported formats are named."""
    from pathlib import Path

    folder = Path(__file__).parents[1] / "data" / "configs"
    read, refused = 0, []
    for path in sorted(folder.glob("*__*.json")):
        config = config_of(path.stem) if ".quant" not in path.name else {}
        if not config.get("quantization_config") or config["model_type"] == "kimi_k3":
            continue
        try:
            quantization = read_quantization(config, None)
            architecture = build_architecture(config)
        except TonnageError:
            refused.append(path.stem)
            continue
        size = checkpoint_size(architecture, quantization, config, "bfloat16")
        assert 0.45 * architecture.parameters < size.low < 2.1 * architecture.parameters
        read += 1
    assert read >= 40
    assert refused == ["RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8"]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("bitsandbytes", "nf4"), ("fp8_per_tensor", "fp8"), ("fp8_per_channel", "fp8-channel"),
        ("fp8_per_block", "fp8-block"), ("awq_marlin", "awq"), ("gptq_marlin", "gptq"),
        ("modelopt_fp4", "nvfp4"),
    ],
)  # fmt: skip
def test_vllm_quantization_name_selects_a_format_for_16_bit_checkpoints(name, scheme):
    assert read_quantization({}, name).scheme == scheme


@pytest.mark.parametrize("name", ["compressed-tensors", "modelopt", "modelopt_mixed", "moe_wna16"])
def test_quantization_flag_that_names_a_quantization_tool_needs_a_quantized_checkpoint(name):
    with pytest.raises(DeploymentError, match=f"{name} names the tool of a quantized checkpoint"):
        read_quantization({}, name)


GPTQ_FILE = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ_FILE = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NVFP4_FILE = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("name", "stored", "fits"),
    [
        ("gptq_marlin", GPTQ_FILE, True), ("auto_gptq", GPTQ_FILE, True), ("moe_wna16", GPTQ_FILE, True),
        ("awq_marlin", GPTQ_FILE, False), ("awq_marlin", AWQ_FILE, True), ("fp8_per_channel", AWQ_FILE, False),
        ("modelopt_fp4", NVFP4_FILE, True), ("modelopt", NVFP4_FILE, True), ("fp4", NVFP4_FILE, True),
        ("fp4", GPTQ_FILE, False), ("compressed-tensors", NVFP4_FILE, False),
    ],
)  # fmt: skip
def test_quantization_flag_that_names_a_quantization_tool_is_accepted_only_for_checkpoints_of_that_tool(
    name, stored, fits
):
    if fits:
        assert read_quantization({"quantization_config": stored}, name).method == stored["quant_method"]
        return
    with pytest.raises(DeploymentError, match=f"{name} contradicts the checkpoint"):
        read_quantization({"quantization_config": stored}, name)


@pytest.mark.parametrize(
    ("name", "version", "known"),
    [
        ("bitsandbytes", "0.27.1", True), ("bitsandbytes", "0.28.0", False), ("fp8_per_block", "0.19.1", False),
        ("fp8_per_block", "0.20.2", True), ("awq_marlin", "0.8.5", True), ("ptpc_fp8", "0.19.1", False),
    ],
)  # fmt: skip
def test_quantization_name_that_the_vllm_version_lacks_is_rejected(name, version, known):
    flags = Deployment(
        engine="vllm", engine_version=version, gpu="h100-80g", max_model_len=512, quantization=name
    )
    if known:
        assert make_plan("demo", flags).deployment.quantization != name
        return
    with pytest.raises(DeploymentError, match=f"vLLM {version} has no {name}"):
        make_plan("demo", flags)
