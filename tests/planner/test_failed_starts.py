# ruff: noqa: E501 (sentences of the engine)
"""Tests that forecast start failures quote the engine's own error messages, against its sources and a log."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm import startup_failures
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import make_plan

DATA = Path(__file__).parent.parent / "data"
GIB = 1 << 30
FILES = (
    "config/model.py", "config/vllm.py", "config/parallel.py", "config/scheduler.py", "config/compilation.py",
    "v1/core/kv_cache_utils.py", "v1/core/kv_cache_planning.py", "v1/worker/utils.py", "v1/worker/gpu_worker.py",
    "v1/worker/gpu_model_runner.py", "v1/worker/cpu_worker.py", "platforms/cpu.py", "platforms/cuda.py",
    "distributed/utils.py", "model_executor/models/registry.py",
)  # fmt: skip


@cache
def message_patterns(root: Path) -> tuple[re.Pattern[str], ...]:
    """Return a pattern for every message in vLLM's ``FILES``, with its inserted values left open.

    Adjacent string literals form one message, and so do a message and a message inserted into it.
    """
    out = []
    for file in FILES:
        if not (root / file).exists():
            continue
        for node in ast.walk(ast.parse((root / file).read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = node.values
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node]
            else:
                continue
            fixed = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if sum(len(text) for text in fixed if text) > 20:
                out.append("".join("(?s:.*)" if text is None else re.escape(text) for text in fixed))
    return tuple(re.compile(re.sub(r"(\\\n)+", r"\\s+", text), re.ASCII) for text in out)


def is_vllm_message(sentence: str, root: Path) -> bool:
    text = sentence.partition(": ")[2].removesuffix(" ...")
    return any(
        pattern.fullmatch(end) for pattern in message_patterns(root) for end in (text, f"{text} ", f"{text} []")
    )


def folder(tmp_path, name, **changed):
    source = json.loads((DATA / "configs" / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**source, **changed}))
    return str(tmp_path)


LLAMA = "meta-llama__Meta-Llama-3.1-8B"
HYBRID = "Qwen__Qwen3.5-27B"
REFUSED = [
    (LLAMA, {"tensor_parallel_size": 3}, "Total number of attention heads (32) must be divisible by tensor parallel size (3)."),
    (LLAMA, {"max_model_len": 200_000}, "User-specified max_model_len (200000) is greater than the derived max_model_len (max_position_embeddings=131072.0 or model_max_length=None in model's config.json)."),
    (LLAMA, {"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens (32) must be greater than or equal to max_num_seqs (64)."),
    ("google__gemma-2-2b", {"dtype": "float16"}, "The model type 'gemma2' does not support float16."),
    (LLAMA, {"dtype": "bfloat16", "gpu": "t4-16g"}, "Bfloat16 is only supported on GPUs with compute capability of at least 8.0."),
]  # fmt: skip
STOPPED = [
    (LLAMA, {"gpu": "l4-24g"}, "To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory ("),
    (LLAMA, {"gpu": "t4-16g", "dtype": "float16"}, "CUDA out of memory"),
    (LLAMA, {"gpu": "l4-24g", "gpu_memory_utilization": 0.5}, "No available memory for the cache blocks."),
    (LLAMA, {"device_memory_used": 30 * GIB}, "Free memory on device cuda:0 (49.18/79.18 GiB) on startup is less than desired GPU memory utilization (0.92, 72.85 GiB)."),
    (LLAMA, {"data_parallel_size": 2, "num_gpus": 1}, "DP adjusted local rank 1 is out of bounds for 1 devices."),
    (LLAMA, {"tensor_parallel_size": 4, "num_gpus": 2}, "World size (4) is larger than the number of available GPUs (2) in this node."),
    (LLAMA, {"kv_cache_memory_bytes": 62 * GIB, "max_num_seqs": 1024}, "CUDA out of memory occurred when warming up sampler with 1024 dummy requests."),
    (LLAMA, {"gpu": None, "device": "cpu", "device_memory": 32 * GIB, "kv_cache_memory_bytes": 20 * GIB}, "on kv cache allocation is less than requested memory for kv (20.0 GiB)."),
    (HYBRID, {"max_num_seqs": 2048, "max_num_batched_tokens": 4096, "gpu": "a100-80g"}, "max_num_seqs (2048) exceeds available Mamba cache blocks ("),
    ("zai-org__GLM-5.2", {"gpu": "cpu", "device_memory": 1 << 50, "max_model_len": 4096}, "Sparse Attention is not supported on CPU."),
    ("nvidia__DeepSeek-V3.2-NVFP4", {"gpu": "cpu", "device_memory": 1 << 50, "max_model_len": 4096, "engine_version": "0.33.0"}, "Sparse Attention is not supported on CPU."),
    ("baichuan-inc__Baichuan2-7B-Base", {"max_model_len": 4096}, "was supported in vLLM until v0.23.0, and is not supported anymore."),
]  # fmt: skip


@cache
def installed() -> Path | None:
    """Return the folder of the installed vLLM, or None without one."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


@pytest.mark.parametrize(("model", "flags", "said"), REFUSED)
def test_error_for_flags_that_vllm_rejects_quotes_vllms_message(model, flags, said, tmp_path):
    asked = {"engine": "vllm", "engine_version": "0.32.0", "gpu": "h100-80g", **flags}
    with pytest.raises(DeploymentError) as caught:
        make_plan(folder(tmp_path, model), Deployment(**asked))
    assert caught.value.field in {"--" + name.replace("_", "-") for name in flags}
    assert f"vLLM 0.32.0 stops with: ValueError: {said}" in caught.value.message
    assert caught.value.hint  # flags that would start
    root = installed()
    if root is not None:
        assert is_vllm_message(caught.value.message.partition("stops with: ")[2], root)


@pytest.mark.parametrize(("model", "flags", "said"), STOPPED)
def test_plan_that_predicts_a_failed_start_quotes_vllms_error_message(model, flags, said, tmp_path):
    asked = {"engine": "vllm", "engine_version": "0.32.0", "gpu": "h100-80g", **flags}
    plan = make_plan(folder(tmp_path, model), Deployment(**asked))
    assert not plan.fits
    assert plan.stops_with is not None
    assert said in plan.stops_with
    assert any("stops with: " in line for line in plan.verdict_lines())
    root = installed()
    if root is not None and "OutOfMemoryError" not in plan.stops_with:
        assert is_vllm_message(plan.stops_with, root)


def test_altered_error_message_is_not_found_in_vllms_sources():
    """The message check of this file can fail."""
    root = installed()
    if root is None:
        return
    said = "ValueError: Total number of attention heads (32) must be divisible by tensor parallel size (3)."
    assert is_vllm_message(said, root)
    for other in (said.replace("divisible", "divided"), said[:-1], said + " Or not."):
        assert not is_vllm_message(other, root)


def test_plan_that_fits_predicts_no_start_failure(tmp_path, capsys):
    model = folder(tmp_path, LLAMA)
    arguments = [model, "--gpu", "h100-80g", "--engine-version", "0.32.0", "--json"]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["stops_with"] is None
    assert (
        run([*arguments, "--num-gpus", "2", "--data-parallel-size", "2", "--device-memory-used", "4GiB"]) == 0
    )
    capsys.readouterr()
    assert run([*arguments, "--num-gpus", "1", "--data-parallel-size", "2"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert "--data-parallel-size 1 would start" in out["reasons"][0]


def test_predicted_start_failure_equals_the_message_in_a_published_log(tmp_path):
    """The case is vLLM 0.19.0 with two replicas on a machine with one H100."""
    (log,) = (DATA / "startup_logs").glob("*FAILED*")
    flags = Deployment(
        engine="vllm", engine_version="0.19.0", gpu="h100-80g", gpu_memory_utilization=0.95, max_model_len=8192,
        data_parallel_size=2, num_gpus=1,
    )  # fmt: skip
    said = make_plan(folder(tmp_path, LLAMA), flags).stops_with
    assert said is not None
    assert said in log.read_text()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            "0.7.3",
            "The model's max seq len (131072) is larger than the maximum number of tokens that can be stored",
        ),
        ("0.10.2", "the models's max seq len (131072), (16.00 GiB KV cache is needed"),
        ("0.19.0", "the models's max seq len (131072), (16.0 GiB KV cache is needed"),
        (
            "0.25.1",
            "Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend)",
        ),
    ],
)
def test_predicted_error_message_is_that_of_the_given_vllm_version(version, said, tmp_path):
    plan = make_plan(folder(tmp_path, LLAMA), Deployment(engine="vllm", engine_version=version, gpu="l4-24g"))
    assert said in (plan.stops_with or "")


def test_vllm_0_33_rejects_16_bit_kv_cache_of_other_dtype(tmp_path):
    """The quoted message is in config/vllm.py of 0.33."""
    model = folder(tmp_path, LLAMA)
    flags = {"engine": "vllm", "gpu": "h100-80g", "max_model_len": 8192, "kv_cache_dtype": "float16"}
    make_plan(model, Deployment(**flags, engine_version="0.32.0"))
    with pytest.raises(DeploymentError) as caught:
        make_plan(model, Deployment(**flags, engine_version="0.33.0"))
    assert caught.value.message.endswith(
        'stops with: ValueError: kv_cache_dtype="float16" is incompatible with dtype="bfloat16". Please set '
        "`--kv-cache-dtype` to `auto` or `bfloat16`."
    )
    make_plan(model, Deployment(**{**flags, "kv_cache_dtype": "bfloat16"}, engine_version="0.33.0"))


@pytest.mark.parametrize(
    ("model", "version", "said"),
    [
        ("deepseek-ai__DeepSeek-V3", "0.27.1", "stops with: NotImplementedError: MLA is not supported on CPU."),
        ("deepseek-ai__DeepSeek-V3", "0.28.0", "stops with: ImportError: cannot import name 'compile_flash"),
        ("deepseek-ai__DeepSeek-V3", "0.29.0", None),
        ("openbmb__MiniCPM3-4B", "0.20.1", None),  # 0.20.1 runs it as full attention
        ("LiquidAI__LFM2-1.2B", "0.20.1", "does not align the pages of states and attention on a CPU"),
        ("LiquidAI__LFM2-1.2B", "0.21.0", None),
    ],
)
def test_cpu_kv_cache_unsupported_by_vllm_version_is_rejected(model, version, said, tmp_path):
    """tests/data/oracles/vllm_versions.json has each case rejected by that version."""
    flags = Deployment(
        engine="vllm", engine_version=version, gpu="cpu", device_memory=1 << 50, kv_cache_memory_bytes=8 * GIB,
        max_model_len=2048,
    )  # fmt: skip
    if said is None:
        assert make_plan(folder(tmp_path, model), flags).kv_cache.num_blocks > 0
        return
    with pytest.raises(DeploymentError, match=re.escape(said)):
        make_plan(folder(tmp_path, model), flags)


@pytest.mark.parametrize("version", ["0.9.0", "0.13.0", "0.19.2", "0.33.0"])
@pytest.mark.parametrize("gpu", ["gb10-128g", "thor-128g"])
def test_gpu_whose_memory_nvml_does_not_report_gets_vllms_small_batch_defaults(tmp_path, gpu, version):
    """Start-up logs of vLLM 0.13 and 0.19.2 on a GB10 print 2,048 tokens and 256 sequences."""
    flags = Deployment(engine="vllm", gpu=gpu, max_model_len=8192, engine_version=version)
    plan = make_plan(folder(tmp_path, LLAMA), flags)
    assert (plan.deployment.max_num_seqs, plan.deployment.max_num_batched_tokens) == (256, 2048)


def test_plan_predicts_that_a_model_newer_than_the_vllm_version_does_not_start(tmp_path):
    model = folder(tmp_path, "google__gemma-4-26B-A4B")
    old = make_plan(
        model, Deployment(engine="vllm", engine_version="0.15.0", gpu="h200-141g", max_model_len=8192)
    )
    assert not old.fits
    assert "are not supported for now" in (old.stops_with or "")
    assert any("--engine-version 0.19.0" in reason for reason in old.reasons)
    new = make_plan(
        model, Deployment(engine="vllm", engine_version="0.32.0", gpu="h200-141g", max_model_len=8192)
    )
    assert new.fits


def test_plan_notes_a_model_that_is_newer_than_the_transformers_version_that_vllm_requires(tmp_path):
    """vLLM 0.19 has a class for Gemma 4 but requires transformers below 5, which lacks it.

    Some installations have a newer transformers, so that the plan only notes it.
    """
    model = folder(tmp_path, "google__gemma-4-26B-A4B")
    flags = {"engine": "vllm", "gpu": "h200-141g", "max_model_len": 8192}
    old = make_plan(model, Deployment(**flags, engine_version="0.19.0"))
    assert old.fits
    assert any("requires transformers >=4.56.0,<5" in note and "`gemma4`" in note for note in old.notes)
    for version, name in (("0.20.1", "google__gemma-4-26B-A4B"), ("0.19.0", "Qwen__Qwen3.5-27B")):
        new = make_plan(folder(tmp_path, name), Deployment(**flags, engine_version=version))
        assert not any("requires transformers" in note for note in new.notes)


def test_model_class_of_every_published_start_is_supported_by_its_vllm_version():
    """The table of classes by version covers every published start."""
    first = startup_failures._architectures()["first"]
    seen = 0
    for line in (DATA / "field_reports.jsonl").read_text().splitlines():
        report = json.loads(line)
        file = DATA / "configs" / f"{report['config']}.json"
        match = re.match(r"\d+\.(\d+)", report["engine_version"] or "")
        if not report["engine"].startswith("vLLM") or match is None or not file.exists():
            continue
        for name in json.loads(file.read_text())["architectures"]:
            since = first.get(name, "0.0").partition(".")[2]
            assert int(match[1]) >= int(since), (name, report["source"])
            seen += name in first
    assert seen > 5


def test_plan_notes_that_cuda_graphs_need_memory_beside_gpu_memory_utilization(tmp_path):
    """Before 0.20, graphs come on top of the share; a share of 1.0 leaves nothing for them."""
    model = folder(tmp_path, LLAMA)
    flags = {"engine": "vllm", "engine_version": "0.19.0", "gpu": "h100-80g"}
    tight = make_plan(model, Deployment(**flags, gpu_memory_utilization=1.0))
    assert any("captured outside the share" in note for note in tight.notes)
    roomy = make_plan(model, Deployment(**flags, gpu_memory_utilization=0.9))
    assert not any("captured outside the share" in note for note in roomy.notes)


@pytest.mark.parametrize("version", ["0.19.0", "0.32.0", "0.33.0"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("transformers-default__t5", "T5ForConditionalGeneration"),
        ("transformers-default__rwkv", "RwkvForCausalLM"),
        ("transformers-default__bart", "BartForCausalLM"),
    ],
)
def test_model_class_that_no_vllm_release_has_is_rejected_naming_the_class(tmp_path, config, name, version):
    flags = Deployment(engine="vllm", engine_version=version, gpu="h100-80g", max_model_len=256)
    plan = make_plan(folder(tmp_path, config), flags)
    assert not plan.fits
    assert any(f"vLLM {version} has no class {name}, and no release" in reason for reason in plan.reasons)
    assert f"Model architectures ['{name}'] are not supported for now" in (plan.stops_with or "")


@pytest.mark.parametrize(
    "name", ["LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaModel", "LlamaForCausalLM"]
)
def test_model_class_whose_name_differs_from_vllms_only_in_the_suffix_is_accepted(name):
    """_normalize_arch of vLLM replaces the suffix and adds a pooling adapter."""
    architecture = build_architecture(json.loads((DATA / "configs" / f"{LLAMA}.json").read_text()))
    assert startup_failures.class_of(replace(architecture, declared=(name,)), (0, 33, 0)) is not None


def test_plan_notes_a_model_class_that_vllm_runs_with_transformers_modules(tmp_path):
    flags = {"engine": "vllm", "gpu": "h100-80g", "max_model_len": 256}
    new, old = (
        make_plan(folder(tmp_path, "transformers-default__helium"), Deployment(engine_version=version, **flags))
        for version in ("0.33.0", "0.19.0")
    )
    assert new.fits
    assert any("no class HeliumForCausalLM: it runs transformers' modules" in note for note in new.notes)
    assert not old.fits


def test_mamba_states_do_not_limit_max_num_seqs_without_full_cuda_graphs(tmp_path):
    """FlashInfer's attention leaves no full graphs of drafts, so vLLM does not compare sequences with blocks."""
    flags = {
        "engine": "vllm", "engine_version": "0.32.0", "gpu": "a100-80g", "kv_cache_dtype": "fp8",
        "max_num_seqs": 2048, "max_num_batched_tokens": 8192, "max_model_len": 8192,
    }  # fmt: skip
    model = folder(tmp_path, HYBRID)
    assert "Mamba cache blocks" in make_plan(model, Deployment(**flags)).stops_with
    drafts = make_plan(model, Deployment(**flags, num_speculative_tokens=2))
    assert drafts.stops_with is None
