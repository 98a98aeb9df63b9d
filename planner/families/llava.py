"""LLaVA, Pixtral, Mistral Small 3.1 and models like them: a vision tower, two linear layers and a decoder.

Shapes follow transformers 5.19 / 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common, image_limits, towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import TOP, joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.vision import Vision

CLIP = "openai/clip-vit-large-patch14-336"  # vision tower of the first LLaVA files


# Defaults of LlamaConfig and LlavaConfig (transformers 5.19) for fields that published files leave out
_LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LlavaVariant:
    """Options by which a LLaVA model type differs from LLaVA 1.5.

    Attributes:
        class_name: the model's class in transformers.
        texts: model types that the language model may have; the first is the default.
        towers: model types that the vision tower may have; the first is the default.
        strategy: default of vision_feature_select_strategy.
        either: whether the head is also tied if only the config of the language model says so.
        tiles: function (config, image limits of one tile, side of a tile in pixels) -> image limits of the
            model; None if images are not cut into tiles.
    """

    class_name: str
    texts: tuple[str, ...] = ("llama", "mistral", "qwen2")
    towers: tuple[str, ...] = ("clip_vision_model", "siglip_vision_model", "pixtral")
    strategy: str = "default"
    either: bool = True
    tiles: Callable[[Fields, Vision | None, int], Vision | None] | None = None

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of a LLaVA model of this type from its checked config.

        LLaVA-NeXT and LLaVA-OneVision cut an image into several tiles, and learn an embedding for the end of a
        line of patches.
        """
        t = Tensors("vision")
        text = _llava_text(fields, self)
        vision = vision_of(fields)
        kind = vision.get("model_type", self.towers[0])
        if kind not in self.towers:
            raise UnsupportedArchitecture(
                f"{shown(kind)} is not supported; only {', '.join(self.towers)} are",
                field="vision_config.model_type",
            )
        # without vision_config the tower is CLIP large; fields missing in a vision_config have the defaults of
        # CLIPVisionConfig
        defaults = towers.CLIP if vision else towers.LLAVA_CLIP
        seen: Vision | None
        if kind == "clip_vision_model":
            hidden = towers.clip(t, "model.vision_tower", vision, defaults)
            seen = image_limits.square("clip", vision, defaults, text.hidden_size)
        elif kind == "pixtral":
            hidden = towers.pixtral(t, "model.vision_tower", vision)
            seen = image_limits.pixtral(vision, towers.PIXTRAL, text.hidden_size, 1)
        else:
            hidden = towers.siglip(t, "model.vision_tower", vision)
            seen = image_limits.square("siglip", vision, towers.SIGLIP, text.hidden_size)
        t.role = "projector"
        bias = fields.boolean("multimodal_projector_bias", True)
        layers = fields.raw("vision_feature_layer")
        times = len(layers) if isinstance(layers, list) else 1
        # the outputs of all tower layers stay in memory until the layers in vision_feature_layer are selected
        if seen is not None and isinstance(layers, list):
            seen = replace(seen, pooled=1 + Fields(vision).integer("num_hidden_layers", 12, limit="layers"))
        at, width = "model.multi_modal_projector", text.hidden_size
        t.connector(at, hidden * times, width, width, bias=bias)
        whole = (fields.raw("vision_feature_select_strategy") or self.strategy) != "default"
        if whole == (kind == "clip_vision_model") and kind != "pixtral":
            seen = None  # limits are known only for CLIP without class token and for SigLIP with all patches
        if self.tiles is not None:
            t.add("model.image_newline", (text.hidden_size,), "projector", "LlavaNextModel")
            size = Fields(vision).integer("image_size", defaults["image_size"], limit="width")
            seen = self.tiles(fields, seen, size)
        return joined(text, model_type, self.class_name, t, vision=seen)


def _llava_text(fields: Fields, variant: LlavaVariant) -> Architecture:
    """Return the architecture of a LLaVA model's language model.

    The first published configs have Llama's fields at the top level, and state only the name of the tower, not
    its sizes.
    """
    config = fields.mapping("text_config")
    if config is None:
        tower = fields.raw("mm_vision_tower")
        if tower != CLIP:
            raise UnsupportedArchitecture(
                f"{shown(tower)} is not supported; only {CLIP} is", field="mm_vision_tower"
            )
        if fields.raw("mm_projector_type") != "mlp2x_gelu":
            raise UnsupportedArchitecture(
                f"{shown(fields.raw('mm_projector_type'))} is not supported; only mlp2x_gelu is",
                field="mm_projector_type",
            )
        config = {
            k: v for k, v in fields.config.items() if not k.startswith(("mm_", "tune_", "freeze_", "use_mm"))
        }
        for name in ("image_aspect_ratio", "unfreeze_mm_vision_tower", "architectures", *image_limits.FILES):
            config.pop(name, None)
        fields.ignore(*fields.config)
        return text_of(fields, "llama", config, either=True)
    kind = config.get("model_type", variant.texts[0])
    if kind not in variant.texts:
        raise UnsupportedArchitecture(
            f"{shown(kind)} is not supported; the language model must be one of {', '.join(variant.texts)}",
            field="text_config.model_type",
        )
    return text_of(fields, kind, {**_LLAMA, **config} if kind == "llama" else config, either=variant.either)


def _tiles_and_frames(fields: Fields, vision: Vision | None, size: int) -> None:
    """Return None, because the image limits of LLaVA-NeXT-Video are not known in advance.

    vLLM profiles as many video frames as fit into a prompt (models/llava_next_video.py).
    """
    fields.ignore("spatial_pool_mode", "spatial_pool_stride", "video_seq_length")


# Defaults of Ministral3Config (transformers 5.19)
_MINISTRAL3 = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
    "sliding_window": None,
}  # fmt: skip


# Text defaults of LightOnOcrConfig (transformers 5.19, configuration_lighton_ocr.py)
_LIGHTON = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960,
}  # fmt: skip


def lighton(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of LightOnOCR: Mistral 3's tower and connector in front of a Qwen3 model."""
    if fields.raw("text_config") is None:
        fields.config = {**fields.config, "text_config": _LIGHTON}
    return mistral3(
        fields, model_type, class_name="LightOnOcrForConditionalGeneration", tied=True,
        modules=("model.vision_encoder", "model.vision_projection"),
    )  # fmt: skip


def mistral3(
    fields: Fields, model_type: str, *, class_name: str = "Mistral3ForConditionalGeneration",
    tied: bool = False,
    modules: tuple[str, str] = ("model.vision_tower", "model.multi_modal_projector"),
) -> Architecture:  # fmt: skip
    """Return the architecture of Mistral Small 3.1, 3.2 or a similar model.

    Its Pixtral tower is followed by a projector that merges neighbouring patches. ``tied`` is the
    default of tie_word_embeddings. ``modules`` are the names of tower and projector.
    """
    config = fields.mapping("text_config")
    kind = "mistral" if config is None else config.get("model_type", "mistral")
    if kind not in ("mistral", "ministral3", "qwen3"):
        raise UnsupportedArchitecture(
            f"{shown(kind)} is not supported; the language model must be mistral, ministral3 or qwen3",
            field="text_config.model_type",
        )
    if kind == "ministral3":  # the tensors are Mistral's, the defaults are those of Ministral3Config
        config = {**_MINISTRAL3, **(config or {})}
    # Published files do not state tie_word_embeddings, but store an output head. With this head,
    # Mistral-Small-3.1 has its 24.0 B parameters.
    text = text_of(fields, "qwen3" if kind == "qwen3" else "mistral", config, tied=tied)
    common.only(fields, vision_feature_layer=-1)  # -1 selects the vision tower's last layer
    t = Tensors("vision")
    vision = vision_of(fields)
    defaults = towers.PIXTRAL if vision else {**towers.PIXTRAL, "patch_size": 14, "image_size": 1540}
    tower, at = modules
    hidden = towers.pixtral(t, tower, vision, defaults)
    merge = fields.integer("spatial_merge_size", 2, limit="width")
    t.role = "projector"
    bias = fields.boolean("multimodal_projector_bias", False)
    t.norm(f"{at}.norm", hidden)
    t.linear(f"{at}.patch_merger.merging_layer", hidden, hidden * merge * merge)
    t.connector(at, hidden, text.hidden_size, text.hidden_size, bias=bias)
    seen = image_limits.pixtral(vision, defaults, text.hidden_size, merge, fields)
    return joined(text, model_type, class_name, t, vision=seen)


_family = partial(Family, ignored=TOP, files=RENAMED)
FAMILIES = {
    "llava": _family(
        LlavaVariant("LlavaForConditionalGeneration").build, first_class="LlavaLlamaForCausalLM",
    ),
    "llava_next": _family(
        LlavaVariant(
            "LlavaNextForConditionalGeneration", ("llama", "mistral", "qwen2", "granite"),
            ("clip_vision_model", "siglip_vision_model"), either=False, tiles=image_limits.tiles,
        ).build
    ),
    "llava_next_video": _family(
        LlavaVariant(
            "LlavaNextVideoForConditionalGeneration", ("llama", "mistral", "qwen2"), ("clip_vision_model",),
            tiles=_tiles_and_frames,
        ).build
    ),
    "llava_onevision": _family(
        LlavaVariant(
            "LlavaOnevisionForConditionalGeneration", ("qwen2", "llama", "mistral", "granite"),
            ("siglip_vision_model", "clip_vision_model"), "full", either=False, tiles=image_limits.onevision,
        ).build
    ),
    "mistral3": _family(mistral3, other_classes=("LightOnOCRForConditionalGeneration",)),
    "lighton_ocr": _family(lighton, other_classes=("LightOnOCRForConditionalGeneration",)),
}  # fmt: skip
