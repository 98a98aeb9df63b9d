"""Tests of vision model plans under vLLM: their terms, and the multimodal flags."""

from __future__ import annotations

import json

import pytest
from pictures import GEMMA4_SOUND, configured

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm import encoder
from tonnage.planner.engines.vllm.multimodal import profiled
from tonnage.planner.engines.vllm.tensors import tensors_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.planning.build import make_plan
from tonnage.planner.planning.deployment import complete, deployment_of

GIB = 1 << 30
ON_GPU = {"engine": "vllm", "gpu": "h100-80g", "max_model_len": 8192}


@pytest.fixture
def plan_of(tmp_path, config_of):
    def plan(model, **flags):
        if not (tmp_path / "config.json").exists():
            (tmp_path / "config.json").write_text(json.dumps(configured(model, config_of)))
        return make_plan(str(tmp_path), Deployment(**(ON_GPU | flags)))

    return plan


def test_activation_bytes_include_the_largest_image_and_the_encoder_cache(plan_of):
    plan = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", engine_version="0.19.0", max_num_seqs=8)
    term = next(term for term in plan.terms if term.name == "activation_bytes")
    assert "1 x the largest video (16,384 tokens; encoder cache 16,384)" in term.formula
    small = plan_of(
        "Qwen/Qwen2.5-VL-7B-Instruct", engine_version="0.19.0", max_num_seqs=8,
        mm_processor_kwargs='{"max_pixels": 1003520}', limit_mm_per_prompt='{"video": 0}',
    )  # fmt: skip
    assert small.rank.kv_pool_bytes - plan.rank.kv_pool_bytes > GIB
    text = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", engine_version="0.19.0", language_model_only=True)
    towers = plan.rank.weights_bytes - text.rank.weights_bytes
    rounding = towers - 2 * 676_550_144  # the allocator's, of tensors that are there no more
    assert 0 <= rounding < 1 << 25


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"limit_mm_per_prompt": '{"picture": 1}'}, "--limit-mm-per-prompt"),
        ({"limit_mm_per_prompt": '{"image": -1}'}, "--limit-mm-per-prompt"),
        ({"limit_mm_per_prompt": '{"image": {"count": 1, "width": 512}}'}, "--limit-mm-per-prompt"),
        ({"limit_mm_per_prompt": "[3]"}, "--limit-mm-per-prompt"),
        ({"mm_processor_kwargs": '{"num_crops": 4}'}, "--mm-processor-kwargs"),
        ({"mm_processor_kwargs": '{"max_pixels": "many"}'}, "--mm-processor-kwargs"),
        ({"mm_processor_kwargs": '{"size": {"height": 3}}'}, "--mm-processor-kwargs"),
        ({"disable_chunked_mm_input": True, "max_num_batched_tokens": 4096}, "--disable-chunked-mm-input"),
        ({"mm_encoder_tp_mode": "both"}, "--mm-encoder-tp-mode"),
    ],
)
def test_invalid_multimodal_flag_is_named_in_error(plan_of, flags, field):
    with pytest.raises(DeploymentError) as caught:
        plan_of("Qwen/Qwen3-VL-8B-Instruct", **flags)
    assert caught.value.field == field


def test_error_for_max_num_batched_tokens_below_an_image_quotes_vllms_message(plan_of):
    with pytest.raises(DeploymentError, match=r"max_tokens_per_mm_item \(16384\) is larger than"):
        plan_of("Qwen/Qwen3-VL-8B-Instruct", disable_chunked_mm_input=True, max_num_batched_tokens=4096)


@pytest.mark.parametrize(
    ("model", "flags", "field"),
    [
        (
            "stepfun-ai/Step-3.7-Flash",
            {"mm_processor_kwargs": '{"max_patches": 4}'},
            "--mm-processor-kwargs",
        ),
    ],
)
def test_multimodal_flag_needs_model_with_known_image_size(plan_of, model, flags, field):
    with pytest.raises(DeploymentError) as caught:
        plan_of(model, **flags)
    assert caught.value.field == field


def test_image_limit_for_a_text_model_adds_a_note_and_changes_no_bytes(plan_of):
    """vLLM starts: a text model has no multimodal_config."""
    plain = plan_of("meta-llama/Meta-Llama-3.1-8B")
    given = plan_of("meta-llama/Meta-Llama-3.1-8B", limit_mm_per_prompt='{"image": 1}')
    assert given.rank == plain.rank
    assert any("--limit-mm-per-prompt changes nothing" in note for note in given.notes)
    with pytest.raises(DeploymentError):
        plan_of("meta-llama/Meta-Llama-3.1-8B", limit_mm_per_prompt='{"image": -1}')


def test_image_limit_with_unknown_image_size_adds_note(plan_of):
    plan = plan_of("stepfun-ai/Step-3.7-Flash", tensor_parallel_size=4, limit_mm_per_prompt='{"image": 1}')
    assert any("how large pictures of Step3p7ForConditionalGeneration are" in note for note in plan.notes)


def test_data_parallel_encoder_ranks_hold_whole_towers(plan_of):
    split = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", tensor_parallel_size=2)
    whole = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", tensor_parallel_size=2, mm_encoder_tp_mode="data")
    assert whole.rank.weights_bytes > split.rank.weights_bytes + 0.3e9


def test_model_runner_decides_which_pipeline_stages_hold_the_vision_tower(plan_of):
    """0.19.0's first model runner encodes on each stage in its profile run, 0.29 and later on the first."""
    found = {}
    for version in ("0.19.0", "0.32.0"):
        flags = {"engine_version": version, "max_num_seqs": 8}
        alone = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", **flags)
        text = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", language_model_only=True, **flags)
        towers = alone.rank.weights_bytes - text.rank.weights_bytes
        parts = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", pipeline_parallel_size=2, **flags).ranks
        bare = plan_of(
            "Qwen/Qwen2.5-VL-7B-Instruct", pipeline_parallel_size=2, language_model_only=True, **flags
        )
        for part, without in zip(parts, bare.ranks, strict=True):
            assert part.weights_bytes - without.weights_bytes == pytest.approx(towers, rel=0.01)
        found[version] = [
            part.activation_bytes - without.activation_bytes
            for part, without in zip(parts, bare.ranks, strict=True)
        ]
    assert min(found["0.19.0"]) > GIB
    assert found["0.32.0"][0] > GIB > found["0.32.0"][1]


def profile_of(config: dict, version: str = "0.32.0", **flags):
    asked = deployment_of({"engine": "vllm", "engine_version": version, "gpu": "h100-80g", **flags})
    architecture = architecture_of(config)
    return architecture, complete(asked, architecture, "bfloat16")


def test_vllm_version_decides_how_many_gemma_4_video_frames_are_encoded_at_once():
    """A video has 32 frames of 70 embeddings, each with eight more (models/gemma4_mm.py).

    Up to 0.21, vLLM encodes one frame at a time with its one-hot positions; later versions encode all that fit.
    """
    widths = {}
    for version in ("0.20.1", "0.22.0", "0.32.0"):
        architecture, chosen = profile_of(
            GEMMA4_SOUND, version, max_num_batched_tokens=8192, max_model_len=8192
        )
        found = profiled(architecture, chosen)
        assert (found.modality, found.tokens, found.count, found.budget) == ("video", 2496, 3, 8192)
        assert found.patches == 32 * 70 * 9
        widths[version] = encoder.encoding(architecture, chosen).peak
    assert widths["0.20.1"] < widths["0.32.0"] < widths["0.22.0"]
    one, many = 630 * 2 * 10_240 * 10, 3 * 32 * 630
    assert widths["0.20.1"] - one == many * 2 * (768 + 768)  # what came, and what the layers made of all
    assert widths["0.22.0"] < 0.1 * chosen.device_memory
    architecture, chosen = profile_of(GEMMA4_SOUND, limit_mm_per_prompt='{"video": 0}', max_model_len=8192)
    assert profiled(architecture, chosen).modality == "audio"


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("{}", {"vision", "audio"}),
        ('{"image": 0}', {"vision", "audio"}),
        ('{"image": 0, "video": 0}', {"audio"}),
        ('{"audio": 0}', {"vision"}),
        ('{"image": 0, "video": 0, "audio": 0}', set()),
    ],
)
def test_tower_of_a_disabled_modality_such_as_images_is_not_planned(limit, left):
    """vLLM marks each tower and its projector with its own modalities (_mark_tower_model)."""
    held = tensors_of(architecture_of(GEMMA4_SOUND), Deployment(**ON_GPU, limit_mm_per_prompt=limit))
    names = {name for name in ("vision", "audio") for tensor in held if f"{name}_tower" in tensor.name}
    projected = {name for name in ("vision", "audio") for tensor in held if f"embed_{name}" in tensor.name}
    parameters = {tensor.role for tensor in held if tensor.is_parameter}
    assert projected == left == parameters & {"vision", "audio"}
    assert names >= left


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_qwen3_vl_deepstack_buffers_grow_with_the_tokens_of_a_step(plan_of, tokens):
    """Published starts of Qwen3-VL with a hidden size of 2,048 had 0.024 and 0.095 GiB more weights."""
    plan = plan_of("Qwen/Qwen3-VL-8B-Instruct", max_num_batched_tokens=tokens)
    (term,) = [term for term in plan.terms if term.name == "weights.step_buffers"]
    assert term.value == 3 * tokens * 4096 * 2
    less = plan_of("Qwen/Qwen3-VL-8B-Instruct", max_num_batched_tokens=tokens - 512)
    assert plan.rank.weights_bytes - less.rank.weights_bytes == 3 * 512 * 4096 * 2


def test_pipeline_ranks_without_the_vision_tower_have_no_deepstack_buffers(plan_of):
    texts = plan_of("Qwen/Qwen3-VL-8B-Instruct", limit_mm_per_prompt='{"image": 0, "video": 0}')
    assert not [term for term in texts.terms if term.name == "weights.step_buffers"]
    more, less = (
        plan_of("Qwen/Qwen3-VL-8B-Instruct", pipeline_parallel_size=2, max_num_batched_tokens=tokens).ranks
        for tokens in (8192, 4096)
    )
    grown = [big.weights_bytes - small.weights_bytes for big, small in zip(more, less, strict=True)]
    assert grown == [3 * 4096 * 4096 * 2] * 2  # vLLM loads the tower on every stage
