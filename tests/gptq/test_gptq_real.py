"""The demo model quantized by GPTQModel itself: file, load and first forward hold what the plan says.

Run by ``make test-gptq`` alone: GPTQModel needs another PyTorch than vLLM for CPU. Quantizing takes a minute or
two; the first forward compiles GPTQModel's kernel, some minutes more on the first run of a machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "3")  # one per layer of a block; the default is one per core
gptqmodel = pytest.importorskip("gptqmodel", reason="its own environment: make test-gptq")
torch = pytest.importorskip("torch")

from tonnage.planner.deployment import Deployment  # noqa: E402
from tonnage.planner.families.registry import build_architecture  # noqa: E402
from tonnage.planner.planning.build import make_plan  # noqa: E402
from tonnage.planner.planning.checkpoint import checkpoint_size  # noqa: E402
from tonnage.planner.quantization.read import read_quantization  # noqa: E402
from tonnage.planner.source.resolve import resolve_model  # noqa: E402
from tonnage.server.demo.model import ensure_demo  # noqa: E402

pytestmark = pytest.mark.timeout(3000)

GROUP_SIZE = 64
# Printed by this test with gptqmodel 7.7.0, torch 2.15 and transformers 5.23, the kernel of AVX512-BF16 CPUs
FILE, LOADED, WARM = 114_620_920, 114_530_752, 119_276_992
TEXTS = (
    "The quick brown fox jumps over the lazy dog. " * 8,
    "Language models hold weights, activations and a cache of keys and values in memory. " * 6,
) * 2  # calibration: what is learned from them changes no size


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    """Return a context manager that prints a line before and after a slow part, despite captured output."""

    @contextmanager
    def line(what: str) -> Iterator[None]:
        begun = time.monotonic()
        with capsys.disabled():
            print(f"\n{what} ...", flush=True)
        yield
        with capsys.disabled():
            print(f"{what}: {time.monotonic() - begun:.0f} s", flush=True)

    return line


def storages(model: torch.nn.Module) -> int:
    """Bytes of all distinct storages the modules reach: parameters, buffers, plain attributes."""
    seen = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for value in held.values():
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def test_gptq_weight_bytes_in_file_after_load_and_after_forward_equal_the_plan(
    tmp_path: Path, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # GPTQModel writes its logs where it stands
    from gptqmodel import GPTQModel, QuantizeConfig
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "gptq"
    with said("quantizing the demo model"):
        model = GPTQModel.load(str(ensure_demo()), QuantizeConfig(bits=4, group_size=GROUP_SIZE))
        model.quantize(list(TEXTS), batch_size=len(TEXTS))
        model.save(str(folder))
        del model
    source = resolve_model(str(folder))
    architecture, quantization = build_architecture(source.config), read_quantization(source.config, None)
    assert (quantization.scheme, quantization.group_size) == ("gptq", GROUP_SIZE)

    file = folder / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    size = checkpoint_size(architecture, quantization, source.config, "bfloat16")
    assert size.low == size.high == sum(tensor.nbytes for tensor in source.tensors)
    assert size.low + header == file.stat().st_size == FILE

    with said("loading it (the first time on a machine compiles a CPU kernel for minutes)"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu")
    planned = make_plan(str(folder), Deployment(device_memory=1 << 34)).rank.weights_bytes
    assert storages(loaded) == planned == LOADED

    kernel = type(loaded.model.layers[0].self_attn.q_proj).__name__
    if kernel != "TorchCpuAvx512Linear":
        pytest.skip(f"this CPU gets {kernel}; the figure after the first forward is that of AVX512-BF16")
    with said("the first forward"), torch.no_grad():
        loaded(torch.arange(8)[None])
    warm = sum(
        quantization.bytes_after_warmup(tensor, "bfloat16", "gptqmodel-cpu-avx512")
        for tensor in architecture.tensors
    )
    assert storages(loaded) == warm == WARM
