"""Gemma 3n's encoders: MobileNetV5-300M for images, a Conformer for audio, and projections into the text model.

Shapes follow timm 1.0.31 (models/mobilenetv5.py, mobilenetv5_300m_enc) and transformers 5.19 (models/gemma3n/).
The image tower is a fixed model of the package timm: config.json states only its name, no sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.families.towers import conv
from tonnage.planner.model.fields import Fields, shown

VISION_WIDTH = 2048  # Number of channels of the image tower's fused output.
# Each stage of the image tower is (channels, [(start kernel, middle kernel, expansion) of each inverted
# residual block], (number of pairs of an attention and a residual block, heads, head size, kernel that
# downsamples keys and values)).
_STAGES = (
    (256, [(3, 5, 6), (5, 0, 4), (3, 0, 4), (5, 0, 4), (3, 0, 4)], (0, 0, 0, 0)),
    (640, [(5, 5, 6), *[(5, 0, 4)] * 7, (0, 0, 1)], (14, 12, 64, 3)),
    (1280, [(5, 5, 6)], (19, 16, 96, 0)),
)


def vision(t: Tensors, at: str, config: Mapping[str, Any]) -> None:
    """Add the tensors of Gemma 3n's image tower (MobileNetV5) and of the fusion of its last two stages."""
    name = config.get("architecture", "mobilenetv5_300m_enc")
    if name != "mobilenetv5_300m_enc":
        raise UnsupportedArchitecture(
            f"the vision tower {shown(name)} is not supported; only mobilenetv5_300m_enc is",
            field="vision_config.architecture",
        )
    if config.get("model_args"):
        raise UnsupportedArchitecture(
            "arguments for the vision tower of timm are not supported", field="vision_config.model_args"
        )
    at = f"{at}.timm_model"
    conv(t, f"{at}.conv_stem.conv", (64, 3, 3, 3), True)
    t.norm(f"{at}.conv_stem.bn", 64)
    for i, into in enumerate((64, 128, 128)):
        here = f"{at}.blocks.0.{i}"
        _conv(t, here, "conv_exp", "bn1", (4 * into, into, 3, 3))
        _conv(t, here, "conv_pwl", "bn2", (128, 4 * into, 1, 1))
    into = 128
    for stage, (out, blocks, (pairs, heads, size, kernel)) in enumerate(_STAGES, 1):
        number = 0
        for start, middle, expansion in blocks:
            _residual(t, f"{at}.blocks.{stage}.{number}", into, out, start, middle, expansion)
            into, number = out, number + 1
        for _ in range(pairs):
            _attention(t, f"{at}.blocks.{stage}.{number}", out, heads, size, kernel)
            _residual(t, f"{at}.blocks.{stage}.{number + 1}", out, out, 0, 0, 2)
            number += 2
    fused = _STAGES[-1][0] + _STAGES[-2][0]
    _conv(t, f"{at}.msfa.ffn.pw_exp", "conv", "bn", (2 * fused, fused, 1, 1))
    _conv(t, f"{at}.msfa.ffn.pw_proj", "conv", "bn", (VISION_WIDTH, 2 * fused, 1, 1))
    t.norm(f"{at}.msfa.norm", VISION_WIDTH)


def _conv(t: Tensors, at: str, name: str, norm: str, shape: tuple[int, ...]) -> None:
    """Add the tensors of a convolution without bias in the image tower, and of the norm after it."""
    conv(t, f"{at}.{name}", shape, False)
    t.norm(f"{at}.{norm}", shape[0])


def _residual(t: Tensors, at: str, into: int, out: int, start: int, middle: int, expansion: int) -> None:
    """Add the tensors of a universal inverted residual block.

    It has a depthwise, a widening, a second depthwise and a narrowing convolution. ``start`` and ``middle`` are
    the kernel sizes of the first and second depthwise convolution; a size of 0 means that this convolution is
    left out.
    """
    wide = expansion * into
    if start:
        _conv(t, f"{at}.dw_start", "conv", "bn", (into, 1, start, start))
    _conv(t, f"{at}.pw_exp", "conv", "bn", (wide, into, 1, 1))
    if middle:
        _conv(t, f"{at}.dw_mid", "conv", "bn", (wide, 1, middle, middle))
    _conv(t, f"{at}.pw_proj", "conv", "bn", (out, wide, 1, 1))
    t.add(f"{at}.layer_scale.gamma", (out,), "vision", "LayerScale2d")


def _attention(t: Tensors, at: str, width: int, heads: int, size: int, kernel: int) -> None:
    """Add the tensors of multi-query attention below module ``at``.

    If ``kernel`` is above 0, a depthwise convolution of that kernel size downsamples keys and values first.
    """
    t.norm(f"{at}.norm", width)
    conv(t, f"{at}.attn.query.proj", (heads * size, width, 1, 1), False)
    for name in ("key", "value"):
        if kernel:
            _conv(t, f"{at}.attn.{name}", "down_conv", "norm", (width, 1, kernel, kernel))
        conv(t, f"{at}.attn.{name}.proj", (size, width, 1, 1), False)
    conv(t, f"{at}.attn.output.proj", (width, heads * size, 1, 1), False)
    t.add(f"{at}.layer_scale.gamma", (width,), "vision", "LayerScale2d")


def audio(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of the Conformer (Gemma3nAudioEncoder) and return its width."""
    f = Fields(config)
    hidden = f.integer("hidden_size", 1536, limit="width")
    heads = f.integer("conf_num_attention_heads", 8, limit="heads")
    common.divisible(hidden, heads, "audio_config.hidden_size", "audio_config.conf_num_attention_heads")
    features = f.integer("input_feat_size", 128, limit="width")
    kernel = f.integer("conf_conv_kernel_size", 5, limit="width")
    into = 1
    sizes = (
        config.get("sscp_conv_channel_size", [128, 32]),
        config.get("sscp_conv_kernel_size", [[3, 3], [3, 3]]),
        config.get("sscp_conv_stride_size", [[2, 2], [2, 2]]),
    )
    if sizes != ([128, 32], [[3, 3], [3, 3]], [[2, 2], [2, 2]]):
        raise UnsupportedArchitecture(
            "convolutions that differ from the published models' are not supported",
            field="audio_config.sscp_conv",
        )
    first = f"{at}.subsample_conv_projection"
    for i, channels in enumerate(sizes[0]):
        t.add(f"{first}.conv_{i}.conv.weight", (channels, into, 3, 3), "audio", "Conv2d")
        t.norm(f"{first}.conv_{i}.norm", channels)
        features, into = (features + 2 - 3) // 2 + 1, channels
    t.linear(f"{first}.input_proj_linear", hidden, into * features)
    for i in range(f.integer("conf_num_hidden_layers", 12, limit="layers")):
        here = f"{at}.conformer.{i}"
        _feed_forward(t, f"{here}.ffw_layer_start", hidden)
        t.norm(f"{here}.attention.pre_attn_norm", hidden)
        attn = f"{here}.attention.attn"
        t.add(f"{attn}.per_dim_scale", (hidden // heads,), "audio", "Gemma3nAudioAttention")
        for name in ("relative_position_embedding.pos_proj", "q_proj", "k_proj", "v_proj"):
            t.linear(f"{attn}.{name}", hidden, hidden)
        t.linear(f"{here}.attention.post", hidden, hidden)
        t.norm(f"{here}.attention.post_norm", hidden)
        t.norm(f"{here}.lconv1d.pre_layer_norm", hidden)
        t.linear(f"{here}.lconv1d.linear_start", 2 * hidden, hidden)
        t.add(f"{here}.lconv1d.depthwise_conv1d.weight", (hidden, 1, kernel), "audio", "Conv1d")
        t.norm(f"{here}.lconv1d.conv_norm", hidden)
        t.linear(f"{here}.lconv1d.linear_end", hidden, hidden)
        _feed_forward(t, f"{here}.ffw_layer_end", hidden)
        t.norm(f"{here}.norm", hidden)
        _audio_buffers(t, f, here, hidden)
    return hidden


def _feed_forward(t: Tensors, at: str, hidden: int) -> None:
    """Add the tensors of one of the two feed-forward modules of a Conformer layer."""
    t.norm(f"{at}.pre_layer_norm", hidden)
    t.linear(f"{at}.ffw_layer_1", 4 * hidden, hidden)
    t.linear(f"{at}.ffw_layer_2", hidden, 4 * hidden)
    t.norm(f"{at}.post_layer_norm", hidden)


def _audio_buffers(t: Tensors, f: Fields, at: str, hidden: int) -> None:
    """Add the constant buffers of a Conformer layer of the audio tower.

    The constants are gradient limits, a scale, a mask and the frequencies of relative positions.
    """
    chunk = f.integer("conf_attention_chunk_size", 12, limit="positions")
    left = f.integer("conf_attention_context_left", 13, limit="positions")
    right = f.integer("conf_attention_context_right", 0, limit="positions", minimum=0)
    for name in ("", "ffw_layer_start.", "attention.", "lconv1d.", "ffw_layer_end."):
        t.buffer(f"{at}.{name}gradient_clipping", (), "Gemma3nAudio", None)
    attn = f"{at}.attention.attn"
    t.buffer(f"{attn}.q_scale", (), "Gemma3nAudioAttention", None)
    t.buffer(f"{attn}.softcap", (), "Gemma3nAudioAttention", "float32")
    mask = (chunk, chunk + max(0, left - 1) + right)
    t.buffer(f"{attn}.local_causal_valid_mask", mask, "Gemma3nAudioAttention", "bool")
    name = f"{attn}.relative_position_embedding.inv_timescales"
    t.buffer(name, (1, 1, hidden // 2), "Gemma3nAudioRelativePositionEmbedding", "float32")


def embedder(t: Tensors, at: str, config: Mapping[str, Any], width: int, hidden: int) -> None:
    """Add the tensors of Gemma3nMultimodalEmbedder, which projects one modality into the text model.

    They are an embedding of special tokens, two norms and a projection [hidden, width].
    """
    t.embedding(f"{at}.embedding", Fields(config).integer("vocab_size", 128, limit="vocab"), width)
    t.norms(at, width, "hard_embedding_norm", "soft_embedding_norm")
    t.linear(f"{at}.embedding_projection", hidden, width)
