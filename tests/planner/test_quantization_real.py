"""The demo model loaded for real: storages of parameters, buffers and quantization state equal the plan."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tonnage.planner.build import make_plan
from tonnage.planner.plan import Deployment
from tonnage.server.demo_model import ensure_demo


@pytest.fixture(scope="module")
def demo() -> str:
    """The converted demo model: made once in the user's cache folder, as every command does."""
    return str(ensure_demo())


# Values measured with bitsandbytes 0.50.2 and torch 2.13 on a CPU; 256 bytes of each are rotary buffers.
MEASURED = {None: 269_030_272, "int8": 163_484_032, "nf4": 116_426_752, "nf4-double": 111_692_152}


@pytest.mark.parametrize("scheme", MEASURED)
def test_demo_after_load(scheme, demo, held_bytes):
    options = {}
    if scheme == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif scheme is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=scheme == "nf4-double"
        )
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.bfloat16, **options)
    planned = make_plan("demo", Deployment(quantization=scheme, device_memory=1 << 34)).rank.weights_bytes
    assert held_bytes(model) == planned == MEASURED[scheme]


@pytest.mark.parametrize(("scheme", "warm"), [("nf4", 113_108_992), ("nf4-double", 113_109_832)])
def test_demo_after_the_first_forward(scheme, warm, demo, held_bytes):
    """The AVX-512 kernel of bitsandbytes repacks the scales on first use; other CPUs keep what was loaded.
    (LLM.int8 keeps the outlier columns it met: kilobytes that depend on the prompt.)"""
    from bitsandbytes.backends.cpu import ops

    from tonnage.planner.families.registry import build_architecture
    from tonnage.planner.quantization import Quantization
    from tonnage.planner.source import resolve_model

    double = scheme == "nf4-double"
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.bfloat16, quantization_config=options)
    with torch.no_grad():
        model(torch.arange(8)[None])
    repacks = getattr(ops, "has_avx512bf16", lambda: False)()
    kernel = "bitsandbytes-cpu-avx512" if repacks else None
    architecture = build_architecture(resolve_model("demo").config)
    planned = sum(Quantization(scheme).bytes_after_warmup(t, "bfloat16", kernel) for t in architecture.tensors)
    assert held_bytes(model) == planned
    if kernel:
        explained = make_plan(
            "demo", Deployment(quantization=scheme, device="cpu", device_memory=1 << 34)
        ).terms
        (term,) = (term for term in explained if term.name == "weights_after_first_forward")
        assert planned == warm == term.value


@pytest.mark.parametrize("double", [False, True])
def test_fp4_after_load(double, demo, held_bytes):
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=double)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.bfloat16, quantization_config=options)
    scheme = "fp4-double" if double else "fp4"
    planned = make_plan("demo", Deployment(quantization=scheme, device_memory=1 << 34)).rank.weights_bytes
    assert held_bytes(model) == planned


def test_file_of_a_saved_quantized_model(demo, tmp_path):
    """What save_pretrained writes: tensors as planned, and the JSON texts in their interval."""
    from tonnage.planner.checkpoint import checkpoint_size
    from tonnage.planner.families.registry import build_architecture
    from tonnage.planner.quantization import read_quantization
    from tonnage.planner.source import resolve_model

    for name, options in (
        ("int8", BitsAndBytesConfig(load_in_8bit=True)),
        ("nf4", BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
        (
            "nf4-double",
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        ),
    ):
        folder = tmp_path / name
        AutoModelForCausalLM.from_pretrained(
            demo, dtype=torch.bfloat16, quantization_config=options
        ).save_pretrained(folder)
        source = resolve_model(str(folder))
        quantization = read_quantization(source.config, None)
        assert quantization.scheme == name
        size = checkpoint_size(build_architecture(source.config), quantization, source.config, "bfloat16")
        real = sum(tensor.nbytes for tensor in source.tensors)
        assert size.low <= real <= size.high
        plan = make_plan(str(folder), Deployment(device_memory=1 << 34))
        assert plan.rank.weights_bytes == MEASURED[name]
        (term,) = (term for term in plan.terms if term.name == "weights_in_file")
        assert term.value == size.low
