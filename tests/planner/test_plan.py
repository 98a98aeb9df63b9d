"""Tests of the Plan: JSON contract, whether it fits, plan id, and terms that add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from components import check_components

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.host import host_memory
from tonnage.planner.engines.runtime.api import API_LIMIT_BYTES
from tonnage.planner.engines.runtime.grammars import GRAMMAR_LIMIT_BYTES
from tonnage.planner.output.json import plan_to_dict
from tonnage.planner.output.terminal import plain_lines
from tonnage.planner.planning.build import make_plan

GIB = 1 << 30
MIB = 1 << 20
FLAGS = Deployment(device_memory=16 * GIB, kv_cache_memory_bytes=512 * MIB)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    """Use the packaged demo config, whatever the machine's cache holds."""
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "cache"))


def test_plan_as_json_has_the_documented_keys():
    out = json.loads(json.dumps(plan_to_dict(make_plan("demo", FLAGS)), allow_nan=False))
    assert set(out) >= {
        "schema_version", "plan_id", "revision", "model", "deployment", "ranks", "worst_rank", "kv_cache",
        "fits", "reasons", "intervals",
    }  # fmt: skip
    assert (out["schema_version"], out["revision"], out["worst_rank"]) == (1, 0, 0)
    assert set(out["model"]) >= {"id", "architecture", "parameters", "attention", "via"}
    assert out["model"]["parameters"] == 134_515_008
    assert (out["model"]["attention"], out["model"]["via"]) == ("GQA", "adapter")
    (rank,) = out["ranks"]
    parts = ("weights_bytes", "kv_pool_bytes", "activation_bytes", "cuda_graph_bytes", "framework_bytes")
    parts += ("lora_bytes", "draft_bytes", "kv_tier_bytes")
    assert set(rank) >= {*parts, "free_bytes", "total_bytes"}
    assert all(type(value) is int for value in rank.values())
    assert sum(rank[part] for part in parts) + rank["free_bytes"] == rank["total_bytes"]
    cache = out["kv_cache"]
    assert set(cache) >= {
        "bytes_per_token", "bytes_per_sequence", "usable_blocks", "num_blocks", "tokens", "max_concurrency",
        "groups",
    }  # fmt: skip
    assert cache["bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert cache["num_blocks"] == 512 * MIB // (16 * cache["bytes_per_token"])
    assert cache["usable_blocks"] == cache["num_blocks"] - 1
    assert cache["tokens"] == cache["usable_blocks"] * 16
    assert rank["kv_pool_bytes"] == cache["num_blocks"] * cache["groups"][0]["bytes_per_block"] <= 512 * MIB
    assert set(cache["groups"][0]) >= {"kind", "layers", "block_size", "bytes_per_block"}
    for low, high in out["intervals"].values():
        assert low <= high
    for name in ("framework_bytes", "activation_bytes"):
        low, high = out["intervals"][name]
        assert low <= rank[name] <= high
    assert out["deployment"]["max_model_len"] == 8192
    optional = {
        "quantization", "gpu", "calibration", "num_gpu_blocks_override", "speculative_model", "num_gpus",
            "mem_fraction_static", "n_gpu_layers",
            "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cuda_graph_sizes",
                "hicache_ratio", "hicache_size", "hicache_storage_backend", "kv_offloading_disk",
    }  # fmt: skip
    assert None not in {v for k, v in out["deployment"].items() if k not in optional}


ON_GPU = {"engine": "vllm", "gpu": "h100", "max_model_len": 4096}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("meta-llama/Meta-Llama-3.1-8B", {"engine": "hf", "device_memory": 64 * GIB}),
        ("meta-llama/Meta-Llama-3.1-8B", ON_GPU),
        ("meta-llama/Meta-Llama-3.1-8B", ON_GPU | {"enable_lora": True, "max_loras": 4}),
        ("meta-llama/Meta-Llama-3.1-8B", ON_GPU | {"speculative_model": "DRAFT", "num_speculative_tokens": 4}),
        ("meta-llama/Meta-Llama-3.1-8B",
         ON_GPU | {"speculative_model": "DRAFT", "enable_lora": True, "tensor_parallel_size": 2}),
        ("meta-llama/Meta-Llama-3.1-8B", ON_GPU | {"cpu_offload_bytes": 4 * GIB}),
        ("meta-llama/Meta-Llama-3.1-8B", ON_GPU | {"quantization": "fp8"}),
        ("meta-llama/Meta-Llama-3.1-8B", ON_GPU | {"pipeline_parallel_size": 3, "enable_lora": True}),
        ("meta-llama/Meta-Llama-3.1-8B", ON_GPU | {"engine": "sglang"}),
        ("meta-llama/Meta-Llama-3.1-8B", ON_GPU | {"engine": "llama.cpp", "max_num_seqs": 1}),
        ("openai/gpt-oss-20b", ON_GPU),
        ("openai/gpt-oss-120b", ON_GPU | {"gpu": "t4"}),  # does not fit: free is negative
        ("deepseek-ai/DeepSeek-V3", ON_GPU | {"tensor_parallel_size": 8, "gpu": "h200"}),
        ("BAAI/bge-large-en", ON_GPU | {"max_model_len": 512}),
    ],
)  # fmt: skip
def test_rank_components_add_up_to_device_memory(name, flags, config_of, tmp_path):
    for folder, model in (("model", name), ("draft", "meta-llama/Llama-3.2-1B")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config_of(model)))
    if "speculative_model" in flags:
        flags = flags | {"speculative_model": str(tmp_path / "draft")}
    plan = make_plan(str(tmp_path / "model"), Deployment(**flags))
    assert (plan.rank.lora_bytes > 0) == plan.deployment.enable_lora
    assert (plan.rank.draft_bytes > 0) == (plan.deployment.speculative_model is not None)
    for rank in plan.ranks:
        check_components({**rank.components, "free": rank.free_bytes}, rank)


def test_plan_of_a_hybrid_model_has_no_single_figure_of_bytes_per_token(config_of, folder_with):
    plan = plan_to_dict(make_plan(folder_with(config_of("google/gemma-2-2b")), FLAGS))
    assert plan["kv_cache"]["bytes_per_token"] is None
    assert [g["kind"] for g in plan["kv_cache"]["groups"]] == ["sliding", "full"]
    assert plan["kv_cache"]["groups"][0]["window"] == 4096


def test_weight_terms_add_up_to_weight_bytes():
    for scheme in (None, "int8", "nf4", "nf4-double", "gptq"):
        plan = make_plan("demo", replace(FLAGS, quantization=scheme))
        terms = [term for term in plan.terms if term.name.startswith("weights.")]
        assert sum(term.value for term in terms) == plan.rank.weights_bytes
        assert all(term.formula and term.source for term in plan.terms)


def test_gptq_matrix_is_planned_as_qweight_qzeros_scales_and_g_idx():
    """With 4 bits and group size 128, a matrix has qweight, qzeros, scales and g_idx."""
    from tonnage.planner.model.tensor import TensorSpec
    from tonnage.planner.quantization.formats.gptq import GPTQ
    from tonnage.planner.quantization.linear import LinearFormat
    from tonnage.planner.quantization.read import quantized_to

    tensor = TensorSpec("m.weight", (576, 1536), "mlp", "Linear")
    assert quantized_to("gptq").parts(tensor) == {
        "qweight": 1536 * 576 // 2, "qzeros": 12 * 576 // 2, "scales": 12 * 576 * 2, "g_idx": 1536 * 4,
    }  # fmt: skip
    assert LinearFormat(GPTQ, group_size=-1).parts(576, 1536)["scales"] == 576 * 2
    assert LinearFormat(GPTQ, bits=3).parts(576, 1536)["qweight"] == 1536 * 3 // 32 * 576 * 4
    assert LinearFormat(GPTQ, bits=8).parts(576, 1536)["qweight"] == 1536 * 576


def test_plan_id_is_stable_and_changes_with_every_input():
    first = make_plan("demo", FLAGS)
    assert first == make_plan("demo", FLAGS)
    assert len(first.plan_id) == 16
    changes = (
        {"max_model_len": 4096}, {"dtype": "float32"}, {"quantization": "int8"}, {"block_size": 32},
        {"kv_cache_memory_bytes": GIB}, {"engine": "vllm"}, {"device_memory": 8 * GIB},
        {"enable_prefix_caching": False},
    )  # fmt: skip
    ids = {make_plan("demo", replace(FLAGS, **change)).plan_id for change in changes}
    assert len(ids | {first.plan_id}) == len(changes) + 1


def test_planning_again_from_the_resolved_settings_gives_the_same_plan_id():
    plan = make_plan("demo", FLAGS)
    assert make_plan("demo", plan.deployment).plan_id == plan.plan_id


def test_plan_with_weights_larger_than_memory_does_not_fit():
    plan = make_plan("demo", replace(FLAGS, device_memory=200 * MIB))
    assert not plan.fits
    assert "the weights alone take 256.6 MiB (269,030,272 bytes) of 200.0 MiB" in plan.reasons[0]
    assert plan.rank.free_bytes < 0


def test_plan_without_memory_left_for_the_kv_pool_does_not_fit():
    plan = make_plan("demo", Deployment(device_memory=600 * MIB))
    assert not plan.fits
    assert "nothing is left for the KV cache" in plan.reasons[0]
    assert plan.kv_cache.num_blocks == 0


def test_error_for_a_too_large_kv_pool_names_the_largest_that_fits():
    plan = make_plan("demo", replace(FLAGS, kv_cache_memory_bytes=16 * GIB))
    assert not plan.fits
    largest = int(plan.reasons[0].rpartition(" ")[2])
    assert make_plan("demo", replace(FLAGS, kv_cache_memory_bytes=largest)).fits
    block = plan.kv_cache.layout.bytes_per_block
    assert not make_plan("demo", replace(FLAGS, kv_cache_memory_bytes=largest + block)).fits


def test_error_for_a_pool_below_one_sequence_names_the_largest_length_that_fits():
    flags = replace(FLAGS, kv_cache_memory_bytes=64 * MIB)
    plan = make_plan("demo", flags)
    assert not plan.fits
    largest = int(plan.reasons[0].rpartition(" ")[2])
    assert make_plan("demo", replace(flags, max_model_len=largest)).fits
    assert not make_plan("demo", replace(flags, max_model_len=largest + 1)).fits


def test_default_kv_pool_is_no_larger_than_max_num_seqs_full_sequences():
    plan = make_plan("demo", Deployment(device_memory=1 << 40, max_num_seqs=3, max_model_len=1000))
    assert plan.kv_cache.usable_blocks == 3 * 63
    assert plan.kv_cache.max_concurrency == 3.0
    tight = make_plan("demo", Deployment(device_memory=2 * GIB))
    assert (
        tight.rank.used_bytes <= 0.9 * 2 * GIB < tight.rank.used_bytes + tight.kv_cache.layout.bytes_per_block
    )


def test_only_vllm_plans_have_cuda_graph_memory():
    flags = Deployment(device="cuda", device_memory=80 * GIB)
    assert make_plan("demo", flags).rank.cuda_graph_bytes == 0
    assert make_plan("demo", replace(flags, engine="vllm")).rank.cuda_graph_bytes > 0


def test_host_memory_is_limited_by_the_tightest_cgroup(tmp_path: Path):
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("123456789\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    assert host_memory(tmp_path, own) == 123_456_789
    (tmp_path / "a" / "b" / "memory.max").write_text("1000\n")
    assert host_memory(tmp_path, own) == 1000
    assert host_memory(tmp_path / "none", tmp_path / "none") > 1 << 26


def test_explain_output_contains_every_memory_term():
    plan = make_plan("demo", FLAGS)
    text = "\n".join(plain_lines(plan, explain=True))
    assert all(term.name in text and term.formula in text for term in plan.terms)
    assert "269,030,272 bytes" in text
    assert "Fits." in text


def test_vllm_cpu_process_memory_matches_measurement(config_of, folder_with):
    """RssAnon under load, less weights and pool, in MiB (benchmarks/memory_terms.py, 2026-11-22).

    The plan's allowance for large bodies and many grammars is excluded. The measured memory grows with the
    vocabulary.
    """
    shapes = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4}
    gemma = config_of("google/gemma-3-1b-it") | shapes  # 3-270M's
    asked = replace(FLAGS, engine="vllm", max_model_len=4096)
    for model, measured in (("demo", 1708), (folder_with(gemma), 3134)):
        rank = make_plan(model, asked).rank
        kept_free = API_LIMIT_BYTES + GRAMMAR_LIMIT_BYTES
        planned = (rank.framework_bytes + rank.activation_bytes - kept_free) / MIB
        assert measured / 1.03 <= planned <= measured * 1.1
