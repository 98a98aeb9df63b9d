"""Gemma 4's audio tower: the Conformer of the small models. Shapes follow transformers 5.19, models/gemma4/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.fields import Fields, shown

_CHANNELS = [128, 32]  # output channels of the two convolutions in every published model


def audio(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of Gemma 4's audio tower, a Conformer, and return the width of its output."""
    f = Fields(config)
    hidden = f.integer("hidden_size", 1024, limit="width")
    heads = f.integer("num_attention_heads", 8, limit="heads")
    common.divisible(hidden, heads, "audio_config.hidden_size", "audio_config.num_attention_heads")
    channels = config.get("subsampling_conv_channels") or _CHANNELS
    if channels != _CHANNELS:
        raise UnsupportedArchitecture(
            f"{shown(channels)} is not supported; published models have {shown(_CHANNELS)}",
            field="audio_config.subsampling_conv_channels",
        )
    clipped = f.boolean("use_clipped_linears", True)
    first = f"{at}.subsample_conv_projection"
    for i, into in enumerate((1, channels[0])):
        t.add(f"{first}.layer{i}.conv.weight", (channels[i], into, 3, 3), "audio", "Conv2d")
        t.norm(f"{first}.layer{i}.norm", channels[i])
    t.linear(f"{first}.input_proj_linear", hidden, channels[0] // 4 * channels[1])
    t.buffer(f"{at}.rel_pos_enc.inv_timescales", (1, 1, hidden // 2), "RelPositionalEncoding", "float32")
    for i in range(f.integer("num_hidden_layers", 12, limit="layers")):
        here = f"{at}.layers.{i}"
        for name in ("feed_forward1", "feed_forward2"):
            linear(t, f"{here}.{name}.ffw_layer_1", 4 * hidden, hidden, clipped)
            linear(t, f"{here}.{name}.ffw_layer_2", hidden, 4 * hidden, clipped)
            t.norm(f"{here}.{name}.pre_layer_norm", hidden)
            t.norm(f"{here}.{name}.post_layer_norm", hidden)
        attn = f"{here}.self_attn"
        for name in ("q_proj", "k_proj", "v_proj", "post"):
            linear(t, f"{attn}.{name}", hidden, hidden, clipped)
        t.linear(f"{attn}.relative_k_proj", hidden, hidden)
        t.add(f"{attn}.per_dim_scale", (hidden // heads,), "audio", "Gemma4AudioAttention")
        t.buffer(f"{attn}.softcap", (), "Gemma4AudioAttention", "float32")
        conv = f"{here}.lconv1d"
        linear(t, f"{conv}.linear_start", 2 * hidden, hidden, clipped)
        linear(t, f"{conv}.linear_end", hidden, hidden, clipped)
        kernel = f.integer("conv_kernel_size", 5, limit="width")
        t.add(f"{conv}.depthwise_conv1d.weight", (hidden, 1, kernel), "audio", "Conv1d")
        t.norms(conv, hidden, "pre_layer_norm", "conv_norm")
        t.norms(here, hidden, "norm_pre_attn", "norm_post_attn", "norm_out")
    out = f.integer("output_proj_dims", 1536, limit="width")
    t.linear(f"{at}.output_proj", out, hidden, bias=True)
    return out


def linear(t: Tensors, module: str, out: int, into: int, clipped: bool, bias: bool = False) -> None:
    """Add the tensors of a Gemma4ClippableLinear: a matrix and, with ``clipped``, four scalar limits.

    The limits are the minimum and maximum of the input and of the output.
    """
    t.linear(f"{module}.linear", out, into, bias=bias)
    if clipped:
        for name in ("input_min", "input_max", "output_min", "output_max"):
            t.buffer(f"{module}.{name}", (), "Gemma4ClippableLinear", None, "model")
