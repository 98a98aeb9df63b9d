"""Tests of the really loaded demo model: its storages after load and first forward equal the plan.

So do the files of a model saved quantized. Each format is loaded once. FP4 and other families are in
test_loaded_bytes.py, on small models.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tonnage.planner.deployment import Deployment
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import make_plan
from tonnage.planner.planning.checkpoint import checkpoint_size
from tonnage.planner.quantization.read import quantized_to, read_quantization
from tonnage.planner.source.resolve import resolve_model
from tonnage.server.demo.model import ensure_demo


@pytest.fixture(scope="module")
def demo() -> str:
    """Return the converted demo model's folder in the user's cache; it is made once, as every command does."""
    return str(ensure_demo())


# Values measured with bitsandbytes 0.50.2 and torch 2.13 on a CPU; 256 bytes of each are rotary buffers.
MEASURED = {None: 269_030_272, "int8": 163_484_032, "nf4": 116_426_752, "nf4-double": 111_692_152}
WARM = {"nf4": 113_108_992, "nf4-double": 113_109_832}


def options(scheme):
    if scheme == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=scheme == "nf4-double"
    )


@pytest.mark.parametrize("scheme", MEASURED)
def test_demo_model_weight_bytes_in_file_after_load_and_after_forward_equal_the_plan(
    scheme, demo, held_bytes, tmp_path
):
    quantized = {} if scheme is None else {"quantization_config": options(scheme)}
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.bfloat16, **quantized)
    planned = make_plan("demo", Deployment(quantization=scheme, device_memory=1 << 34)).rank.weights_bytes
    assert held_bytes(model) == planned == MEASURED[scheme]
    if scheme is not None:
        check_file(model, scheme, str(tmp_path))
    if scheme in WARM:
        check_warm(model, scheme, held_bytes)


def check_file(model, scheme, folder):
    """Check that save_pretrained writes the planned tensors, and JSON texts within their interval."""
    model.save_pretrained(folder)
    source = resolve_model(folder)
    quantization = read_quantization(source.config, None)
    assert quantization.scheme == scheme
    size = checkpoint_size(build_architecture(source.config), quantization, source.config, "bfloat16")
    real = sum(tensor.nbytes for tensor in source.tensors)
    assert size.low <= real <= size.high
    plan = make_plan(folder, Deployment(device_memory=1 << 34))
    assert plan.rank.weights_bytes == MEASURED[scheme]
    (term,) = (term for term in plan.terms if term.name == "weights_in_file")
    assert term.value == size.low


def check_warm(model, scheme, held_bytes):
    """Check the bytes after the first forward pass.

    The AVX-512 kernel of bitsandbytes repacks the scales on first use; other CPUs keep the loaded form.
    LLM.int8 also keeps the outlier columns of its inputs: kilobytes that depend on the prompt.
    """
    from bitsandbytes.backends.cpu import ops

    with torch.no_grad():
        model(torch.arange(8)[None])
    repacks = getattr(ops, "has_avx512bf16", lambda: False)()
    kernel = "bitsandbytes-cpu-avx512" if repacks else None
    architecture = build_architecture(resolve_model("demo").config)
    planned = sum(quantized_to(scheme).bytes_after_warmup(t, "bfloat16", kernel) for t in architecture.tensors)
    assert held_bytes(model) == planned
    if kernel:
        explained = make_plan(
            "demo", Deployment(quantization=scheme, device="cpu", device_memory=1 << 34)
        ).terms
        (term,) = (term for term in explained if term.name == "weights_after_first_forward")
        assert planned == WARM[scheme] == term.value
