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
