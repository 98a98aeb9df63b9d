"""Qwen2-VL to Qwen3.5 and OpenCUA, which read images and videos.

Shapes follow transformers 5.19 / 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tonnage.planner.families import image_limits, towers
from tonnage.planner.families.family import NO_TRAITS, RENAMED, Family, VLLMTraits
from tonnage.planner.families.multimodal import TOP, joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.vision import Tower


def qwen(
    fields: Fields, model_type: str, *, class_name: str, text_type: str, tower: Tower,
    kv_heads: int | None = None, deepstack: bool = True, either: bool = False,
) -> Architecture:  # fmt: skip
    """Return the architecture of a Qwen2-VL to Qwen3.5 model.

    The published configs of Qwen2-VL and Qwen2.5-VL have the language model's fields at the top level.

    Args:
        fields: the config.
        model_type: type of the model.
        class_name: the model's class in transformers.
        text_type: model_type of the language model.
        tower: version of the vision tower, such as ``qwen2_5``.
        kv_heads: default of num_key_value_heads; None means the default of the language model.
        deepstack: whether a qwen3 tower also gives the language model the outputs of some of its layers.
        either: whether the head is also tied if only the config of the language model says so.
    """
    config = fields.mapping("text_config")
    if config is None:
        config = {
            k: v for k, v in fields.config.items() if k not in (*TOP, "architectures") or k == "vocab_size"
        }
        fields.ignore(*fields.config)
    if kv_heads is not None:
        config = {"num_key_value_heads": kv_heads, **config}
    text = text_of(fields, text_type, config, either=either)
    t = Tensors("vision")
    vision = vision_of(fields)
    towers.qwen(t, "model.visual", vision, tower, deepstack=deepstack)
    seen = image_limits.qwen(fields, vision, tower, text.hidden_size, deepstack=deepstack)
    return joined(text, model_type, class_name, t, vision=seen)


def _qwen_row(name: str, text_type: str, tower: Tower, vllm: VLLMTraits = NO_TRAITS, **more: Any) -> Family:
    """Return the ``Family`` entry of a Qwen vision-language model.

    ``more`` are further arguments of the builder function ``qwen``.
    """
    class_name = f"{name}ForConditionalGeneration"
    build = partial(qwen, class_name=class_name, text_type=text_type, tower=tower, **more)
    return Family(build, ignored=TOP, vllm=vllm, files=RENAMED)


_QWEN3_5 = VLLMTraits(float32_states=True, one_mrope_length=True)


FAMILIES = {
    "opencua": _qwen_row("OpenCUA", "qwen2", "qwen2_5", kv_heads=8),
    "qwen2_vl": _qwen_row("Qwen2VL", "qwen2", "qwen2", kv_heads=8, either=True),
    "qwen2_5_vl": _qwen_row("Qwen2_5_VL", "qwen2", "qwen2_5", kv_heads=8, either=True),
    "qwen3_vl": _qwen_row("Qwen3VL", "qwen3", "qwen3", VLLMTraits(one_mrope_length=True)),
    "qwen3_vl_moe": _qwen_row(
        "Qwen3VLMoe", "qwen3_moe", "qwen3", VLLMTraits(one_mrope_length=True), kv_heads=16
    ),
    "qwen3_5": _qwen_row("Qwen3_5", "qwen3_5_text", "qwen3", _QWEN3_5, deepstack=False),
    "qwen3_5_moe": _qwen_row("Qwen3_5Moe", "qwen3_5_moe_text", "qwen3", _QWEN3_5, deepstack=False),
}  # fmt: skip
