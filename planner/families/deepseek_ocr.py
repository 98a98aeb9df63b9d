"""DeepSeek-OCR and DeepSeek-OCR-2: SAM, a second vision tower and a DeepSeek-V2 decoder.

Shapes follow the models' remote code. Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import TOP, joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads


def ocr2(t: Tensors, config: Mapping[str, Any]) -> int:
    """Add the tensors of DeepSeek-OCR-2's vision tower and return its output width.

    The tower is SAM ViT-B, three convolutions and a Qwen2-0.5B whose 256 (or 144) learned queries read the
    image. All sizes are constants in the model's remote code (deepencoderv2).
    """
    if config.get("model_name") != "deepencoderv2":
        raise UnsupportedArchitecture(
            f"{shown(config.get('model_name'))} is not supported; only deepencoderv2 is",
            field="vision_config.model_name",
        )
    sam(t, 896)
    at, dims = "model.qwen2_model", Heads(896, 14, 2, 64)
    for i in range(24):
        here = f"{at}.model.model.layers.{i}"
        t.attention(f"{here}.self_attn", dims, bias=True)
        t.gated_mlp(f"{here}.mlp", dims.hidden, 4864)
        t.layer_norms(here, dims.hidden)
    t.norm(f"{at}.model.model.norm", dims.hidden)
    t.embedding(f"{at}.query_768", 144, dims.hidden)
    t.embedding(f"{at}.query_1024", 256, dims.hidden)
    return dims.hidden


def ocr(t: Tensors, config: Mapping[str, Any]) -> int:
    """Add the tensors of DeepSeek-OCR's vision tower and return its output width.

    CLIP-L reads the output of SAM ViT-B, and the outputs of both are concatenated. The remote code
    (deeplip_b_l) fixes all sizes.
    """
    if config.get("model_name") != "deeplip_b_l":
        raise UnsupportedArchitecture(
            f"{shown(config.get('model_name'))} is not supported; only deeplip_b_l is",
            field="vision_config.model_name",
        )
    sam(t, 1024)
    before = len(t.specs)
    hidden = towers.clip(t, "model.vision_model", {}, {**towers.LLAVA_CLIP, "image_size": 224})
    t.specs[before:] = [spec for spec in t.specs[before:] if ".post_layernorm." not in spec.name]
    return 2 * hidden


def sam(t: Tensors, width: int) -> None:
    """Add the tensors of SAM ViT-B and three convolutions, the last of which has ``width`` outputs."""
    at, hidden, layers, size = "model.sam_model", 768, 12, 64
    towers.conv(t, f"{at}.patch_embed.proj", (hidden, 3, 16, 16), True)
    t.add(f"{at}.pos_embed", (1, 64, 64, hidden), "vision", "ImageEncoderViT")
    for i in range(layers):
        here = f"{at}.blocks.{i}"
        t.norms(here, hidden, "norm1", "norm2", kind="layer")
        t.linear(f"{here}.attn.qkv", 3 * hidden, hidden, bias=True)
        t.linear(f"{here}.attn.proj", hidden, hidden, bias=True)
        # Four layers attend to the whole image of 64 x 64 patches, the others to windows of 14 x 14 patches.
        places = 64 if i in (2, 5, 8, 11) else 14
        for side in "hw":
            t.add(f"{here}.attn.rel_pos_{side}", (2 * places - 1, size), "vision", "Attention")
        t.plain_mlp(f"{here}.mlp", hidden, 4 * hidden, bias=True, names=("lin1", "lin2"))
    for name, out, into, kernel in (
        ("neck.0", 256, hidden, 1), ("neck.2", 256, 256, 3), ("net_2", 512, 256, 3), ("net_3", width, 512, 3),
    ):  # fmt: skip
        towers.conv(t, f"{at}.{name}", (out, into, kernel, kernel), False)
    t.norms(f"{at}.neck", 256, "1", "3", kind="layer")


def deepseek_ocr(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of DeepSeek-OCR or DeepSeek-OCR-2 from its checked config.

    The older DeepSeek-VL2 has the same model_type and is refused: its tower comes from the package timm, so
    config.json does not state the tower's shapes.
    """
    names = fields.raw("architectures")
    if names not in (["DeepseekOCRForCausalLM"], ["DeepseekOCR2ForCausalLM"]):
        raise UnsupportedArchitecture(
            f"{shown(names)} is not supported; of the models with this model_type, only DeepSeek-OCR and "
            "DeepSeek-OCR-2 are (config.json does not state the shapes of DeepSeek-VL2's tower, a timm model)",
            field="architectures",
        )
    config = fields.mapping("language_config")
    fields.ignore(*fields.config)
    text = text_of(fields, "deepseek_v2", config)
    t = Tensors("vision")
    first = names == ["DeepseekOCRForCausalLM"]
    hidden = (ocr if first else ocr2)(t, vision_of(fields))
    t.role = "projector"
    t.linear("model.projector.layers", text.hidden_size, hidden, bias=True)
    if first:
        t.add("model.image_newline", (text.hidden_size,), "projector", "DeepseekOCRModel")
    t.add("model.view_seperator", (text.hidden_size,), "projector", "DeepseekOCR2Model")
    return joined(text, model_type, str(names[0]), t, "model.")


FAMILIES = {"deepseek_vl_v2": Family(deepseek_ocr, ignored=TOP, files=RENAMED)}
