"""Tests of vLLM's memory terms and KV pool against starts with every term logged (tests/data/startups)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from serving import PATIENCE
from shown import how_exact

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.runtime.gpu import coefficients
from tonnage.planner.engines.vllm import activation, framework, graphs
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.size import Sizer
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import GiB, MiB

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data"
STARTS = DATA / "startups"


@pytest.fixture(scope="module")
def scores():
    command = [
        sys.executable, str(ROOT / "benchmarks" / "planner_accuracy.py"),
        "--sections", "startups", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])["startups"]


def test_planned_kv_pool_is_within_error_bounds_of_start_up_logs(scores):
    assert scores["scored"] >= 28
    assert scores["mean_error"] <= 0.006
    assert scores["worst_error"] <= 0.015
    assert scores["covered"] == scores["scored"]
    assert scores["widest_interval"] <= 0.03
    for printed in scores["capacity"].values():
        assert printed["rows"] >= 24
        assert printed["mean_error"] <= 0.006
        assert printed["covered"] == printed["rows"]
    assert scores["model_left_out"]["mean_error"] <= 0.015
    assert scores["model_left_out"]["widest_interval"] <= 0.03
    assert scores["model_left_out"]["covered"] == scores["model_left_out"]["rows"]
    assert how_exact("KV pool of vLLM 0.15 to 0.19") == (
        f"{scores['model_left_out']['rows']} published start-ups",
        f"mean {100 * scores['model_left_out']['mean_error']:.2f} % off, all inside their intervals",
    )


@pytest.mark.parametrize(
    ("term", "share"),
    [
        ("weights_bytes", 0.001),
        ("activation_bytes", 0.001),
        ("framework_bytes", 0.001),
        ("cuda_graph_bytes", 0.005),
    ],
)
def test_each_planned_memory_term_is_within_its_error_bound_of_start_up_logs(scores, term, share):
    found = scores["terms_share_of_gpu"][term]
    assert found["rows"] >= 25
    assert found["mean"] <= share


def config(name: str) -> ModelSource:
    for folder in (STARTS, DATA / "configs"):
        path = folder / f"{name}.json"
        if path.is_file():
            return ModelSource(name, name, json.loads(path.read_text()), "folder")
    raise FileNotFoundError(name)


def sized(name: str, **flags):
    flags = {"engine": "vllm", "engine_version": "0.19.0", "gpu": "h100-80g", "device": "cuda"} | flags
    return Sizer(config(name)).size(Deployment(**flags))


def peak(name: str, **flags) -> activation.ProfilePeak:
    found = sized(name, **flags)
    return activation.peak(found.parts[found.place], found.chosen, coefficients())


def held(name: str, **flags) -> framework.NonTorchMemory:
    found = sized(name, **flags)
    return framework.non_torch_memory(found.parts[found.place], found.chosen, coefficients())


LLAMA = "meta-llama__Llama-3.1-8B-Instruct"


def test_planned_fused_all_reduce_memory_depends_on_ranks_vllm_version_and_gpu():
    """0.19.0 with two and four ranks holds 2.06 to 2.13 GiB outside PyTorch; pipeline stages hold 0.07."""
    assert held(LLAMA, tensor_parallel_size=2).fused == held(LLAMA, tensor_parallel_size=4).fused == 1536 * MiB
    assert held(LLAMA, tensor_parallel_size=2, enforce_eager=True).fused == 0
    assert held(LLAMA, tensor_parallel_size=2, pipeline_parallel_size=2).fused == 0
    assert held(LLAMA, tensor_parallel_size=2, engine_version="0.16.0").fused == 0
    assert held(LLAMA, tensor_parallel_size=2, gpu="l40s-48g").fused == 0
    assert held(LLAMA, tensor_parallel_size=2, gpu="h100-pcie-80g").fused == 0
    assert held(LLAMA, tensor_parallel_size=2, engine_version="0.25.1").fused == 512 * MiB
    assert held(LLAMA).fused == held(LLAMA, pipeline_parallel_size=2).fused == 0


def test_trial_capture_of_cuda_graphs_in_vllm_0_18_adds_non_torch_memory():
    """Qwen3-14B has 0.13 GiB of non-torch memory with 0.17.0 and 0.25 with 0.18.0 on one machine."""
    before, since = held(LLAMA, engine_version="0.17.0"), held(LLAMA, engine_version="0.18.0")
    assert since.rest - before.rest == pytest.approx(0.12 * GiB, rel=0.01)
    assert held(LLAMA, engine_version="0.18.0", enforce_eager=True).rest == before.rest
    assert held(LLAMA, engine_version="0.27.0").rest == before.rest


@pytest.mark.parametrize(
    ("version", "gib"), [("0.15.0", 5.64), ("0.16.0", 5.64), ("0.17.0", 2.23), ("0.18.0", 2.23)]
)
def test_vllm_version_decides_the_samplers_part_of_the_activation_peak(version, gib):
    """The values are printed for Qwen3-14B; 0.17.0 removed the sort."""
    assert peak("Qwen__Qwen3-14B", engine_version=version, max_model_len=8192).total == pytest.approx(
        gib * GiB, rel=0.005
    )


def test_plan_of_a_pooling_model_has_no_sampler_memory():
    assert peak(LLAMA, runner="pooling").sampler == 0
    assert peak(LLAMA, runner="pooling").total < peak(LLAMA).total
    assert peak("BAAI__bge-large-en", max_model_len=512).sampler == 0


def test_profile_run_of_vllms_second_model_runner_has_no_sampler_memory():
    logits = 1024 * 128256
    for version in ("0.21.0", "0.25.0"):
        found = peak(LLAMA, engine_version=version)
        assert (found.sampler > 14 * logits) is (version == "0.21.0")
    assert peak("Qwen__Qwen3-30B-A3B", engine_version="0.25.1").sampler > 14 * 1024 * 151936
    assert peak("Qwen__Qwen3-30B-A3B", engine_version="0.29.0").sampler < 3 * 1024 * 151936


def test_penalty_count_buffers_reduce_the_kv_pool_from_vllm_0_27_on():
    """The buffers take 4 bytes and a bit per sequence and token, allocated before the profile run."""
    assert held(LLAMA, engine_version="0.26.0").counts == 0
    assert held(LLAMA, engine_version="0.27.0").counts == 1024 * (128256 * 4 + 4008 * 4)
    assert held("Qwen__Qwen3-30B-A3B", engine_version="0.28.0").counts == 0  # still on the first runner


def test_moe_plan_includes_one_persistent_buffer_for_the_activations_of_experts():
    """The buffer holds 8,192 tokens x 8 experts x (2,048 + 2,048) values in bf16.

    Report 31 (0.15.0 on an H200) has 0.5 GiB more than the sampler takes; the reports of 0.10.2 on an H100 have
    not.
    """
    assert peak("Qwen__Qwen3-30B-A3B", max_num_batched_tokens=8192).experts == 512 * MiB
    assert peak("Qwen__Qwen3-30B-A3B", engine_version="0.12.0").experts == 0
    halved = peak("Qwen__Qwen3-30B-A3B", tensor_parallel_size=2)
    assert halved.experts == 512 * MiB  # hidden states of every token's experts, whatever the rank's share
    assert peak(LLAMA).experts == 0


def test_mxfp4_experts_are_padded_per_rank():
    """gpt-oss-20b is 2,880 wide; a rank's share is rounded to 64 and its values to 256.

    One rank has 13.47 GiB.
    """
    from tonnage.planner.engines.vllm.repack import mxfp4_padding

    def padding(ranks: int) -> int:
        return mxfp4_padding(sized("openai__gpt-oss-20b", tensor_parallel_size=ranks).parts[0], "triton", 1)

    values = 24 * 32 * 3 * 2880 * 2880 // 2
    assert padding(1) == pytest.approx(values * 192 / 2880, rel=1e-6)
    for ranks, inner in ((2, 1472), (4, 768), (8, 384)):
        across = 2 * inner * 3072 + 2880 * -(-inner // 256) * 256
        exact = 3 * 2880 * 2880 // ranks
        scales = 3 * (inner - 2880 // ranks) * 2880 / 32
        assert padding(ranks) == pytest.approx(24 * 32 * ((across - exact) / 2 + scales), rel=1e-6)


@pytest.mark.parametrize("quantized", [True, False])
def test_quantized_mla_projections_are_also_kept_in_16_bits(quantized):
    """DeepSeek-V3's FP8 adds 61 layers x 512 x 128 heads x (128 + 128) values; bf16 has only views."""
    source = config("deepseek-ai__DeepSeek-V3")
    if not quantized:
        del source.config["quantization_config"]
    flags = Deployment(engine="vllm", gpu="h100-80g", device="cuda", tensor_parallel_size=8, max_model_len=4096)
    padding = Sizer(source).size(flags).worst.weights.padding
    assert padding == (61 * 512 * 128 // 8 * 256 * 2 if quantized else 0)


def test_activation_peak_includes_the_mla_latents_that_the_profile_run_expands():
    """A context of 65,536 tokens expands to tokens x heads x (128 + 128) values."""
    wide = peak("deepseek-ai__DeepSeek-V3", tensor_parallel_size=8, max_model_len=131072)
    assert wide.forward > 65536 * 128 // 8 * 256 * 2


def test_later_pipeline_stages_include_the_hidden_states_that_they_receive():
    """Llama-3.1-8B prints 1.10 and 2.01 GiB in two stages, and 1.89 GiB in one."""
    found = sized(LLAMA, pipeline_parallel_size=2, max_model_len=8192)
    peaks = [activation.peak(part, found.chosen, coefficients()) for part in found.parts]
    assert [round(each.total / GiB, 2) for each in peaks] == pytest.approx([1.10, 2.01], abs=0.011)
    assert peaks[0].sampler == 0
    assert peaks[1].sampler - peak(LLAMA).sampler == 2 * 8192 * 4096 * 2


@pytest.mark.parametrize(("seqs", "count"), [(1024, 51), (256, 51), (255, 50), (32, 11), (2, 3), (1, 2)])
def test_number_of_cuda_graph_batch_sizes_follows_max_num_seqs(seqs, count):
    assert len(graphs.capture_sizes(sized(LLAMA, max_num_seqs=seqs, max_model_len=8192).chosen)) == count


def test_vllm_0_20_subtracts_cuda_graphs_from_pool():
    flags = Deployment(
        engine="vllm", engine_version="0.19.0", gpu="h100-80g", device="cuda", gpu_memory_utilization=0.9
    )
    before = plan_source(config(LLAMA), flags)
    since = plan_source(config(LLAMA), replace(flags, engine_version="0.20.0"))
    beside = {term.name: term for term in before.terms}["cuda_graphs_beside_bytes"]
    assert before.rank.cuda_graph_bytes == 0
    assert "outside" in beside.formula
    assert since.rank.cuda_graph_bytes == beside.value
    assert before.rank.kv_pool_bytes - since.rank.kv_pool_bytes == pytest.approx(beside.value, rel=0.01)


def test_explain_marks_each_memory_term_as_derived_or_fitted():
    plan = plan_source(
        config(LLAMA), Deployment(engine="vllm", gpu="h100-80g", device="cuda", tensor_parallel_size=2)
    )
    sources = {term.name: term.source for term in plan.terms}
    assert sources["activation_bytes"].startswith("derived")
    assert "derived" in sources["framework_bytes"]
    assert "fitted" in sources["framework_bytes"]
    assert "fitted" in sources["cuda_graph_bytes"]
