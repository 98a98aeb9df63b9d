"""Small vision-language models: Molmo 2, LFM3-VL, Granite Docling, MiniCPM-OCR, MiniCPM-V 4.6 and PaddleOCR-VL.

Shapes follow transformers 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common, towers
from tonnage.planner.families.family import RENAMED, Family, VLLMTraits
from tonnage.planner.families.multimodal import joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads

_TOP = (
    "text_config", "vision_config", "adapter_config", "image_token_id", "video_token_id", "image_patch_id",
    "vision_start_token_id", "vision_end_token_id", "image_start_token_id", "image_end_token_id",
    "low_res_image_start_token_id", "frame_start_token_id", "frame_end_token_id", "projector_hidden_act",
    "vocab_size",
)  # fmt: skip


def _text(
    fields: Fields, text_type: str, tied: bool, *, alias: str = "", kv_heads: int | None = None
) -> Architecture:
    """Return the architecture of the language model in ``text_config``.

    The tie_word_embeddings of the multimodal config determines whether the head is tied.

    Args:
        fields: the config of the multimodal model.
        text_type: model_type of the language model.
        tied: default of tie_word_embeddings in the multimodal config class.
        alias: another valid model_type in the text config.
        kv_heads: default of num_key_value_heads.
    """
    config = fields.mapping("text_config")
    if config is not None:
        kind = config.get("model_type", text_type)
        if kind not in (text_type, alias):
            raise UnsupportedArchitecture(
                f"{shown(kind)} is not supported; the language model is {text_type}",
                field="text_config.model_type",
            )
        if kv_heads is not None:
            config = {"num_key_value_heads": kv_heads, **config}
    return text_of(fields, text_type, config, tied=tied)


def molmo2(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Molmo 2 model from its checked config."""
    common.never_tied(fields)
    text = _text(fields, "molmo2_text", False)
    t = Tensors("vision")
    v = Fields(
        vision_of(fields),
        {"patch_size": "image_patch_size", "image_size": "image_default_input_size",
         "num_position_embeddings": "image_num_pos"},
    )  # fmt: skip
    at, hidden = "model.vision_tower", v.integer("hidden_size", 1152, limit="width")
    patch = v.integer("patch_size", 14, limit="width")
    size = v.raw("image_size") or [378, 378]
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n >= patch for n in size):
        raise ConfigError(f"{shown(size)} is not [height, width] in pixels", field="vision_config.image_size")
    places = v.optional_integer("num_position_embeddings", limit="width")
    places = places or (size[0] // patch) * (size[1] // patch)
    inner = v.integer("intermediate_size", 4304, limit="width")
    t.add(f"{at}.positional_embedding", (places, hidden), "vision", "Molmo2VisionModel")
    channels = v.integer("num_channels", 3, limit="width")
    t.linear(f"{at}.patch_embedding", hidden, patch * patch * channels, bias=True)
    for i in range(v.integer("num_hidden_layers", 25, limit="layers")):
        here = f"{at}.layers.{i}"
        _molmo_attention(t, f"{here}.self_attn", v, hidden, hidden)
        t.plain_mlp(f"{here}.mlp", hidden, inner, bias=True, names=("fc1", "fc2"))
        t.norms(here, hidden, "layer_norm1", "layer_norm2", kind="layer")
    t.role = "projector"
    a = Fields(fields.mapping("adapter_config") or {}, {"vision_feature_layer": "vit_layers"})
    at, width = "model.multi_modal_projector", a.integer("hidden_size", 1152, limit="width")
    taken = a.raw("vision_feature_layer")
    taken = [24, 18] if taken is None else taken
    if not isinstance(taken, list) or not taken:
        raise ConfigError(
            f"{shown(taken)} is not a list of layer indices", field="adapter_config.vision_feature_layer"
        )
    if width != hidden:
        raise ConfigError(
            f"{width} is not the tower's hidden size {hidden}", field="adapter_config.hidden_size"
        )
    out = a.integer("text_hidden_size", 3584, limit="width")
    if out != text.hidden_size:
        raise ConfigError(
            f"{out} is not the text model's hidden size, {text.hidden_size}",
            field="adapter_config.text_hidden_size",
        )
    _molmo_attention(t, f"{at}.image_pooling_2d", a, width, width * len(taken))
    inner, bias = a.integer("intermediate_size", 18_944, limit="width"), a.boolean("mlp_bias", False)
    for name in ("gate_proj", "up_proj"):
        t.linear(f"{at}.image_projector.{name}", inner, width, bias=bias)
    t.linear(f"{at}.image_projector.down_proj", out, inner)
    return joined(text, model_type, "Molmo2ForConditionalGeneration", t, "model.language_model.")


def _molmo_attention(t: Tensors, at: str, f: Fields, hidden: int, into: int) -> None:
    """Add the tensors of an attention that reads vectors of ``into`` values and returns ``hidden`` values."""
    heads = f.integer("num_attention_heads", 16, limit="heads")
    kv_heads = f.integer("num_key_value_heads", 16, limit="heads")
    size, bias = f.integer("head_dim", 72, limit="width"), f.boolean("attention_bias", True)
    for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        t.linear(f"{at}.{name}", rows * size, into, bias=bias)
    t.linear(f"{at}.o_proj", hidden, heads * size, bias=bias)


def molmo2_text(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Molmo 2's text model: Llama with norms of Q and K.

    The embedding has more rows than the head.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    added = fields.integer("additional_vocab_size", 128, limit="vocab", minimum=0)
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", False)
    norm = fields.raw("qk_norm_type")
    if norm not in (None, "qwen3", "olmo"):
        raise UnsupportedArchitecture(f"{shown(norm)} is not qwen3 or olmo", field="qk_norm_type")
    if fields.boolean("use_qk_norm", True) is False:  # use_qk_norm is read only by the model's remote code
        raise UnsupportedArchitecture("false is not supported; only true is", field="use_qk_norm")
    common.never_tied(fields)
    fields.ignore("rope_scaling_layers", "norm_after")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab + added, dims.hidden)
    for _, at in t.layers(layers, "model.layers"):
        t.attention(f"{at}.self_attn", dims, bias=bias, qk_norm="full" if norm == "olmo" else "head")
        t.gated_mlp(f"{at}.mlp", dims.hidden, inner)
        t.layer_norms(at, dims.hidden)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, False)
    t.rotary(dims.head_size, "model.rotary_emb.", "model.rotary_emb_unscaled.")
    return common.decoder(
        fields, model_type, "Molmo2ForCausalLM", t, dims, layers=layers,
        inner=inner, vocab=vocab, rotary=Rotary(dims.head_size, 2),
    )  # fmt: skip


# Default sizes of LFM3-VL's vision tower
_LFM3 = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2560,
    "patch_size": 16, "temporal_patch_size": 2, "conv_kernel_size": 3, "num_hidden_layers": 14,
    "in_channels": 3, "spatial_merge_size": 2,
}  # fmt: skip


def lfm3_vl(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an LFM3-VL model from its checked config.

    In its tower, attention layers alternate with gated convolutions over the image.
    """
    text = _text(fields, "lfm3", True)
    f = Fields(vision_of(fields))
    v = towers.sizes(f, _LFM3)
    t, at = Tensors("vision"), "model.vision_tower"
    hidden, heads, kernel = v["hidden_size"], v["num_attention_heads"], v["conv_kernel_size"]
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.num_attention_heads")
    size, layers = hidden // heads, v["num_hidden_layers"]
    convolved = f.listed("layer_types", layers, {"conv": True, "full_attention": False})
    convolved = convolved or tuple(i < 2 or i % 2 == 1 for i in range(layers))
    t.linear(f"{at}.patch_embed", hidden, v["in_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2)
    t.norm(f"{at}.embedding_norm", hidden)
    for i in range(layers):
        here = f"{at}.layers.{i}"
        if convolved[i]:
            t.linear(f"{here}.conv.in_proj", 3 * hidden, hidden)
            towers.conv(t, f"{here}.conv.spatial_conv", (hidden, 1, kernel, kernel), False)
            t.linear(f"{here}.conv.out_proj", hidden, hidden)
        else:
            dims = Heads(hidden, heads, v["num_key_value_heads"], size)
            t.attention(f"{here}.self_attn", dims, out="out_proj", qk_norm="head")
        t.gated_mlp(f"{here}.feed_forward", hidden, v["intermediate_size"], names=("w1", "w3", "w2"))
        t.norms(here, hidden, "operator_norm", "ffn_norm")
    t.rotary(size // 2, f"{at}.rotary_pos_emb.")
    t.role = "projector"
    at, merged = "model.multi_modal_projector", hidden * v["spatial_merge_size"] ** 2
    wide = fields.integer("projector_hidden_size", 4096, limit="width")
    t.norm(f"{at}.layer_norm", hidden, "layer")
    t.connector(at, merged, wide, text.hidden_size, bias=fields.boolean("projector_bias", True))
    return joined(text, model_type, "Lfm3VlForConditionalGeneration", t, "model.language_model.")


def _siglip(t: Tensors, at: str, vision: Mapping[str, Any], side: int) -> int:
    """Add the tensors of a SigLIP tower without its pooling head, and return its hidden size.

    ``side`` is the default of image_size, in pixels.
    """
    return towers.siglip(t, at, {**vision, "vision_use_head": False}, {**towers.SIGLIP, "image_size": side})


def granite_docling(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Granite Docling model from its checked config.

    A connector with one or two paths (coarse and fine) follows the SigLIP tower. The connector also passes
    outputs of early tower layers to early layers of the text model.
    """
    text = _text(fields, "granite", True, alias="granite_docling_text", kv_heads=4)
    vision = vision_of(fields)
    v = Fields(vision)
    t = Tensors("vision")
    hidden = _siglip(t, "model.vision_model", vision, 512)
    t.role = "projector"
    at, out = "model.vision_model.connector", v.integer("out_hidden_size", 1024, limit="width")
    if out != text.hidden_size:
        raise ConfigError(
            f"{out} is not the text model's hidden size, {text.hidden_size}",
            field="vision_config.out_hidden_size",
        )
    side = v.integer("image_size", 512, limit="width") // v.integer("patch_size", 16, limit="width")
    factor = v.integer("scale_factor", 4, limit="width")
    taken = v.raw("deepstack_visual_indexes")
    taken = [3, 7, 10] if taken is None else taken
    if not isinstance(taken, list) or len(taken) > 1000:
        raise ConfigError(f"{shown(taken)} is not a list of layer indices", field="deepstack_visual_indexes")
    paths = {"coarse": factor} | ({"fine": factor // 2} if v.boolean("use_fine_route", True) else {})
    for name, by in paths.items():
        if by < 1 or side < by:
            raise ConfigError(
                f"{factor} must be at most {side}, the number of patches per side of the image, and at least 2 "
                "if vision_config.use_fine_route is true",
                field="vision_config.scale_factor",
            )
        here, merged = f"{at}.{name}", hidden * by * by
        t.linear(f"{here}.projection", out, merged)
        t.buffer(f"{here}.pos_embed.pos_embed", ((side // by) ** 2, out), "PositionEmbedding", "float32")
        for k in range(len(taken)):
            merger = f"{here}.deepstack_mergers.{k}"
            t.norm(f"{merger}.layer_norm", merged, "layer")
            t.connector(merger, merged, out, out)
    t.norm(f"{at}.ln_in", hidden, "layer")
    t.norm(f"{at}.ln_mid", out, "layer")
    t.linear(f"{at}.mlp_fc2", out, out)
    t.norm(f"{at}.ln_out", out, "layer")
    router = fields.optional_integer("density_router_hidden_size", limit="width")
    if router is not None:
        at = "model.density_router"
        t.linear(f"{at}.att", 1, hidden, bias=True)
        t.norm(f"{at}.norm", hidden, "layer")
        t.connector(at, hidden, router, 1, names=("fc1", "fc2"))
    return joined(text, model_type, "GraniteDoclingForConditionalGeneration", t, "model.text_model.")


def minicpm(fields: Fields, model_type: str, *, class_name: str, tied: bool) -> Architecture:
    """Return the architecture of a MiniCPM-OCR or MiniCPM-V 4.6 or 4.7 model from its checked config.

    One merger of neighbouring patches is inside the SigLIP tower, and more mergers follow the tower.
    ``class_name`` is the model's class in transformers, and ``tied`` the default of tie_word_embeddings.
    """
    text = _text(fields, "qwen3_5_text", tied)
    common.refuse(fields, "drop_vision_last_layer")
    vision = vision_of(fields)
    v = Fields(vision)
    fields.ignore("insert_layer_id", "downsample_mode", "patch_size", "image_size")
    t = Tensors("vision")
    at = "model.vision_tower"
    hidden = _siglip(t, at, vision, 224)
    # positions are computed from the image size, not stored as buffers
    t.specs = [spec for spec in t.specs if spec.role != "buffer"]
    inner = v.integer("intermediate_size", 3072, limit="width")
    pair = v.raw("window_kernel_size")
    pair = [2, 2] if pair is None else pair
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(k) is int and 0 < k < 64 for k in pair):
        raise ConfigError(
            f"{shown(pair)} is not two integers from 1 to 63", field="vision_config.window_kernel_size"
        )
    times = pair[0] * pair[1]
    at = f"{at}.vit_merger"
    t.attention(f"{at}.self_attn", Heads(hidden, 1, 1, hidden), bias=True, out_bias=True, out="out_proj")
    t.norm(f"{at}.layer_norm1", hidden, "layer")
    t.norm(f"{at}.pre_norm", hidden * times, "layer")
    t.connector(at, hidden * times, inner * times, hidden)
    t.role = "projector"
    rounds = fields.integer("merger_times", 1, limit="layers")
    common.only(fields, merge_kernel_size=[2, 2])
    for i in range(rounds):
        here, merged = f"model.merger.mlp.{i}", 4 * hidden
        t.norm(f"{here}.pre_norm", merged, "layer")
        t.connector(here, merged, merged, text.hidden_size if i == rounds - 1 else hidden)
    return joined(text, model_type, class_name, t, "model.language_model.")


def paddleocr_vl(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a PaddleOCR-VL model: SigLIP with rotary positions, and ERNIE 4.5.

    In published files the text model's fields are at the top level; transformers writes a text_config.
    """
    config = fields.mapping("text_config")
    if config is None:
        outside = ("vision_config", "architectures", *(name for name in _TOP if name != "vocab_size"))
        config = {name: value for name, value in fields.config.items() if name not in outside}
        fields.ignore(*fields.config)
    text = text_of(fields, "ernie4_5", config, tied=True, either=True)
    vision = vision_of(fields)
    v = Fields(vision)
    t = Tensors("vision")
    defaults = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_channels": 3, "image_size": 384, "patch_size": 14,
    }  # fmt: skip
    hidden = towers.siglip(t, "model.visual.vision_model", {**vision, "vision_use_head": False}, defaults)
    heads = v.integer("num_attention_heads", 16, limit="heads")
    t.rotary(hidden // heads // 2, "model.visual.vision_model.encoder.rotary_pos_emb.")
    t.role, at = "projector", "model.projector"
    merged = hidden * v.integer("spatial_merge_size", 2, limit="width") ** 2
    t.norm(f"{at}.pre_norm", hidden, "layer")
    t.connector(at, merged, merged, text.hidden_size)
    return joined(text, model_type, "PaddleOCRVLForConditionalGeneration", t)


def _minicpm(class_name: str, tied: bool) -> Family:
    """Return the ``Family`` entry of a MiniCPM vision-language model with a Qwen3.5 language model."""
    return Family(
        partial(minicpm, class_name=class_name, tied=tied), ignored=_TOP, hf="recurrent",
        vllm=VLLMTraits(float32_states=True), files=RENAMED,
    )  # fmt: skip


FAMILIES = {
    "molmo2": Family(molmo2, ignored=_TOP, files=RENAMED),
    "molmo2_text": Family(
        molmo2_text, aliases={"attention_bias": "qkv_bias"},
        absent={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "lfm3_vl": Family(lfm3_vl, ignored=_TOP, hf="recurrent", files=RENAMED),
    "granite_docling": Family(
        granite_docling, ignored=(*_TOP, "density_router_threshold", "density_router_loss_weight"),
        files=RENAMED,
    ),
    "paddleocr_vl": Family(paddleocr_vl, ignored=_TOP, files=RENAMED),
    "minicpm_ocr": _minicpm("MiniCPMOcrForConditionalGeneration", True),
    "minicpmv4_6": _minicpm("MiniCPMV4_6ForConditionalGeneration", False),
    "minicpmv4_7": _minicpm("MiniCPMV4_7ForConditionalGeneration", False),
}  # fmt: skip
