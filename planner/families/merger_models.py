"""Vision-language models whose vision tower merges neighbouring patches: GLM-4.1V to 4.6V, GLM-OCR, EXAONE 4.5.

Shapes follow transformers 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable

from tonnage.planner.families import common, towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import joined, text_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields

# Config fields that hold token ids, or nested objects that the builder functions read separately. No tensor
# shape depends on these fields.
_TOP = (
    "text_config", "vision_config", "image_token_id", "video_token_id", "image_start_token_id",
    "image_end_token_id", "video_start_token_id", "video_end_token_id", "vision_start_token_id",
    "vision_end_token_id", "hidden_size", "vocab_size",
)  # fmt: skip


def _glm_tower(t: Tensors, at: str, v: Fields) -> None:
    """Add the tensors of GLM-4V's vision tower.

    It has a patch embedding over two frames, layers with a fused qkv projection, a strided convolution and a
    merger.
    """
    hidden, heads = v.integer("hidden_size", 1536, limit="width"), v.integer("num_heads", 12, limit="heads")
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.num_heads")
    patch, side = v.integer("patch_size", 14, limit="width"), v.integer("image_size", 336, limit="width")
    frames, bias = v.integer("temporal_patch_size", 2, limit="width"), v.boolean("attention_bias", False)
    out, inner = (
        v.integer("out_hidden_size", 4096, limit="width"),
        v.integer("intermediate_size", 13696, limit="width"),
    )
    channels, merge = (
        v.integer("in_channels", 3, limit="width"),
        v.integer("spatial_merge_size", 2, limit="width"),
    )
    t.embedding(f"{at}.embeddings.position_embedding", (side // patch) ** 2, hidden)
    towers.conv(t, f"{at}.patch_embed.proj", (hidden, channels, frames, patch, patch), True)
    for i in range(v.integer("depth", 24, limit="layers")):
        here = f"{at}.blocks.{i}"
        t.norms(here, hidden, "norm1", "norm2")
        t.linear(f"{here}.attn.qkv", 3 * hidden, hidden, bias=bias, shard="column")
        t.linear(f"{here}.attn.proj", hidden, hidden, shard="row")
        t.gated_mlp(f"{here}.mlp", hidden, out)
    t.linear(f"{at}.merger.proj", out, out)
    t.norm(f"{at}.merger.post_projection_norm", out, "layer")
    t.gated_mlp(f"{at}.merger", out, inner)
    t.norm(f"{at}.post_conv_layernorm", hidden)
    towers.conv(t, f"{at}.downsample", (out, hidden, merge, merge), True)
    t.norm(f"{at}.post_layernorm", hidden)
    t.rotary(hidden // heads // 2, f"{at}.rotary_pos_emb.")


def _glm_ocr_tower(t: Tensors, at: str, v: Fields) -> None:
    """Add the tensors of GLM-OCR's vision tower.

    It is GLM-4V's tower without position embeddings, with biases, and with norms of Q and K.
    """
    hidden, heads = v.integer("hidden_size", 1024, limit="width"), v.integer("num_heads", 16, limit="heads")
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.num_heads")
    patch, frames = (
        v.integer("patch_size", 14, limit="width"),
        v.integer("temporal_patch_size", 2, limit="width"),
    )
    channels, merge = (
        v.integer("in_channels", 3, limit="width"),
        v.integer("spatial_merge_size", 2, limit="width"),
    )
    out, inner = (
        v.integer("out_hidden_size", 1536, limit="width"),
        v.integer("intermediate_size", 4096, limit="width"),
    )
    bias, size = v.boolean("attention_bias", True), hidden // heads
    towers.conv(t, f"{at}.patch_embed.proj", (hidden, channels, frames, patch, patch), True)
    for i in range(v.integer("depth", 24, limit="layers")):
        here = f"{at}.blocks.{i}"
        t.norms(here, hidden, "norm1", "norm2")
        t.linear(f"{here}.attn.qkv", 3 * hidden, hidden, bias=bias, shard="column")
        t.linear(f"{here}.attn.proj", hidden, hidden, bias=bias, shard="row")
        t.norms(f"{here}.attn", size, "q_norm", "k_norm")
        t.gated_mlp(f"{here}.mlp", hidden, inner, bias=bias)
    t.linear(f"{at}.merger.proj", out, out)
    t.norm(f"{at}.merger.post_projection_norm", out, "layer")
    t.gated_mlp(f"{at}.merger", out, out * channels)
    towers.conv(t, f"{at}.downsample", (out, hidden, merge, merge), True)
    t.norm(f"{at}.post_layernorm", hidden)
    t.rotary(size // 2, f"{at}.rotary_pos_emb.")


def glm_ocr(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a GLM-OCR model from its checked config."""
    config = {"attention_bias": False, **(fields.mapping("text_config") or {})}
    config.pop("num_nextn_predict_layers", None)  # the text model's class builds no MTP draft layers
    if "head_dim" not in config:  # GLM-4's class would use another default
        f = Fields(config)
        config["head_dim"] = f.integer("hidden_size", limit="width") // f.integer(
            "num_attention_heads", limit="heads"
        )
    text = text_of(fields, "glm4", config)
    t = Tensors("vision")
    _glm_ocr_tower(t, "model.visual", Fields(fields.mapping("vision_config") or {}))
    return joined(text, model_type, "GlmOcrForConditionalGeneration", t)


def _glm(text_type: str, class_name: str) -> Callable[[Fields, str], Architecture]:
    """Return the builder function of a GLM vision-language model with a ``text_type`` language model."""

    def build(fields: Fields, model_type: str) -> Architecture:
        config = {"attention_bias": True, **(fields.mapping("text_config") or {})}
        text = text_of(fields, text_type, config)
        t = Tensors("vision")
        _glm_tower(t, "model.visual", Fields(fields.mapping("vision_config") or {}))
        return joined(text, model_type, class_name, t)

    return build


def exaone4_5(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an EXAONE 4.5 model: Qwen2.5-VL's tower, but with grouped-query attention."""
    text = text_of(fields, "exaone4", fields.mapping("text_config"))
    v = Fields(fields.mapping("vision_config") or {})
    t, at = Tensors("vision"), "model.visual"
    hidden, heads = v.integer("hidden_size", 3584, limit="width"), v.integer("num_heads", 16, limit="heads")
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.num_heads")
    size = hidden // heads
    rows = hidden + 2 * size * v.integer("num_key_value_heads", 8, limit="heads")
    patch, frames = (
        v.integer("patch_size", 14, limit="width"),
        v.integer("temporal_patch_size", 2, limit="width"),
    )
    channels, inner = (
        v.integer("in_channels", 3, limit="width"),
        v.integer("intermediate_size", 3420, limit="width"),
    )
    towers.conv(t, f"{at}.patch_embed.proj", (hidden, channels, frames, patch, patch), False)
    for i in range(v.integer("depth", 32, limit="layers")):
        here = f"{at}.blocks.{i}"
        t.norms(here, hidden, "norm1", "norm2")
        t.linear(f"{here}.attn.qkv", rows, hidden, bias=True)
        t.linear(f"{here}.attn.proj", hidden, hidden, bias=True)
        t.gated_mlp(f"{here}.mlp", hidden, inner, bias=True)
    merged = hidden * v.integer("spatial_merge_size", 2, limit="width") ** 2
    t.norm(f"{at}.merger.ln_q", hidden)
    out = v.integer("out_hidden_size", 3584, limit="width")
    t.connector(f"{at}.merger.mlp", merged, merged, out, names=("0", "2"))
    t.rotary(size // 2, f"{at}.rotary_pos_emb.")
    return joined(text, model_type, "Exaone4_5_ForConditionalGeneration", t)


FAMILIES = {
    "glm4v": Family(_glm("glm4", "Glm4vForConditionalGeneration"), ignored=_TOP, files=RENAMED),
    "glm4v_moe": Family(_glm("glm4_moe", "Glm4vMoeForConditionalGeneration"), ignored=_TOP, files=RENAMED),
    "glm_ocr": Family(glm_ocr, ignored=_TOP, files=RENAMED),
    "exaone4_5": Family(exaone4_5, ignored=_TOP, files=RENAMED),
}
