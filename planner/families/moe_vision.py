"""Vision-language models with a mixture-of-experts decoder: Llama 4, Kimi, MiniMax-M3 and Step-3.7.

Shapes follow transformers 5.19 / 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from functools import partial

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import image_limits, towers
from tonnage.planner.families.family import RENAMED, Family, VLLMTraits
from tonnage.planner.families.multimodal import TOP, joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, shown


def llama4(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Llama 4 from its checked config."""
    # transformers' multimodal class ignores tie_word_embeddings: the head is never tied
    text = text_of(fields, "llama4_text", fields.mapping("text_config"), tie=False)
    t = Tensors("vision")
    vision = vision_of(fields)
    width = towers.llama4(t, "vision_model", vision)
    t.role = "projector"
    t.linear("multi_modal_projector.linear_1", text.hidden_size, width)
    seen = image_limits.llama4(fields, vision, text.hidden_size)
    name = "Llama4ForConditionalGeneration"
    return joined(text, model_type, name, t, "language_model.", old="", vision=seen)


def kimi_vl(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Kimi-VL model from its checked config."""
    # In the model's remote code, the language model's config determines whether the head is tied.
    text = text_of(fields, "deepseek_v3", fields.mapping("text_config"), tie=False)
    t = Tensors("vision")
    vision = vision_of(fields)
    hidden = towers.moonvit_2d(t, "vision_tower", vision)
    if vision.get("merge_kernel_size", [2, 2]) != [2, 2]:
        raise UnsupportedArchitecture(
            f"{shown(vision['merge_kernel_size'])} is not supported; only [2, 2] is",
            field="vision_config.merge_kernel_size",
        )
    t.role = "projector"
    t.norm("multi_modal_projector.pre_norm", hidden, "layer")
    t.connector("multi_modal_projector", 4 * hidden, 4 * hidden, text.hidden_size)
    seen = image_limits.kimi_vl(fields, vision, text.hidden_size)
    name = "KimiVLForConditionalGeneration"
    return joined(text, model_type, name, t, "language_model.", old="", vision=seen)


def kimi(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Kimi-K2.5 model from its checked config."""
    text = text_of(fields, "deepseek_v3", fields.mapping("text_config"), tied=True)
    t = Tensors("vision")
    vision = vision_of(fields)
    hidden = towers.moonvit(t, "model.vision_tower", vision)
    t.role = "projector"
    kernel = vision.get("merge_kernel_size", [2, 2])
    if (
        not isinstance(kernel, list)
        or len(kernel) != 2
        or not all(type(k) is int and 0 < k < 64 for k in kernel)
    ):
        raise ConfigError(
            f"{shown(kernel)} is not two integers from 1 to 63", field="vision_config.merge_kernel_size"
        )
    if fields.integer("projection_hidden_size", hidden, limit="width") != hidden:
        raise ConfigError(f"must be the vision tower's hidden size, {hidden}", field="projection_hidden_size")
    merged = hidden * kernel[0] * kernel[1]
    t.norm("model.mm_projector.pre_norm", hidden, "layer")
    t.connector("model.mm_projector", merged, merged, text.hidden_size, names=("in_proj", "out_proj"))
    seen = image_limits.kimi_k25(fields, vision, text.hidden_size) if kernel == [2, 2] else None
    return joined(text, model_type, "Kimi_K25ForConditionalGeneration", t, vision=seen)


def minimax(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal MiniMax-M3 from its checked config."""
    text = text_of(fields, "minimax_m3", fields.mapping("text_config"), either=True)
    t = Tensors("vision")
    vision = vision_of(fields)
    hidden = towers.minimax(t, "model.vision_tower", vision)
    t.role = "projector"
    at = "model.multi_modal_projector"
    wide = fields.integer("projector_hidden_size", text.hidden_size, limit="width")
    merged = fields.integer("merged_hidden_size", 4 * text.hidden_size, limit="width")
    bias = fields.boolean("multimodal_projector_bias", True)
    for name, out, into in (
        ("linear_1", wide, hidden), ("linear_2", text.hidden_size, wide),
        ("merge_linear_1", wide, merged), ("merge_linear_2", text.hidden_size, wide),
    ):  # fmt: skip
        t.linear(f"{at}.{name}", out, into, bias=bias)
    seen = image_limits.minimax(fields, vision, text.hidden_size)
    return joined(text, model_type, "MiniMaxM3SparseForConditionalGeneration", t, vision=seen)


# Text defaults of Step3p7Config (transformers 5.23, configuration_step3p7.py). The class uses these defaults
# for a file without text_config; it does not read text fields at the file's top level.
_STEP = {
    "vocab_size": 128_815, "hidden_size": 4096, "intermediate_size": 11_264, "num_hidden_layers": 45,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65_536,
    "num_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
    "first_k_dense_replace": 3, "sliding_window": 512,
}  # fmt: skip


def step(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Step-3.7 from its checked config."""
    config = fields.mapping("text_config")
    if config is None:
        for name, default in _STEP.items():
            stated = fields.config.get(name, default)
            padded = -(-default // 128) * 128 if name == "vocab_size" else default
            if stated not in (default, padded):
                raise UnsupportedArchitecture(
                    f"{shown(stated)} at the top level is ignored: transformers reads only text_config and "
                    f"uses {default}",
                    field=name,
                    hint="move the field into text_config",
                )
        config = {**_STEP, "layer_types": fields.config.get("layer_types")}
        fields.ignore(*fields.config)
    text = text_of(fields, "step3p7_text", config)
    t = Tensors("vision")
    width = towers.step(t, "model.vision_model", vision_of(fields))
    t.role = "projector"
    t.linear(
        "model.multi_modal_projector", text.hidden_size, width, bias=fields.boolean("projector_bias", False)
    )
    return joined(text, model_type, "Step3p7ForConditionalGeneration", t)


_family = partial(Family, ignored=TOP, files=RENAMED)
FAMILIES = {
    "kimi_vl": _family(kimi_vl),
    "llama4": _family(llama4, every_expert=True, hf="chunked masks"),
    "kimi_k25": _family(kimi, first_class="KimiK25ForConditionalGeneration"),
    "minimax_m3_vl": _family(minimax),
    "step3p7": _family(
        step, first_class="Step3p7FlashForCausalLM", vllm=VLLMTraits(wide_router=True)
    ),
}  # fmt: skip
