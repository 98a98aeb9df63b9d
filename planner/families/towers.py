"""Vision towers and projectors, whose tensors (roles ``vision`` and ``projector``) are counted separately.

Each function adds the tensors of one kind of tower below a prefix. Shapes follow transformers 5.19 / 5.23,
models/<family>/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.gemma4_towers import linear
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads
from tonnage.planner.model.vision import Tower


def conv(t: Tensors, module: str, shape: tuple[int, ...], bias: bool) -> None:
    """Add the weight and, with ``bias``, the bias of a 2D convolution.

    It is a 3D convolution when the weight's ``shape`` has five dimensions.
    """
    name = "Conv3d" if len(shape) == 5 else "Conv2d"
    t.add(f"{module}.weight", shape, "vision", name)
    if bias:
        t.add(f"{module}.bias", shape[:1], "vision", name)


def sizes(f: Fields, defaults: Mapping[str, int | None]) -> dict[str, int]:
    """Return a dict: config field -> size of a vision tower, from the config, else from ``defaults``.

    A field with the default None is required.
    """
    limits = {
        "num_hidden_layers": "layers", "num_global_layers": "layers", "depth": "layers",
        "num_attention_heads": "heads", "num_heads": "heads", "num_key_value_heads": "heads",
    }  # fmt: skip
    return {k: f.integer(k, v, limit=limits.get(k, "width")) for k, v in defaults.items()}


def _encoder_layer(t: Tensors, at: str, hidden: int, inner: int, norms: tuple[str, str]) -> None:
    """Add the tensors of a layer of CLIP or SigLIP: q, k, v, out_proj, fc1, fc2 with biases; two LayerNorms."""
    t.attention(f"{at}.self_attn", Heads(hidden, 1, 1, hidden), bias=True, out_bias=True, out="out_proj")
    t.plain_mlp(f"{at}.mlp", hidden, inner, bias=True, names=("fc1", "fc2"))
    t.norms(at, hidden, *norms, kind="layer")


def _embeddings(t: Tensors, at: str, v: Mapping[str, int], places: int, bias: bool) -> None:
    """Add the embeddings of patches and of ``places`` positions of a CLIP or SigLIP tower.

    ``v`` holds the tower's sizes; ``bias`` is whether the patch embedding has a bias.
    """
    shape = (v["hidden_size"], v["num_channels"], v["patch_size"], v["patch_size"])
    conv(t, f"{at}.embeddings.patch_embedding", shape, bias)
    t.embedding(f"{at}.embeddings.position_embedding", places, v["hidden_size"])
    t.buffer(f"{at}.embeddings.position_ids", (1, places), "VisionEmbeddings", "int64")


def _encoder(t: Tensors, at: str, v: Mapping[str, int]) -> None:
    """Add the layers of a CLIP or SigLIP tower with the sizes ``v``, and the norm after them."""
    hidden, norms = v["hidden_size"], ("layer_norm1", "layer_norm2")
    for i in range(v["num_hidden_layers"]):
        _encoder_layer(t, f"{at}.encoder.layers.{i}", hidden, v["intermediate_size"], norms)
    t.norm(f"{at}.post_layernorm", hidden, "layer")


SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 16,
}  # fmt: skip
CLIP = {**SIGLIP, "patch_size": 32}
LLAVA_CLIP = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 336, "patch_size": 14,
}  # fmt: skip


def siglip(t: Tensors, at: str, config: Mapping[str, Any], defaults: Mapping[str, int] = SIGLIP) -> int:
    """Add the tensors of a SigLIP vision tower below module ``at`` and return its hidden size."""
    v = sizes(Fields(config), defaults)
    hidden, side = v["hidden_size"], v["image_size"] // v["patch_size"]
    _embeddings(t, at, v, side * side, True)
    _encoder(t, at, v)
    # the pooling head has one learned query, which attends to the patches
    if Fields(config).boolean("vision_use_head", True):
        head = f"{at}.head"
        t.add(f"{head}.probe", (1, 1, hidden), "vision", "MultiheadAttentionPoolingHead")
        t.add(f"{head}.attention.in_proj_weight", (3 * hidden, hidden), "vision", "MultiheadAttention")
        t.add(f"{head}.attention.in_proj_bias", (3 * hidden,), "vision", "MultiheadAttention")
        t.linear(f"{head}.attention.out_proj", hidden, hidden, bias=True, module_class="OutProjection")
        t.norm(f"{head}.layernorm", hidden, "layer")
        t.plain_mlp(f"{head}.mlp", hidden, v["intermediate_size"], bias=True, names=("fc1", "fc2"))
    return hidden


def clip(t: Tensors, at: str, config: Mapping[str, Any], defaults: Mapping[str, int] = CLIP) -> int:
    """Add the tensors of a CLIP vision tower below module ``at`` and return its hidden size.

    A CLIP tower is a SigLIP tower with a class token, a norm before the layers and no bias in the patch
    embedding.
    """
    v = sizes(Fields(config), defaults)
    hidden, side = v["hidden_size"], v["image_size"] // v["patch_size"]
    t.add(f"{at}.embeddings.class_embedding", (hidden,), "vision", "CLIPVisionEmbeddings")
    _embeddings(t, at, v, side * side + 1, False)
    t.norm(f"{at}.pre_layrnorm", hidden, "layer")
    _encoder(t, at, v)
    return hidden


PIXTRAL = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 1024, "patch_size": 16,
}  # fmt: skip


def pixtral_layers(t: Tensors, at: str, v: Mapping[str, int]) -> None:
    """Add the patch embedding, its norm and the layers of a Pixtral tower with the sizes ``v``."""
    hidden = v["hidden_size"]
    conv(t, f"{at}.patch_conv", (hidden, v["num_channels"], v["patch_size"], v["patch_size"]), False)
    t.norm(f"{at}.ln_pre", hidden)
    for i in range(v["num_hidden_layers"]):
        here = f"{at}.transformer.layers.{i}"
        t.attention(f"{here}.attention", Heads(hidden, 1, 1, hidden))
        t.gated_mlp(f"{here}.feed_forward", hidden, v["intermediate_size"])
        t.norms(here, hidden, "attention_norm", "ffn_norm")


def pixtral(t: Tensors, at: str, config: Mapping[str, Any], defaults: Mapping[str, int] = PIXTRAL) -> int:
    """Add the tensors of a Pixtral vision tower below module ``at`` and return its hidden size.

    The tower is a Llama-like transformer over image patches, without biases.
    """
    v = sizes(Fields(config), defaults)
    hidden, heads, side = v["hidden_size"], v["num_attention_heads"], v["image_size"] // v["patch_size"]
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.num_attention_heads")
    pixtral_layers(t, at, v)
    name = f"{at}.patch_positional_embedding.inv_freq"
    t.buffer(name, (side * side, hidden // heads), "PixtralRotaryEmbedding", "float32")
    return hidden


def qwen_sizes(f: Fields, tower: Tower) -> tuple[int, int, int, int, int]:
    """Return (hidden size, MLP inner size, image channels, frames per patch, side of a patch in pixels).

    ``f`` is the vision config of Qwen2-VL to Qwen3.5. Sizes missing in it have the defaults of its class.
    """
    new = tower == "qwen3"
    if tower == "qwen2":
        hidden = f.integer("embed_dim", 1280, limit="width")
        inner = hidden * f.integer("mlp_ratio", 4, limit="width")
    else:
        hidden = f.integer("hidden_size", 1152 if new else 3584, limit="width")
        inner = f.integer("intermediate_size", 4304 if new else 3420, limit="width")
    channels = f.integer("in_channels" if "in_channels" in f.config else "in_chans", 3, limit="width")
    frames = f.integer("temporal_patch_size", 2, limit="width")
    return hidden, inner, channels, frames, f.integer("patch_size", 16 if new else 14, limit="width")


def qwen(t: Tensors, at: str, config: Mapping[str, Any], tower: Tower, *, deepstack: bool = True) -> None:
    """Add the tensors of the vision tower of Qwen2-VL to Qwen3.5.

    The tower has a patch embedding over two frames, layers with a fused qkv projection, and a merger of
    neighbouring patches. Sizes missing in the config have the defaults of the vision config class.

    Args:
        t: receives the tensors.
        at: module of the tower.
        config: the vision config.
        tower: ``qwen2`` (Qwen2-VL), ``qwen2_5`` or ``qwen3`` (Qwen3-VL and later).
        deepstack: whether a qwen3 tower has further mergers after some of its layers, as in Qwen3-VL.
    """
    f = Fields(config)
    old = tower == "qwen2"
    gated = tower == "qwen2_5"
    new = not old and not gated
    hidden, inner, channels, frames, patch = qwen_sizes(f, tower)
    depth = f.integer("depth", 27 if new else 32, limit="layers")
    merged = hidden * f.integer("spatial_merge_size", 2, limit="width") ** 2
    norm = "rms" if gated else "layer"
    conv(t, f"{at}.patch_embed.proj", (hidden, channels, frames, patch, patch), new)
    if new:
        t.embedding(f"{at}.pos_embed", f.integer("num_position_embeddings", 2304, limit="width"), hidden)
    heads = f.integer("num_heads", 16, limit="heads")
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.num_heads")
    for i in range(depth):
        here = f"{at}.blocks.{i}"
        t.norms(here, hidden, "norm1", "norm2", kind=norm)
        t.linear(f"{here}.attn.qkv", 3 * hidden, hidden, bias=True, shard="column")
        t.linear(f"{here}.attn.proj", hidden, hidden, bias=True, shard="row")
        if gated:
            t.gated_mlp(f"{here}.mlp", hidden, inner, bias=True)
        else:
            names = ("linear_fc1", "linear_fc2") if new else ("fc1", "fc2")
            t.plain_mlp(f"{here}.mlp", hidden, inner, bias=True, names=names)
    out = f.integer("hidden_size" if old else "out_hidden_size", 3584, limit="width")
    if new:
        listed = f.raw("deepstack_visual_indexes")
        if listed is None:
            listed = [8, 16, 24]  # default of deepstack_visual_indexes in Qwen3VLVisionConfig
        if not isinstance(listed, list) or len(listed) > depth or not all(type(i) is int for i in listed):
            raise ConfigError(
                f"{shown(listed)} is not a list of layer indices", field="deepstack_visual_indexes"
            )
        mergers = [(f"{at}.merger", hidden)]
        if deepstack:
            mergers += [(f"{at}.deepstack_merger_list.{k}", merged) for k in range(len(listed))]
        for here, width in mergers:
            t.norm(f"{here}.norm", width, "layer")
            t.linear(f"{here}.linear_fc1", merged, merged, bias=True, shard="column")
            t.linear(f"{here}.linear_fc2", out, merged, bias=True, shard="row")
    else:
        t.norm(f"{at}.merger.ln_q", hidden, norm)
        t.linear(f"{at}.merger.mlp.0", merged, merged, bias=True, shard="column")
        t.linear(f"{at}.merger.mlp.2", out, merged, bias=True, shard="row")
    t.rotary(hidden // heads // 2, f"{at}.rotary_pos_emb.")


GEMMA4 = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "patch_size": 16, "position_embedding_size": 10_240,
}  # fmt: skip


def gemma4(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of Gemma 4's vision tower and return its hidden size."""
    f = Fields(config)
    v = sizes(f, GEMMA4)
    hidden, heads = v["hidden_size"], v["num_attention_heads"]
    size = f.integer("head_dim", 64, limit="width")
    kv_heads = f.integer("num_key_value_heads", heads, limit="heads")
    patch, places = v["patch_size"], v["position_embedding_size"]
    bias = f.boolean("attention_bias", False)
    clipped = f.boolean("use_clipped_linears", False)
    t.add(f"{at}.patch_embedder.position_embedding_table", (2, places, hidden), "vision", "PatchEmbedder")
    t.linear(f"{at}.patch_embedder.input_proj", hidden, 3 * patch * patch)
    for i in range(v["num_hidden_layers"]):
        here = f"{at}.encoder.layers.{i}"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            linear(t, f"{here}.self_attn.{name}_proj", rows * size, hidden, clipped, bias)
        linear(t, f"{here}.self_attn.o_proj", hidden, heads * size, clipped, bias)
        t.norms(f"{here}.self_attn", size, "q_norm", "k_norm")
        for name in ("gate", "up"):
            linear(t, f"{here}.mlp.{name}_proj", v["intermediate_size"], hidden, clipped)
        linear(t, f"{here}.mlp.down_proj", hidden, v["intermediate_size"], clipped)
        t.norms(here, hidden, *common.FOUR_NORMS)
    if f.boolean("standardize", False):
        t.buffer(f"{at}.std_bias", (hidden,), "Gemma4VisionModel", None, "model")
        t.buffer(f"{at}.std_scale", (hidden,), "Gemma4VisionModel", None, "model")
    t.rotary(size // 2, f"{at}.encoder.rotary_emb.")
    return hidden


def mllama(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of Llama 3.2's vision tower and return its output width.

    There are separate position tables for tiles. A second, gated transformer follows the first one.
    """
    f = Fields(config)
    v = sizes(
        f, {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_global_layers": 8,
            "num_channels": 3, "image_size": 448, "patch_size": 14, "max_num_tiles": 4},
    )  # fmt: skip
    hidden, patch = v["hidden_size"], v["patch_size"]
    heads = f.integer("attention_heads", 16, limit="heads")
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.attention_heads")
    patches = (v["image_size"] // patch) ** 2 + 1
    ratios = f.raw("supported_aspect_ratios")
    count = (len(ratios) if isinstance(ratios, list) else 8) + 1
    t.add(f"{at}.class_embedding", (hidden,), "vision", "MllamaVisionModel")
    conv(t, f"{at}.patch_embedding", (hidden, v["num_channels"], patch, patch), False)
    here = f"{at}.gated_positional_embedding"
    t.add(f"{here}.gate", (1,), "vision", "PositionEmbedding")
    t.add(f"{here}.embedding", (patches, hidden), "vision", "PositionEmbedding")
    t.embedding(f"{here}.tile_embedding", count, v["max_num_tiles"] * patches * hidden)
    for name in ("pre", "post"):
        t.add(f"{at}.{name}_tile_positional_embedding.gate", (1,), "vision", "AspectRatioEmbedding")
        t.embedding(f"{at}.{name}_tile_positional_embedding.embedding", count, v["max_num_tiles"] * hidden)
    t.norms(at, hidden, "layernorm_pre", "layernorm_post", kind="layer")
    for part, layers in (
        ("transformer", v["num_hidden_layers"]),
        ("global_transformer", v["num_global_layers"]),
    ):
        for i in range(layers):
            here = f"{at}.{part}.layers.{i}"
            t.attention(f"{here}.self_attn", Heads(hidden, 1, 1, hidden))
            t.plain_mlp(f"{here}.mlp", hidden, v["intermediate_size"], bias=True, names=("fc1", "fc2"))
            t.layer_norms(here, hidden, "layer")
            if part == "global_transformer":
                t.add(f"{here}.gate_attn", (1,), "vision", "VisionEncoderLayer")
                t.add(f"{here}.gate_ffn", (1,), "vision", "VisionEncoderLayer")
    return f.integer("vision_output_dim", 7680, limit="width")


LLAMA4 = {
    "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 448, "patch_size": 14, "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}  # fmt: skip


def llama4(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of Llama 4's vision tower and return the width that the projector reads."""
    f = Fields(config)
    v = sizes(f, LLAMA4)
    hidden, patch = v["hidden_size"], v["patch_size"]
    t.add(f"{at}.class_embedding", (hidden,), "vision", "Llama4VisionModel")
    places = (v["image_size"] // patch) ** 2 + 1
    t.add(f"{at}.positional_embedding_vlm", (places, hidden), "vision", "Llama4VisionModel")
    t.linear(f"{at}.patch_embedding.linear", hidden, v["num_channels"] * patch * patch)
    t.norms(at, hidden, "layernorm_pre", "layernorm_post", kind="layer")
    for i in range(v["num_hidden_layers"]):
        here = f"{at}.model.layers.{i}"
        t.attention(f"{here}.self_attn", Heads(hidden, 1, 1, hidden), bias=True, out_bias=True)
        t.plain_mlp(f"{here}.mlp", hidden, v["intermediate_size"], bias=True, names=("fc1", "fc2"))
        t.layer_norms(here, hidden, "layer")
    t.linear(f"{at}.vision_adapter.mlp.fc1", v["projector_input_dim"], v["intermediate_size"])
    t.linear(f"{at}.vision_adapter.mlp.fc2", v["projector_output_dim"], v["projector_output_dim"])
    common.divisible(hidden, v["num_attention_heads"], "vision_config.hidden_size", "num_attention_heads")
    size = hidden // v["num_attention_heads"]
    t.buffer(
        f"{at}.rotary_embedding.freqs_ci", (places, 1, size // 2), "Llama4VisionRotaryEmbedding", "complex64"
    )
    return f.integer("vision_output_dim", 7680, limit="width")


MOONVIT = {
    **{n: f"vt_{n}" for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    **{f"pos_emb_{n}": f"init_pos_emb_{n}" for n in ("height", "width", "time")},
}


def moonvit(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of Kimi-K2.5's MoonViT tower and return its hidden size.

    The config may have the field names of the published files or those of transformers.
    """
    f = Fields(config, MOONVIT)
    hidden = f.integer("hidden_size", 1152, limit="width")
    inner = f.integer("intermediate_size", 4304, limit="width")
    layers = f.integer("num_hidden_layers", 27, limit="layers")
    heads = f.integer("num_attention_heads", 16, limit="heads")
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.num_attention_heads")
    patch = f.integer("patch_size", 14, limit="width")
    height, width = (f.integer(f"pos_emb_{side}", 64, limit="width") for side in ("height", "width"))
    frames = f.integer("pos_emb_time", 4, limit="width") + 1
    conv(t, f"{at}.patch_embed.proj", (hidden, 3, patch, patch), True)
    here = f"{at}.patch_embed.pos_emb"
    t.add(f"{here}.position_embeddings", (height, width, hidden), "vision", "VisionPositionEmbeddings")
    t.buffer(f"{here}.time_position_embeddings", (frames, hidden), "VisionPositionEmbeddings", "float32")
    for i in range(layers):
        here = f"{at}.layers.{i}"
        t.norms(here, hidden, "norm1", "norm2", kind="layer")
        for name in ("q_proj", "k_proj", "v_proj"):
            t.linear(f"{here}.attn.{name}", hidden, hidden, bias=True, shard="column")
        t.linear(f"{here}.attn.proj", hidden, hidden, bias=True, shard="row")
        t.plain_mlp(f"{here}.mlp", hidden, inner, bias=True, names=("fc1", "fc2"))
    t.norm(f"{at}.final_layernorm", hidden, "layer")
    t.rotary(hidden // heads // 2, f"{at}.rotary_emb.")
    return hidden


def moonvit_2d(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of Kimi-VL's MoonViT tower and return its hidden size.

    Sources: remote code modeling_kimi_vl.py; vLLM 0.32.0, models/moonvit.py.
    """
    f = Fields(config)
    v = sizes(
        f, {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64},
    )  # fmt: skip
    hidden = v["hidden_size"]
    conv(t, f"{at}.patch_embed.proj", (hidden, 3, v["patch_size"], v["patch_size"]), True)
    places = (v["init_pos_emb_height"], v["init_pos_emb_width"], hidden)
    t.add(f"{at}.patch_embed.pos_emb.weight", places, "vision", "Learnable2DInterpPosEmb")
    for i in range(v["num_hidden_layers"]):
        here = f"{at}.encoder.blocks.{i}"
        t.norms(here, hidden, "norm0", "norm1", kind="layer")
        t.plain_mlp(f"{here}.mlp", hidden, v["intermediate_size"], bias=True, names=("fc0", "fc1"))
        t.linear(f"{here}.wqkv", 3 * hidden, hidden, bias=True, shard="column")
        t.linear(f"{here}.wo", hidden, hidden, bias=True, shard="row")
    t.norm(f"{at}.encoder.final_layernorm", hidden, "layer")
    return hidden


MINIMAX = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 14, "temporal_patch_size": 2,
}  # fmt: skip


def minimax(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of MiniMax-M3's vision tower and return its hidden size.

    The tower has CLIP layers with rotary positions, and a patch embedding over two frames.
    """
    f = Fields(config)
    v = sizes(f, MINIMAX)
    hidden, patch = v["hidden_size"], v["patch_size"]
    conv(t, f"{at}.embeddings.proj", (hidden, v["num_channels"], v["temporal_patch_size"], patch, patch), False)
    t.norm(f"{at}.pre_layrnorm", hidden, "layer")
    for i in range(v["num_hidden_layers"]):
        _encoder_layer(t, f"{at}.layers.{i}", hidden, v["intermediate_size"], ("layer_norm1", "layer_norm2"))
    t.rotary(
        2 * (hidden // v["num_attention_heads"] // 2 // 3), f"{at}.rotary_emb."
    )  # rotary positions have three axes
    return hidden


def step(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of Step-3.7's vision tower and return its output width.

    The layers have learned scales, and two strided convolutions follow the layers.
    """
    f = Fields(config)
    v = sizes(
        f, {"hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16,
            "num_channels": 3, "image_size": 728, "patch_size": 14},
    )  # fmt: skip
    hidden, patch = v["hidden_size"], v["patch_size"]
    # transformers' class reads mlp_ratio, not intermediate_size
    inner = f.share("mlp_ratio", 8960 / 1536, hidden)
    places = (v["image_size"] // patch) ** 2
    conv(t, f"{at}.embeddings.patch_embedding", (hidden, v["num_channels"], patch, patch), False)
    t.embedding(f"{at}.embeddings.position_embedding", places, hidden)
    t.buffer(f"{at}.embeddings.position_ids", (1, places), "VisionEmbeddings", "int64")
    t.norm(f"{at}.pre_layernorm", hidden, "layer")
    for i in range(v["num_hidden_layers"]):
        here = f"{at}.layers.{i}"
        t.add(f"{here}.lambda_1", (hidden,), "vision", "VisionEncoderLayer")
        t.add(f"{here}.lambda_2", (hidden,), "vision", "VisionEncoderLayer")
        _encoder_layer(t, here, hidden, inner, ("layernorm_before", "layernorm_after"))
    t.rotary(hidden // v["num_attention_heads"] // 2, f"{at}.rotary_emb.")
    conv(t, f"{at}.downsampler1", (2 * hidden, hidden, 3, 3), True)
    conv(t, f"{at}.downsampler2", (4 * hidden, 2 * hidden, 3, 3), True)
    return 4 * hidden
