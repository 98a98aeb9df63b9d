"""Vision-language models whose vision tower merges neighbouring patches: GLM-4.1V to 4.6V, GLM-OCR, EXAONE 4.5.

Shapes follow transformers 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tonnage.planner.families import common, towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields

# Top-level config fields that determine no tensor shape, such as token ids. Nested objects are listed too,
# because the builder functions read their fields separately.
_TOP = (
    "text_config", "vision_config", "image_token_id", "video_token_id", "image_start_token_id",
    "image_end_token_id", "video_start_token_id", "video_end_token_id", "vision_start_token_id",
    "vision_end_token_id", "hidden_size", "vocab_size",
)  # fmt: skip


# Default sizes of the vision towers, from the vision config classes of transformers 5.23
_GLM_OCR = {
    "hidden_size": 1024, "num_heads": 16, "patch_size": 14, "temporal_patch_size": 2, "in_channels": 3,
    "out_hidden_size": 1536, "intermediate_size": 4096, "spatial_merge_size": 2, "depth": 24,
}  # fmt: skip
_GLM4V = {
    **_GLM_OCR, "hidden_size": 1536, "num_heads": 12, "out_hidden_size": 4096, "intermediate_size": 13696,
    "image_size": 336,
}  # fmt: skip
_EXAONE = {
    **_GLM_OCR, "hidden_size": 3584, "num_key_value_heads": 8, "out_hidden_size": 3584,
    "intermediate_size": 3420, "depth": 32,
}  # fmt: skip


def _glm_tower(t: Tensors, at: str, f: Fields, *, ocr: bool = False) -> None:
    """Add the tensors of GLM-4V's vision tower or, with ``ocr``, of GLM-OCR's.

    It has a patch embedding over two frames, layers with a fused qkv projection, a strided convolution and a
    merger. GLM-OCR's tower has no position embeddings, but norms of Q and K, and biases by default.
    """
    v = towers.sizes(f, _GLM_OCR if ocr else _GLM4V)
    hidden, out, inner, size = v["hidden_size"], v["out_hidden_size"], v["intermediate_size"], _head_size(v)
    bias = f.boolean("attention_bias", ocr)
    if not ocr:
        t.embedding(f"{at}.embeddings.position_embedding", (v["image_size"] // v["patch_size"]) ** 2, hidden)
    _patch_embedding(t, at, v, True)
    for i in range(v["depth"]):
        here = f"{at}.blocks.{i}"
        t.norms(here, hidden, "norm1", "norm2")
        t.linear(f"{here}.attn.qkv", 3 * hidden, hidden, bias=bias, shard="column")
        t.linear(f"{here}.attn.proj", hidden, hidden, bias=bias and ocr, shard="row")
        if ocr:
            t.norms(f"{here}.attn", size, "q_norm", "k_norm")
        t.gated_mlp(f"{here}.mlp", hidden, inner if ocr else out, bias=bias and ocr)
    t.linear(f"{at}.merger.proj", out, out)
    t.norm(f"{at}.merger.post_projection_norm", out, "layer")
    t.gated_mlp(f"{at}.merger", out, out * v["in_channels"] if ocr else inner)
    if not ocr:
        t.norm(f"{at}.post_conv_layernorm", hidden)
    merge = v["spatial_merge_size"]
    towers.conv(t, f"{at}.downsample", (out, hidden, merge, merge), True)
    t.norm(f"{at}.post_layernorm", hidden)
    t.rotary(size // 2, f"{at}.rotary_pos_emb.")


def _head_size(v: Mapping[str, int]) -> int:
    """Return the head size of a tower with the sizes ``v``."""
    common.divisible(v["hidden_size"], v["num_heads"], "vision_config.hidden_size", "vision_config.num_heads")
    return v["hidden_size"] // v["num_heads"]


def _patch_embedding(t: Tensors, at: str, v: Mapping[str, int], bias: bool) -> None:
    """Add the patch embedding of a tower with the sizes ``v``: a convolution over several frames."""
    patch = v["patch_size"]
    shape = (v["hidden_size"], v["in_channels"], v["temporal_patch_size"], patch, patch)
    towers.conv(t, f"{at}.patch_embed.proj", shape, bias)


def glm_ocr(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a GLM-OCR model from its checked config."""
    config = {"attention_bias": False, **(fields.mapping("text_config") or {})}
    config.pop("num_nextn_predict_layers", None)  # the text model's class builds no MTP draft layers
    if "head_dim" not in config:  # GLM-4, the language model's class, has another default of head_dim
        f = Fields(config)
        config["head_dim"] = f.integer("hidden_size", limit="width") // f.integer(
            "num_attention_heads", limit="heads"
        )
    text = text_of(fields, "glm4", config)
    t = Tensors("vision")
    _glm_tower(t, "model.visual", Fields(vision_of(fields)), ocr=True)
    return joined(text, model_type, "GlmOcrForConditionalGeneration", t)


def _glm(text_type: str, class_name: str) -> Callable[[Fields, str], Architecture]:
    """Return the builder function of a GLM vision-language model with a ``text_type`` language model."""

    def build(fields: Fields, model_type: str) -> Architecture:
        config = {"attention_bias": True, **(fields.mapping("text_config") or {})}
        text = text_of(fields, text_type, config)
        t = Tensors("vision")
        _glm_tower(t, "model.visual", Fields(vision_of(fields)))
        return joined(text, model_type, class_name, t)

    return build


def exaone4_5(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an EXAONE 4.5 model: Qwen2.5-VL's tower, but with grouped-query attention."""
    text = text_of(fields, "exaone4", fields.mapping("text_config"))
    v = towers.sizes(Fields(vision_of(fields)), _EXAONE)
    t, at = Tensors("vision"), "model.visual"
    hidden, size = v["hidden_size"], _head_size(v)
    rows = hidden + 2 * size * v["num_key_value_heads"]
    _patch_embedding(t, at, v, False)
    for i in range(v["depth"]):
        here = f"{at}.blocks.{i}"
        t.norms(here, hidden, "norm1", "norm2")
        t.linear(f"{here}.attn.qkv", rows, hidden, bias=True)
        t.linear(f"{here}.attn.proj", hidden, hidden, bias=True)
        t.gated_mlp(f"{here}.mlp", hidden, v["intermediate_size"], bias=True)
    merged = hidden * v["spatial_merge_size"] ** 2
    t.norm(f"{at}.merger.ln_q", hidden)
    t.connector(f"{at}.merger.mlp", merged, merged, v["out_hidden_size"], names=("0", "2"))
    t.rotary(size // 2, f"{at}.rotary_pos_emb.")
    return joined(text, model_type, "Exaone4_5_ForConditionalGeneration", t)


FAMILIES = {
    "glm4v": Family(_glm("glm4", "Glm4vForConditionalGeneration"), ignored=_TOP, files=RENAMED),
    "glm4v_moe": Family(_glm("glm4_moe", "Glm4vMoeForConditionalGeneration"), ignored=_TOP, files=RENAMED),
    "glm_ocr": Family(glm_ocr, ignored=_TOP, files=RENAMED),
    "exaone4_5": Family(exaone4_5, ignored=_TOP, files=RENAMED),
}
