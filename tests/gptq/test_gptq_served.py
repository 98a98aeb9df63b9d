"""GPTQ and AWQ checkpoints of the whole demo model behind ``tonnage serve``.

The tests check an answer over HTTP, and the planned bytes after the load and after the first forward. GPTQModel
quantizes the checkpoints here; each is served once.

Run by ``make test-gptq`` alone; the reason is in ``test_gptq_real``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "3")  # one per layer of a block; the default is one per core
gptqmodel = pytest.importorskip("gptqmodel", reason="its own environment: make test-gptq")

from tonnage.planner.deployment import Deployment  # noqa: E402
from tonnage.planner.planning.build import make_plan  # noqa: E402
from tonnage.server.demo.model import ensure_demo  # noqa: E402

pytestmark = pytest.mark.timeout(3000)

TEXTS = [
    "Language models hold weights, activations and a cache of keys and values. The capital of France is Paris. "
] * 4
GROUP_SIZE = 64


@pytest.fixture(params=["gptq", "awq"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from gptqmodel import GPTQModel, QuantizeConfig

    monkeypatch.chdir(tmp_path)  # GPTQModel writes its logs where it stands
    settings = QuantizeConfig(
        bits=4, group_size=GROUP_SIZE, quant_method=request.param, format=request.param.replace("awq", "gemm")
    )
    model = GPTQModel.load(str(ensure_demo()), settings)
    model.quantize(TEXTS, batch_size=len(TEXTS))
    model.save(str(tmp_path / "model"))
    return tmp_path / "model"


def asked(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"content-type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=600) as answer:
        return json.load(answer)


def test_served_gptq_model_answers_and_holds_the_planned_bytes(folder: Path) -> None:
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", str(folder), "--served-model-name", "demo"]
    command += [
        "--kv-cache-memory-bytes",
        "32MiB",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "4",
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))
        report = asked(f"{url}/memory")
        plan = make_plan(str(folder), Deployment(device="cpu", device_memory=1 << 34))
        terms, loaded = {term.name: term.value for term in plan.terms}, plan.rank.weights_bytes
        assert report["measured"]["weights_bytes"] == report["plan"]["ranks"][0]["weights_bytes"] == loaded
        if "avx512_bf16" in Path("/proc/cpuinfo").read_text():  # the kernel that the plan's term names
            assert report["measured"]["warm_weights_bytes"] == terms.get("weights_after_first_forward", loaded)
        said = asked(
            f"{url}/v1/completions",
            {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        )
        assert "Paris" in said["choices"][0]["text"]
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
