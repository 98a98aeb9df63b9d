"""Vision-language models of a SigLIP tower and a linear connector: PaliGemma, Idefics 3, SmolVLM, LFM2-VL.

Shapes follow transformers 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt, prod
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, shown

# Top-level config fields that determine no tensor shape, such as token ids and training options. Nested
# objects are listed too, because the builder functions read their fields separately.
_TOP = (
    "text_config", "vision_config", "image_token_id", "image_token_index", "video_token_id", "vocab_size",
    "hidden_size", "ignore_index", "projector_hidden_act", "use_image_special_tokens", "encoder_patch_size",
    "max_image_tokens", "min_image_tokens", "max_num_tokens_per_image", "max_tiles", "min_tiles", "tile_size",
    "do_image_splitting", "use_thumbnail", "max_pixels_tolerance", "vision_feature_select_strategy",
    "vision_feature_layer",
)  # fmt: skip


def _text(fields: Fields, default: str, types: tuple[str, ...], tied: bool) -> Architecture:
    """Return the architecture of the language model in the config field ``text_config``.

    Its model_type must be one of ``types``; ``default`` is the type if the config states none.
    """
    config = fields.mapping("text_config") or {}
    kind = config.get("model_type", default)
    if kind not in types:
        raise UnsupportedArchitecture(
            f"{shown(kind)} is not one of {', '.join(types)}", field="text_config.model_type"
        )
    # Bidirectional attention among the tokens of image and prompt changes neither tensors nor cache size.
    unused = ("use_bidirectional_attention", "num_image_tokens")
    kept = {name: value for name, value in config.items() if name not in unused}
    return text_of(fields, kind, kept, tied=tied)


def _tower(t: Tensors, at: str, fields: Fields, sizes: Mapping[str, int], *, head: bool) -> int:
    """Add the tensors of a SigLIP tower and return its hidden size.

    ``head`` is the default of vision_use_head.
    """
    vision = {"vision_use_head": head, **vision_of(fields)}
    return towers.siglip(t, at, vision, {**towers.SIGLIP, **sizes})


def paligemma(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a PaliGemma model from its checked config."""
    text = _text(fields, "gemma", ("gemma", "gemma2"), True)
    t = Tensors("vision")
    hidden = _tower(t, "model.vision_tower", fields, {}, head=False)
    t.role = "projector"
    width = Fields(vision_of(fields)).integer(
        "projection_dim", fields.integer("projection_dim", 2048, limit="width"), limit="width"
    )
    t.linear("model.multi_modal_projector.linear", width, hidden, bias=True)
    return joined(text, model_type, "PaliGemmaForConditionalGeneration", t)


def _idefics3(name: str, patch: int) -> Any:
    """Return the function that builds the architecture of an Idefics 3 class.

    ``name`` is the class; ``patch`` is the default of patch_size.
    """

    def build(fields: Fields, model_type: str) -> Architecture:
        text = _text(fields, "llama", ("llama",), False)
        t = Tensors("vision")
        sizes = {"intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": patch}
        hidden = _tower(t, "model.vision_model", fields, sizes, head=False)
        t.role = "projector"
        scale = fields.integer("scale_factor", 2, limit="width")
        t.linear("model.connector.modality_projection.proj", text.hidden_size, hidden * scale * scale)
        return joined(text, model_type, name, t, "model.text_model.")

    return build


def lfm2_vl(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an LFM2-VL model from its checked config."""
    text = _text(fields, "lfm2", ("lfm2", "lfm2_moe"), True)
    vision = Fields(vision_of(fields))
    patches = vision.integer("num_patches", 256, limit="positions")
    if isqrt(patches) ** 2 != patches:
        raise UnsupportedArchitecture(f"{patches} is not a square", field="vision_config.num_patches")
    t = Tensors("vision")
    side = isqrt(patches) * vision.integer("patch_size", 16, limit="width")
    hidden = _tower(t, "model.vision_tower", fields, {"image_size": side}, head=True)
    # SigLIP 2 embeds flattened patches with a matrix instead of a convolution.
    t.specs = [
        replace(spec, shape=(hidden, prod(spec.shape[1:])), module_class="Linear")
        if spec.name.endswith("patch_embedding.weight")
        else spec
        for spec in t.specs
    ]
    t.role = "projector"
    at, factor = "model.multi_modal_projector", fields.integer("downsample_factor", 2, limit="width")
    wide, bias = (
        fields.integer("projector_hidden_size", 2560, limit="width"),
        fields.boolean("projector_bias", True),
    )
    joint = hidden * factor * factor
    if fields.boolean("projector_use_layernorm", True):
        t.norm(f"{at}.layer_norm", joint, "layer")
    t.connector(at, joint, wide, text.hidden_size, bias=bias)
    return joined(text, model_type, "Lfm2VlForConditionalGeneration", t)


def cohere2_vision(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Cohere2 Vision model from its checked config."""
    text = _text(fields, "cohere2", ("cohere2",), True)
    t = Tensors("vision")
    hidden = _tower(t, "model.vision_tower", fields, {"image_size": 512, "num_hidden_layers": 27}, head=True)
    t.role = "projector"
    at, factor = "model.multi_modal_projector", fields.integer("downsample_factor", 2, limit="width")
    inner = fields.integer("alignment_intermediate_size", 36864, limit="width")
    t.linear(f"{at}.linear_1", inner, hidden * factor * factor, bias=True)
    t.linear(f"{at}.linear_2", text.hidden_size, inner // 2, bias=True)
    return joined(text, model_type, "Cohere2VisionForConditionalGeneration", t)


FAMILIES = {
    "paligemma": Family(paligemma, ignored=_TOP, files=RENAMED),
    "idefics3": Family(_idefics3("Idefics3ForConditionalGeneration", 32), ignored=_TOP, files=RENAMED),
    "smolvlm": Family(_idefics3("SmolVLMForConditionalGeneration", 32), ignored=_TOP, files=RENAMED),
    "lfm2_vl": Family(lfm2_vl, ignored=_TOP, hf="recurrent", files=RENAMED),
    "cohere2_vision": Family(cohere2_vision, ignored=_TOP, files=RENAMED),
}
