"""Multimodal models: a vision or audio tower, and a text model that is built as its own model family.

The names of the text model's tensors get the prefix that they have in the multimodal model.

Shapes follow transformers 5.19 / 5.23, models/<family>/. The parameters of towers and projectors are counted
separately (``Architecture.tower_parameters``). Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common, gemma3n_towers, gemma4_towers, image_limits, towers
from tonnage.planner.families.family import NO_TRAITS, RENAMED, Family, VLLMTraits
from tonnage.planner.families.registry import build_text
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.model.vision import Tower, Vision

_TOP = (
    "image_token_id", "image_token_index", "video_token_id", "video_token_index", "vision_start_token_id",
    "vision_end_token_id", "vision_token_id", "boi_token_index", "eoi_token_index", "boi_token_id",
    "eoi_token_id",
    "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "audio_config", "mm_tokens_per_image",
    "vision_soft_tokens_per_image", "ignore_index", "image_seq_length", "media_placeholder_token_id",
    "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy", "text_config",
    "vision_config", "use_unified_vision_chunk", "video_placeholder", "language_model_only",
    "image_grid_pinpoints", "vision_aspect_ratio",
    "image_placeholder", "img_token_compression_config", "num_reward_heads", "process_image_mode",
    "projection_layer_norm_eps", "projection_hidden_size", "vocab_size", "vision_token_index",
    *image_limits.FILES,
)  # fmt: skip


def text_of(
    fields: Fields, text_type: str, config: Mapping[str, Any] | None, *, tie: bool = True, tied: bool = False,
    either: bool = False,
) -> Architecture:  # fmt: skip
    """Return the architecture of the language model inside a multimodal model.

    The head is tied if the multimodal config's tie_word_embeddings, or the default of its class, is true
    (transformers 5.19, modeling_utils.py).

    Args:
        fields: the config of the multimodal model.
        text_type: model_type of the language model.
        config: the language model's config; None raises ConfigError.
        tie: whether the multimodal config decides if the head is tied; if False, the language model's config
            decides.
        tied: default of tie_word_embeddings in the multimodal config class.
        either: whether the head is also tied if only the config of the language model says so.
    """
    if config is None:
        raise ConfigError("missing", field="text_config")
    if not tie:
        return build_text(config, text_type)
    tied = fields.boolean("tie_word_embeddings", tied)
    if either:
        tied = tied or config.get("tie_word_embeddings") is True
    elif "tie_word_embeddings" not in fields.config and config.get("tie_word_embeddings", tied) != tied:
        raise ConfigError(
            f"{not tied} contradicts the multimodal model, whose own field is missing and defaults to {tied}",
            field="text_config.tie_word_embeddings",
        )
    return build_text({**config, "tie_word_embeddings": tied}, text_type)


def _vision(fields: Fields) -> Mapping[str, Any]:
    """Return the object ``vision_config`` of config.json, empty without this field."""
    return fields.mapping("vision_config") or {}


def moved(specs: tuple[TensorSpec, ...], old: str, new: str) -> list[TensorSpec]:
    """Return the tensors ``specs``; where a name begins with ``old``, that prefix is replaced by ``new``."""

    def name(at: str) -> str:
        return new + at[len(old) :] if at.startswith(old) else at

    return [replace(s, name=name(s.name), tied_to=name(s.tied_to) if s.tied_to else None) for s in specs]


def joined(
    text: Architecture, model_type: str, class_name: str, t: Tensors, new: str = "model.language_model.",
    *, vision: Vision | None = None,
) -> Architecture:  # fmt: skip
    """Return the architecture of a multimodal model: its text model ``text`` and its tower's tensors ``t``.

    The tower's tensors come first. The text model's tensors follow, with the name prefix ``new``.
    """
    tensors = (*t.specs, *moved(text.tensors, "model.", new))
    return replace(
        text, model_type=model_type, class_name=class_name, tensors=tensors, recipe=None, vision=vision
    )


def gemma3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Gemma 3 from its checked config."""
    text = text_of(fields, "gemma3_text", fields.mapping("text_config"), tied=True)
    t = Tensors("vision")
    vision = _vision(fields)
    hidden = towers.siglip(t, "model.vision_tower", vision)
    t.role = "projector"
    at = "model.multi_modal_projector"
    t.add(
        f"{at}.mm_input_projection_weight", (hidden, text.hidden_size), "projector", "Gemma3MultiModalProjector"
    )
    t.norm(f"{at}.mm_soft_emb_norm", hidden)
    seen = image_limits.gemma3(fields, vision, text.hidden_size)
    return joined(text, model_type, "Gemma3ForConditionalGeneration", t, vision=seen)


def gemma3n(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Gemma 3n, which reads images and audio."""
    text = text_of(fields, "gemma3n_text", fields.mapping("text_config"), tied=True)
    fields.ignore("audio_soft_tokens_per_image")
    t = Tensors("vision")
    vision, sound = _vision(fields), fields.mapping("audio_config") or {}
    gemma3n_towers.vision(t, "model.vision_tower", vision)
    t.role = "audio"
    width = gemma3n_towers.audio(t, "model.audio_tower", sound)
    t.role = "projector"
    stated = Fields(vision).integer("hidden_size", gemma3n_towers.VISION_WIDTH, limit="width")
    gemma3n_towers.embedder(t, "model.embed_vision", vision, stated, text.hidden_size)
    gemma3n_towers.embedder(t, "model.embed_audio", sound, width, text.hidden_size)
    seen = image_limits.gemma3n(text.hidden_size)
    return joined(text, model_type, "Gemma3nForConditionalGeneration", t, vision=seen)


def gemma4(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Gemma 4, which reads images and may read audio."""
    text = text_of(fields, "gemma4_text", fields.mapping("text_config"), tied=True)
    t = Tensors()
    sound, seen = fields.mapping("audio_config"), None
    if fields.raw("vision_config") is not None:
        t.role = "vision"
        vision = _vision(fields)
        hidden = towers.gemma4(t, "model.vision_tower", vision)
        t.role = "projector"
        t.linear("model.embed_vision.embedding_projection", text.hidden_size, hidden)
        seen = image_limits.gemma4(fields, vision, text.hidden_size, sound is not None)
    if sound is not None:
        t.role = "audio"
        width = gemma4_towers.audio(t, "model.audio_tower", sound)
        t.role = "projector"
        t.linear("model.embed_audio.embedding_projection", text.hidden_size, width)
    return joined(text, model_type, "Gemma4ForConditionalGeneration", t, vision=seen)


_CLIP = "openai/clip-vit-large-patch14-336"  # vision tower of the first LLaVA files
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
        vision = _vision(fields)
        kind = vision.get("model_type", self.towers[0])
        if kind not in self.towers:
            raise UnsupportedArchitecture(f"{shown(kind)} is not supported", field="vision_config.model_type")
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
            seen = None  # limits are known only for CLIP without its class token, and SigLIP with all patches
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
        if tower != _CLIP:
            raise UnsupportedArchitecture(
                f"{shown(tower)} is not supported; only {_CLIP} is", field="mm_vision_tower"
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
            f"{shown(kind)} is not supported; language models of this type are {', '.join(variant.texts)}",
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
            f"{shown(kind)} is not supported; language models of this type are mistral, ministral3 and qwen3",
            field="text_config.model_type",
        )
    if kind == "ministral3":  # Mistral's tensors, with the config class's own defaults
        config = {**_MINISTRAL3, **(config or {})}
    # published files store an output head but do not state tie_word_embeddings (Mistral-Small-3.1: 24.0 B
    # parameters)
    text = text_of(fields, "qwen3" if kind == "qwen3" else "mistral", config, tied=tied)
    common.only(fields, vision_feature_layer=-1)  # -1 is the tower's last layer
    t = Tensors("vision")
    vision = _vision(fields)
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


def kimi_vl(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Kimi-VL model from its checked config."""
    # In the model's remote code, the language model's config determines whether the head is tied.
    text = text_of(fields, "deepseek_v3", fields.mapping("text_config"), tie=False)
    t = Tensors("vision")
    vision = _vision(fields)
    hidden = towers.moonvit_2d(t, "vision_tower", vision)
    if vision.get("merge_kernel_size", [2, 2]) != [2, 2]:
        raise UnsupportedArchitecture(
            f"{shown(vision['merge_kernel_size'])} is not supported; only [2, 2] is",
            field="vision_config.merge_kernel_size",
        )
    t.role = "projector"
    t.norm("multi_modal_projector.pre_norm", hidden, "layer")
    t.connector("multi_modal_projector", 4 * hidden, 4 * hidden, text.hidden_size)
    tensors = (*t.specs, *moved(text.tensors, "", "language_model."))
    return replace(
        text, model_type=model_type, class_name="KimiVLForConditionalGeneration", tensors=tensors, recipe=None,
        vision=image_limits.kimi_vl(fields, vision, text.hidden_size),
    )  # fmt: skip


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
            k: v for k, v in fields.config.items() if k not in (*_TOP, "architectures") or k == "vocab_size"
        }
        fields.ignore(*fields.config)
    if kv_heads is not None:
        config = {"num_key_value_heads": kv_heads, **config}
    text = text_of(fields, text_type, config, either=either)
    t = Tensors("vision")
    vision = _vision(fields)
    towers.qwen(t, "model.visual", vision, tower, deepstack=deepstack)
    seen = image_limits.qwen(fields, vision, tower, text.hidden_size, deepstack=deepstack)
    return joined(text, model_type, class_name, t, vision=seen)


def mllama(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Llama 3.2 from its checked config."""
    text = text_of(fields, "mllama_text_model", fields.mapping("text_config"))
    t = Tensors("vision")
    width = towers.mllama(t, "model.vision_model", _vision(fields))
    t.role = "projector"
    t.linear("model.multi_modal_projector", text.hidden_size, width, bias=True)
    return joined(text, model_type, "MllamaForConditionalGeneration", t)


def mllama_text(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Llama 3.2's text model: Llama with gated cross-attention layers.

    The K and V of these layers come from the image and are computed once per sequence.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    crossed = fields.raw("cross_attention_layers")
    if crossed is None:
        crossed = [3, 8, 13, 18, 23, 28, 33, 38]
    if not isinstance(crossed, list) or not all(type(i) is int and 0 <= i < layers for i in crossed):
        raise ConfigError(f"{shown(crossed)} is not a list of layer indices", field="cross_attention_layers")
    crossing = common.numbers_in(crossed)
    fields.ignore("dropout")
    t = Tensors()
    # the embedding has eight more rows than the head, for image tokens
    t.vocabulary("model.embed_tokens", vocab + 8, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        if i in crossing:
            t.attention(f"{at}.cross_attn", dims, qk_norm="head")
            t.add(f"{at}.cross_attn_attn_gate", (1,), "attention", "CrossAttentionDecoderLayer")
            t.add(f"{at}.cross_attn_mlp_gate", (1,), "attention", "CrossAttentionDecoderLayer")
            cache.append(CacheLayer(i, "cross", None, dims.kv_heads, dims.head_size))
        else:
            t.attention(f"{at}.self_attn", dims)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        t.gated_mlp(f"{at}.mlp", dims.hidden, inner)
        t.layer_norms(at, dims.hidden)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "MllamaForCausalLM", t, dims, tuple(cache), layers=layers, inner=inner, vocab=vocab
    )


def llama4(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Llama 4 from its checked config."""
    # transformers' multimodal class ignores tie_word_embeddings: the head is never tied
    text = text_of(fields, "llama4_text", fields.mapping("text_config"), tie=False)
    t = Tensors("vision")
    vision = _vision(fields)
    width = towers.llama4(t, "vision_model", vision)
    t.role = "projector"
    t.linear("multi_modal_projector.linear_1", text.hidden_size, width)
    tensors = (*t.specs, *moved(text.tensors, "", "language_model."))
    return replace(
        text, model_type=model_type, class_name="Llama4ForConditionalGeneration", tensors=tensors,
        vision=image_limits.llama4(fields, vision, text.hidden_size),
    )  # fmt: skip


def kimi(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Kimi-K2.5 model from its checked config."""
    text = text_of(fields, "deepseek_v3", fields.mapping("text_config"), tied=True)
    t = Tensors("vision")
    vision = _vision(fields)
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
    vision = _vision(fields)
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


def deepseek_ocr(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of DeepSeek-OCR or DeepSeek-OCR-2 from its checked config.

    The older DeepSeek-VL2 has the same model_type and is refused: its tower comes from the package timm, so
    config.json does not state the tower's shapes.
    """
    names = fields.raw("architectures")
    if names not in (["DeepseekOCRForCausalLM"], ["DeepseekOCR2ForCausalLM"]):
        raise UnsupportedArchitecture(
            f"{shown(names)}: of deepseek_vl_v2 only DeepSeek-OCR and DeepSeek-OCR-2 are planned; "
            "DeepSeek-VL2's tower is timm's, whose shapes are not in config.json",
            field="architectures",
        )
    config = fields.mapping("language_config")
    fields.ignore(*fields.config)
    text = text_of(fields, "deepseek_v2", config)
    t = Tensors("vision")
    first = names == ["DeepseekOCRForCausalLM"]
    hidden = (towers.ocr if first else towers.ocr2)(t, _vision(fields))
    t.role = "projector"
    t.linear("model.projector.layers", text.hidden_size, hidden, bias=True)
    if first:
        t.add("model.image_newline", (text.hidden_size,), "projector", "DeepseekOCRModel")
    t.add("model.view_seperator", (text.hidden_size,), "projector", "DeepseekOCR2Model")
    return joined(text, model_type, str(names[0]), t, "model.")


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
    width = towers.step(t, "model.vision_model", _vision(fields))
    t.role = "projector"
    t.linear(
        "model.multi_modal_projector", text.hidden_size, width, bias=fields.boolean("projector_bias", False)
    )
    return joined(text, model_type, "Step3p7ForConditionalGeneration", t)


_family = partial(Family, ignored=_TOP)


def _qwen_row(name: str, text_type: str, tower: Tower, vllm: VLLMTraits = NO_TRAITS, **more: Any) -> Family:
    """Return the ``Family`` entry of a Qwen vision-language model.

    ``more`` are further arguments of the builder function ``qwen``.
    """
    class_name = f"{name}ForConditionalGeneration"
    build = partial(qwen, class_name=class_name, text_type=text_type, tower=tower, **more)
    return _family(build, vllm=vllm, files=RENAMED)


_QWEN3_5 = VLLMTraits(float32_states=True, one_mrope_length=True)
FAMILIES = {
    "deepseek_vl_v2": _family(deepseek_ocr, files=RENAMED),
    "gemma3": _family(gemma3, final_norm="rms-one", files=RENAMED),
    "gemma3n": _family(gemma3n, final_norm="rms-one"),
    "gemma4": _family(gemma4, final_norm="rms-one", files=RENAMED),
    "llava": _family(
        LlavaVariant("LlavaForConditionalGeneration").build, first_class="LlavaLlamaForCausalLM", files=RENAMED,
    ),
    "llava_next": _family(
        LlavaVariant(
            "LlavaNextForConditionalGeneration", ("llama", "mistral", "qwen2", "granite"),
            ("clip_vision_model", "siglip_vision_model"), either=False, tiles=image_limits.tiles,
        ).build,
        files=RENAMED,
    ),
    "llava_next_video": _family(
        LlavaVariant(
            "LlavaNextVideoForConditionalGeneration", ("llama", "mistral", "qwen2"), ("clip_vision_model",),
            tiles=_tiles_and_frames,
        ).build,
        files=RENAMED,
    ),
    "llava_onevision": _family(
        LlavaVariant(
            "LlavaOnevisionForConditionalGeneration", ("qwen2", "llama", "mistral", "granite"),
            ("siglip_vision_model", "clip_vision_model"), "full", either=False, tiles=image_limits.onevision,
        ).build,
        files=RENAMED,
    ),
    # LightOnOCR has Mistral 3's tower and connector in front of a Qwen3 model
    "mistral3": _family(mistral3, files=RENAMED, other_classes=("LightOnOCRForConditionalGeneration",)),
    "lighton_ocr": _family(lighton, files=RENAMED, other_classes=("LightOnOCRForConditionalGeneration",)),
    "opencua": _qwen_row("OpenCUA", "qwen2", "qwen2_5", kv_heads=8),
    "kimi_vl": _family(kimi_vl, files=RENAMED),
    "qwen2_vl": _qwen_row("Qwen2VL", "qwen2", "qwen2", kv_heads=8, either=True),
    "qwen2_5_vl": _qwen_row("Qwen2_5_VL", "qwen2", "qwen2_5", kv_heads=8, either=True),
    "qwen3_vl": _qwen_row("Qwen3VL", "qwen3", "qwen3", VLLMTraits(one_mrope_length=True)),
    "qwen3_vl_moe": _qwen_row(
        "Qwen3VLMoe", "qwen3_moe", "qwen3", VLLMTraits(one_mrope_length=True), kv_heads=16
    ),
    "qwen3_5": _qwen_row("Qwen3_5", "qwen3_5_text", "qwen3", _QWEN3_5, deepstack=False),
    "qwen3_5_moe": _qwen_row("Qwen3_5Moe", "qwen3_5_moe_text", "qwen3", _QWEN3_5, deepstack=False),
    "mllama": _family(mllama, files=RENAMED),
    "mllama_text_model": _family(mllama_text, absent={"num_key_value_heads": 8}),
    "llama4": _family(llama4, every_expert=True, hf="chunked masks", files=RENAMED),
    "kimi_k25": _family(kimi, first_class="KimiK25ForConditionalGeneration", files=RENAMED),
    "minimax_m3_vl": _family(minimax, files=RENAMED),
    "step3p7": _family(
        step, first_class="Step3p7FlashForCausalLM", vllm=VLLMTraits(wide_router=True), files=RENAMED
    ),
}  # fmt: skip
