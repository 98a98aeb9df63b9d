"""Tests of llama.cpp plans against ``llama-fit-params --fit-print`` and against contexts of its library.

The tool prints the host memory of model, context and compute buffer without loading. Its stored answers are
from the sources in llama-cpp-python 0.3.36, built for CPU only; the compute buffer is from its log (``-lv 5``),
to 0.01 MiB. The contexts are llama.cpp 0.5.0's (npm @node-llama-cpp/linux-x64 3.22.1), of generated files with
zero F16 weights.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from demo_file import demo_gguf

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.tensor import HeaderTensor
from tonnage.planner.planning.advice import serve_lines
from tonnage.planner.planning.build import make_plan, plan_source
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import MiB

DATA = Path(__file__).parent.parent / "data"
ROUNDED = MiB / 200  # the log's last digit


# (context of all sequences, sequences, ubatch, cache type) -> MiB of model, context (rounded down) and compute
SAID = {
    (512, 1, 512, "f16"): (92, 11, 98.25),
    (1024, 1, 512, "f16"): (92, 22, 98.25),
    (4096, 1, 512, "f16"): (92, 90, 98.25),
    (8192, 1, 512, "f16"): (92, 180, 98.25),
    (8192, 1, 128, "f16"): (92, 180, 24.56),
    (8192, 1, 32, "f16"): (92, 180, 6.14),
    (8192, 4, 512, "f16"): (92, 180, 102.51),
    (8192, 1, 512, "q8_0"): (92, 95, 99.38),
}


@pytest.mark.parametrize("case", SAID, ids=str)
def test_llama_cpp_plan_equals_the_output_of_llama_fit_params(case: tuple[int, int, int, str]) -> None:
    context, sequences, ubatch, kind = case
    model, cache, compute = SAID[case]
    flags = Deployment(
        engine="llama.cpp", device="cpu", device_memory=1 << 35, max_model_len=context // sequences,
        max_num_seqs=sequences, max_num_batched_tokens=ubatch, kv_cache_dtype=kind,
    )  # fmt: skip
    plan = make_plan(str(demo_gguf()), flags)
    assert plan.rank.weights_bytes // MiB == model
    assert plan.rank.kv_pool_bytes // MiB == cache
    planned = next(term for term in plan.terms if term.name == "activation_bytes").value
    if sequences == 1 and kind == "f16":
        assert abs(planned / MiB - compute) < 0.01
    low, high = plan.intervals["activation_bytes"]
    assert low - ROUNDED <= compute * MiB <= high + ROUNDED


# Generated files of three layers: (hidden, inner, vocabulary, heads, KV heads), context -> MiB
MADE = {
    ((256, 4096, 512, 4, 4), 512): 26.51,
    ((256, 4096, 512, 4, 4), 8192): 34.01,
    ((256, 1024, 3000, 4, 2), 512): 8.51,
    ((256, 1024, 3000, 4, 2), 8192): 16.01,
    ((1024, 512, 512, 16, 16), 8192): 21.01,
}


@pytest.mark.parametrize("case", MADE, ids=str)
def test_planned_compute_buffer_of_a_model_with_a_large_mlp_equals_llama_cpp(
    case, folder_with, tiny_llama
) -> None:
    (hidden, inner, vocab, heads, kv_heads), context = case
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": 3,
             "num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "max_position_embeddings": 8192}  # fmt: skip
    flags = Deployment(engine="llama.cpp", device="cpu", device_memory=1 << 35, max_model_len=context)
    plan = make_plan(folder_with({**tiny_llama, **sizes}), flags)
    low, high = plan.intervals["activation_bytes"]
    assert low - ROUNDED <= MADE[case] * MiB <= high + ROUNDED
    if inner > hidden:  # else attention is the widest, which only the interval covers
        planned = next(term for term in plan.terms if term.name == "activation_bytes").value
        assert abs(planned / MiB - MADE[case]) < 0.01


# Generated files: (family, hidden, inner, heads, KV heads, head size, experts, of a token), cells, flash
# attention -> MiB with logits of one token, as llama-server reserves them
SERVED = {
    (("llama", 1024, 256, 16, 4, 64, 0, 0), 8192, "on"): 18.01,
    (("llama", 1024, 256, 16, 4, 64, 0, 0), 2048, "on"): 12.01,
    (("llama", 1024, 256, 16, 4, 64, 0, 0), 8192, "off"): 283.01,
    (("llama", 512, 256, 4, 2, 192, 0, 0), 8192, "on"): 14.01,
    (("llama", 512, 256, 4, 2, 192, 0, 0), 8192, "off"): 88.51,
    (("llama", 1024, 512, 16, 16, 64, 0, 0), 8192, "on"): 21.01,
    (("llama", 1024, 512, 16, 16, 64, 0, 0), 8192, "off"): 286.01,
    (("qwen3", 512, 256, 4, 2, 192, 0, 0), 8192, "on"): 14.01,
    (("qwen3", 512, 2048, 4, 2, 192, 0, 0), 8192, "on"): 24.51,
    (("qwen3_moe", 512, 384, 4, 2, 128, 16, 4), 8192, "on"): 21.01,
    (("qwen3_moe", 512, 384, 4, 2, 128, 16, 4), 8192, "off"): 86.01,
    (("qwen3_moe", 1024, 256, 4, 2, 128, 16, 8), 8192, "on"): 43.01,
    (("qwen3_moe", 1024, 128, 4, 2, 128, 16, 8), 8192, "on"): 31.01,
    (("qwen3_moe", 2048, 128, 4, 2, 64, 16, 8), 8192, "on"): 52.51,
}


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_planned_llama_cpp_compute_buffer_follows_the_widest_tensor_of_a_layer(case) -> None:
    (family, hidden, inner, heads, kv_heads, head, experts, chosen), cells, flash = case
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[
        family
    ]
    config = {
        "model_type": family, "architectures": [name], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head,
        "vocab_size": 512, "max_position_embeddings": 8192, "torch_dtype": "float16",
    }  # fmt: skip
    if experts:
        config |= {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}
    flags = Deployment(
        engine="llama.cpp", device="cpu", device_memory=1 << 35, max_model_len=cells, flash_attn=flash
    )
    plan = plan_source(ModelSource("it", "it", config, "folder"), flags)
    said, (low, high) = SERVED[case] * MiB, plan.intervals["activation_bytes"]
    assert low - ROUNDED <= said <= high + ROUNDED
    low += 512 * hidden * 4  # older releases hold one residual less
    assert abs(low - said) <= 0.1 * said + ROUNDED  # below it only without flash attention


# Two dense layers of DeepSeek-V3: (hidden, inner, heads, latent, rotated, plain, value), flash attention
LATENT = {
    ((2048, 1024, 32, 512, 64, 128, 128), "on"): 105.01,
    ((2048, 1024, 32, 512, 64, 128, 128), "off"): 625.01,
    ((1024, 256, 16, 256, 64, 64, 128), "on"): 38.51,
    ((1024, 256, 16, 256, 64, 64, 128), "off"): 302.51,
    ((1024, 256, 16, 512, 64, 64, 64), "on"): 54.51,
}


@pytest.mark.parametrize("case", LATENT, ids=str)
def test_planned_compute_buffer_of_mla_queries_equals_llama_cpp(case) -> None:
    (hidden, inner, heads, latent, rotated, plain, value), flash = case
    config = {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 2, "first_k_dense_replace": 2, "vocab_size": 512,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": hidden // 4,
        "kv_lora_rank": latent, "qk_rope_head_dim": rotated, "qk_nope_head_dim": plain, "v_head_dim": value,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 64,
        "n_group": 1, "topk_group": 1, "max_position_embeddings": 8192, "torch_dtype": "float16",
    }  # fmt: skip
    flags = Deployment(engine="llama.cpp", device="cpu", max_model_len=8192, flash_attn=flash)
    plan = plan_source(ModelSource("it", "it", config, "folder"), flags)
    planned = next(term for term in plan.terms if term.name == "activation_bytes").value
    assert abs(planned / (LATENT[case] * MiB) - 1) < 0.02  # without the query's own latent


# Four layers of Qwen3-Next, one of them with attention: (key heads, value heads), sequences
STATES = {
    ((8, 16), 1): 40.54, ((8, 32), 1): 60.15, ((16, 16), 1): 50.15, ((8, 16), 4): 46.39, ((8, 32), 4): 74.57,
}  # fmt: skip


@pytest.mark.parametrize("case", STATES, ids=str)
def test_planned_compute_buffer_of_recurrent_layers_equals_llama_cpp(case) -> None:
    (keys, values), sequences = case
    config = {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "vocab_size": 512, "linear_num_key_heads": keys, "linear_num_value_heads": values,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128, "max_position_embeddings": 8192, "torch_dtype": "float16",
    }  # fmt: skip
    flags = Deployment(
        engine="llama.cpp", device="cpu", max_model_len=8192, max_num_seqs=sequences, kv_unified=True
    )
    plan = plan_source(ModelSource("it", "it", config, "folder"), flags)
    low, high = plan.intervals["activation_bytes"]
    assert low <= STATES[case] * MiB <= high
    if case[0] == (8, 16):  # KV 8 MiB, RS 3.14 each
        assert abs(plan.rank.kv_pool_bytes / MiB - 8 - 3.14 * sequences) < 0.02
    planned = next(term for term in plan.terms if term.name == "activation_bytes").value
    assert 1 <= planned / (STATES[case] * MiB) < 1.2


# Of 8,192 cells in all, with windows of 1,024 in five layers of six: (sequences, one cache) -> MiB of the
# caches and of the compute buffer
WINDOWS = {(1, False): (12 + 11.25, 19.02), (4, False): (12 + 45, 13.02), (4, True): (12 + 33.75, 22.02)}


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_planned_separate_and_unified_kv_caches_equal_llama_cpp(case) -> None:
    (sequences, shared), (cache, compute) = case, WINDOWS[case]
    config = {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 192, "vocab_size": 4000, "max_position_embeddings": 8192, "sliding_window": 1024,
        "sliding_window_pattern": 6, "torch_dtype": "float16",
    }  # fmt: skip
    flags = Deployment(
        engine="llama.cpp", device="cpu", device_memory=1 << 35, max_num_seqs=sequences, kv_unified=shared,
        max_model_len=8192 // (1 if shared else sequences),
    )  # fmt: skip
    plan = plan_source(ModelSource("it", "it", config, "folder"), flags)
    assert abs(plan.rank.kv_pool_bytes - cache * MiB) < 8192
    low, high = plan.intervals["activation_bytes"]
    assert low * 0.95 <= compute * MiB <= high
    assert ("-kvu" in serve_lines(plan)[-1]) is shared
    assert plan.kv_cache.max_concurrency == (1 if shared else sequences)


def test_unified_kv_cache_of_llama_cpp_is_planned_as_shared_by_all_sequences() -> None:
    flags = Deployment(engine="llama.cpp", device="cpu", max_model_len=4096, max_num_seqs=4)
    apart, shared = (make_plan(str(demo_gguf()), replace(flags, kv_unified=each)) for each in (False, True))
    assert apart.rank.kv_pool_bytes == 4 * shared.rank.kv_pool_bytes
    assert [plan.kv_cache.law.floor_blocks for plan in (apart, shared)] == [4096, 1]


def test_llama_cpp_plan_keeps_embedding_in_host_memory(folder_with, tiny_llama) -> None:
    """A log of Llama 8B has 281.81 of its 4,437.80 MiB CPU_Mapped, which is the embedding."""
    folder = folder_with({**tiny_llama, "tie_word_embeddings": False})
    flags = {"engine": "llama.cpp", "max_model_len": 128}
    here, there = (make_plan(folder, Deployment(**flags, **on)) for on in
                   ({"device": "cpu", "device_memory": 1 << 35}, {"gpu": "h100-80g"}))  # fmt: skip
    rows = tiny_llama["vocab_size"] * tiny_llama["hidden_size"]
    assert here.rank.weights_bytes - there.rank.weights_bytes == 2 * rows
    tied = make_plan(
        folder_with({**tiny_llama, "tie_word_embeddings": True}), Deployment(**flags, gpu="h100-80g")
    )
    assert tied.rank.weights_bytes == there.rank.weights_bytes
    assert here.rank.activation_bytes == there.rank.activation_bytes
    low, high = there.intervals["framework_bytes"]
    assert low < 451 * MiB < there.rank.framework_bytes < 541 * MiB < 749 * MiB < high


def test_llama_cpp_plan_of_several_gpus_includes_copies_of_transferred_activations() -> None:
    """Qwen3-30B-A3B on two T4 prints 444.77 MiB on the last GPU.

    The context has 32,768 cells and steps have 512 tokens.
    """
    config = json.loads((DATA / "configs" / "Qwen__Qwen3-30B-A3B.json").read_text())
    flags = Deployment(engine="llama.cpp", gpu="t4-16g", max_model_len=32768, pipeline_parallel_size=2)
    plan = plan_source(ModelSource("it", "it", config, "folder"), flags)
    assert abs(plan.rank.activation_bytes / MiB - 444.77) < 5


@pytest.mark.parametrize(
    ("name", "cells", "gpus", "said"),
    [
        ("Qwen__Qwen2.5-3B", 2048, 1, 12.01),
        ("meta-llama__Meta-Llama-3.1-8B", 1024, 1, 10.01),
        ("Qwen__Qwen3-30B-A3B", 32768, 1, 68.01),
        ("Qwen__Qwen3-30B-A3B", 32768, 2, 260.02),
        ("Qwen__Qwen3.5-35B-A3B", 32768, 2, 264.08),
    ],
)
def test_llama_cpp_plan_counts_the_inputs_of_a_step_in_host_memory(name, cells, gpus, said) -> None:
    """The values are the compute buffers that logs name CUDA_Host."""
    config = json.loads((DATA / "configs" / f"{name}.json").read_text())
    flags = Deployment(engine="llama.cpp", gpu="h200-141g", max_model_len=cells, pipeline_parallel_size=gpus)
    plan = plan_source(ModelSource("it", "it", config, "folder"), flags)
    (part,) = (part for part in plan.host.parts if part.name == "inputs of a step")
    assert part.low <= said * MiB <= part.high
    assert abs(part.value - said * MiB) <= 8.2 * MiB


def test_llama_cpp_plan_with_a_quantized_v_cache_needs_flash_attention() -> None:
    flags = Deployment(
        engine="llama.cpp", device="cpu", flash_attn="off", kv_cache_dtype="q8_0", max_model_len=512
    )
    with pytest.raises(DeploymentError, match="V cache quantization requires flash_attn"):
        make_plan(str(demo_gguf()), flags)
    kept = make_plan(str(demo_gguf()), replace(flags, kv_cache_dtype="q8_0/f16"))
    assert "-fa off" in serve_lines(kept)[-1]


@pytest.mark.parametrize("types", ["f16/f16/f16", "f16/", "/"])
def test_llama_cpp_kv_cache_dtype_with_more_than_two_types_is_rejected(types) -> None:
    with pytest.raises(DeploymentError, match="not a cache type"):
        make_plan(str(demo_gguf()), Deployment(engine="llama.cpp", device="cpu", kv_cache_dtype=types))


def test_planned_process_memory_of_llama_cpp_on_a_cpu_grows_with_the_prompt_cache() -> None:
    """The prompt cache of 8 GiB fills gradually."""
    flags = Deployment(engine="llama.cpp", device="cpu", device_memory=1 << 35, max_model_len=512)
    plan = make_plan(str(demo_gguf()), flags)
    low, high = plan.intervals["framework_bytes"]
    assert low < 32 * MiB < plan.rank.framework_bytes < 64 * MiB
    assert 8192 * MiB < high < 8448 * MiB
    none = make_plan(str(demo_gguf()), replace(flags, cache_ram_bytes=0))
    assert high - none.intervals["framework_bytes"][1] == 8192 * MiB


def test_null_block_is_subtracted_only_for_engines_that_have_one() -> None:
    def pool(engine: str) -> str:
        flags = Deployment(engine=engine, device="cpu", device_memory=1 << 35, max_model_len=512)
        plan = make_plan("demo" if engine != "llama.cpp" else str(demo_gguf()), flags)
        return next(term.formula for term in plan.terms if term.name == "kv_pool_bytes")

    assert "null block" not in pool("llama.cpp")
    assert all("null block" in pool(engine) for engine in ("hf", "vllm"))


@pytest.mark.parametrize(
    ("device", "of_file", "held"), [("cpu", 3, (0, 1, 2)), ("cuda", 3, (1, 2)), ("cuda", 2, (0, 1))]
)
def test_llama_cpp_plan_for_a_gpu_keeps_the_embedding_in_host_memory(device, of_file, held) -> None:
    """An embedding that is also the head is on the GPU."""
    names = ("token_embd.weight", "blk.0.attn_q.weight", "output.weight")[:of_file]
    file = tuple(HeaderTensor(name, "F16", (4, 4), 32) for name in names)
    found = engine_of("llama.cpp").stored_tensors(file, Deployment(engine="llama.cpp", device=device))
    assert found == tuple(file[place] for place in held)


def test_llama_cpp_interval_covers_older_releases_with_one_residual_buffer_less(tiny_llama, folder_with):
    """A start of Qwen2.5-3B prints n_ubatch x n_embd x 4 bytes less than newer releases hold."""
    flags = Deployment(engine="llama.cpp", device="cpu", device_memory=1 << 35, max_model_len=8192)
    # The MLP is wider than the logits, so that no other bound covers the difference.
    plan = make_plan(folder_with({**tiny_llama, "intermediate_size": 8192, "vocab_size": 256}), flags)
    residual = 512 * tiny_llama["hidden_size"] * 4
    assert plan.intervals["activation_bytes"][0] <= plan.rank.activation_bytes - residual
