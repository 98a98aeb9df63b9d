"""Tests of the videos that vLLM's profile run encodes, by release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.runtime.gpu import coefficients
from tonnage.planner.engines.vllm.activation import peak
from tonnage.planner.engines.vllm.multimodal import profiled
from tonnage.planner.planning.size import Sizer
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import GiB

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def config_of_30b():
    """Return the config of Qwen3-VL-30B-A3B-Instruct, whose sizes differ from those of the 235B model."""
    config = json.loads((CONFIGS / "Qwen__Qwen3-VL-235B-A22B-Instruct.json").read_text())
    config["text_config"] |= {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    }  # fmt: skip
    config["vision_config"]["out_hidden_size"] = 2048
    return config


def sized(**flags):
    found = ModelSource("Qwen3-VL-30B-A3B", "Qwen3-VL-30B-A3B", config_of_30b(), "folder")
    size = Sizer(found).size(Deployment(engine="vllm", max_model_len=65536, **flags))
    return size, size.parts[size.place], size.chosen


@pytest.mark.parametrize(
    ("version", "modality", "tokens", "patches"),
    [
        ("0.11.0", "video", 153_600, 49_152),
        ("0.12.0", "video", 153_600, 49_152),
        ("0.13.0", "image", 16_384, 65_536),
        ("0.32.0", "image", 16_384, 65_536),
    ],
)
def test_vllm_release_decides_whether_the_profile_run_encodes_a_video(version, modality, tokens, patches):
    """A start of 0.11.0 prints "a budget of 153600 tokens, and profiled with 1 video items"."""
    _, part, chosen = sized(engine_version=version, gpu="h100-80g", max_num_batched_tokens=2048)
    found = profiled(part, chosen)
    assert (found.modality, found.count, found.tokens, found.patches) == (modality, 1, tokens, patches)


def test_video_embeddings_in_the_profile_run_fill_the_encoder_budget():
    """Four RTX 3090 of 0.11.0 print 14.7708 GiB of weights and a pool of 2.31 GiB.

    The log is in sipeed/sipeed_wiki, docs/hardware/zh/kvm/NanoKVM_Pro/cua.md.
    """
    size, part, chosen = sized(engine_version="0.11.0", gpu="rtx3090", tensor_parallel_size=4)
    assert size.worst.rank.weights_bytes == pytest.approx(14.7708 * GiB, rel=0.002)
    kept = peak(part, chosen, coefficients()).encoder.kept
    assert kept == 153_600 * 2048 * 4 * 2 + 49_152 * 1536 * 2
    rest = chosen.limit - (14.7708 + 2.31) * GiB
    planned = size.worst.rank.framework_bytes + size.worst.rank.activation_bytes
    assert planned == pytest.approx(rest, rel=0.1)  # 2.4 GiB less were planned before


def test_vllm_0_11_pads_each_image_of_the_profile_run_to_the_encoder_budget():
    """0.11.0 pads each of four images to the budget of 65,536 tokens, 0.12.0 pads none."""

    def kept(version):
        _, part, chosen = sized(
            engine_version=version, gpu="h100-80g", max_num_batched_tokens=65536,
            limit_mm_per_prompt='{"video": 0}',
        )  # fmt: skip
        return peak(part, chosen, coefficients()).encoder.kept - 4 * 65_536 * 1536 * 2

    assert kept("0.11.0") == 4 * kept("0.12.0") == 4 * 65_536 * 2048 * 4 * 2
