"""Qwen's Omni models: only the thinker (the multimodal language model), which engines serve.

The talker and the vocoder turn the thinker's answers into sound. They are separate models that engines do not
load (vLLM 0.32.0, models/qwen2_5_omni_thinker.py).

Shapes follow transformers 5.19, models/qwen2_5_omni and qwen3_omni_moe. In both models, vLLM counts images as
in Qwen2.5-VL. An audio clip has fewer embeddings than an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import image_limits, towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import joined, text_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.vision import Tower

_IGNORED = (
    "talker_config", "token2wav_config", "code2wav_config", "enable_audio_output", "enable_talker",
    "enable_audio_output_",  # Qwen2.5-Omni-7B-AWQ's spelling of enable_audio_output
    "assistant_token_id", "im_end_token_id", "im_start_token_id", "system_token_id", "tts_bos_token_id",
    "tts_eos_token_id", "tts_pad_token_id", "user_token_id", "preprocessor_config", "video_preprocessor_config",
)  # fmt: skip


def thinker(
    fields: Fields, model_type: str, *, class_name: str, text_type: str, tower: Tower,
    audio: Callable[[Tensors, str, Mapping[str, Any]], None], either: bool = False,
) -> Architecture:  # fmt: skip
    """Return the architecture of an Omni model's thinker from its checked config.

    Args:
        fields: the config.
        model_type: type of the model.
        class_name: the whole model's class in transformers.
        text_type: model_type of the language model.
        tower: version of the vision tower, such as ``qwen2_5``.
        audio: function that adds the audio encoder's tensors.
        either: whether the head is also tied if only the config of the language model says so.
    """
    config = fields.mapping("thinker_config")
    if config is None:
        raise ConfigError("missing", field="thinker_config")
    inner = Fields(config)
    stated = inner.mapping("text_config")
    if stated is None:
        raise ConfigError("missing", field="thinker_config.text_config")
    text = text_of(inner, text_type, {"num_key_value_heads": 4, **stated}, either=either)
    t = Tensors("vision")
    vision = inner.mapping("vision_config") or {}
    towers.qwen(t, "visual", vision, tower)
    t.role = "audio"
    audio(t, "audio_tower", inner.mapping("audio_config") or {})
    seen = image_limits.omni(fields, vision, tower, text.hidden_size)
    return joined(text, model_type, class_name, t, "model.", vision=seen)


def _sizes(f: Fields) -> tuple[int, int, int, int]:
    """Return (width, MLP inner size, Mel bins, output width) of an Omni model's audio encoder."""
    return (
        f.integer("d_model", 1280, limit="width"), f.integer("encoder_ffn_dim", 5120, limit="width"),
        f.integer("num_mel_bins", 128, limit="width"), f.integer("output_dim", 3584, limit="width"),
    )  # fmt: skip


def encoder_layers(t: Tensors, at: str, f: Fields, hidden: int, inner: int, key_bias: bool) -> None:
    """Add the tensors of an Omni model's audio encoder: layers, positions and last norm.

    ``key_bias`` is whether the k projection has a bias.
    """
    for i in range(f.integer("encoder_layers", 32, limit="layers")):
        here = f"{at}.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj"):
            biased = key_bias or name != "k_proj"
            t.linear(f"{here}.self_attn.{name}", hidden, hidden, bias=biased, shard="column")
        t.linear(f"{here}.self_attn.out_proj", hidden, hidden, bias=True, shard="row")
        t.norm(f"{here}.self_attn_layer_norm", hidden, "layer")
        t.plain_mlp(here, hidden, inner, bias=True, names=("fc1", "fc2"))
        t.norm(f"{here}.final_layer_norm", hidden, "layer")
    places = f.integer("max_source_positions", 1500, limit="positions")
    name = f"{at}.positional_embedding.positional_embedding"
    t.buffer(name, (places, hidden), "SinusoidsPositionEmbedding", "float32")
    t.norm(f"{at}.ln_post", hidden, "layer")


def downsampling(t: Tensors, at: str, f: Fields) -> tuple[int, int]:
    """Add an audio encoder's three convolutions of stride two and their output matrix.

    Returns (hidden size of the encoder, output width).
    """
    hidden, _, mels, out = _sizes(f)
    wide = f.integer("downsample_hidden_size", 480, limit="width")
    for number, into in ((1, 1), (2, wide), (3, wide)):
        _conv(t, f"{at}.conv2d{number}", (wide, into, 3, 3), "Conv2d")
        mels = (mels + 1) // 2
    t.linear(f"{at}.conv_out", hidden, wide * mels)
    return hidden, out


def _conv(t: Tensors, module: str, shape: tuple[int, ...], kind: str) -> None:
    """Add the weight and bias of a convolution; ``kind`` is its class."""
    t.add(f"{module}.weight", shape, "audio", kind)
    t.add(f"{module}.bias", shape[:1], "audio", kind)


def _whisper(t: Tensors, at: str, config: Mapping[str, Any]) -> None:
    """Add the tensors of Whisper's encoder (Qwen2_5OmniAudioEncoder)."""
    f = Fields(config)
    hidden, inner, mels, out = _sizes(f)
    _conv(t, f"{at}.conv1", (hidden, mels, 3), "Conv1d")
    _conv(t, f"{at}.conv2", (hidden, hidden, 3), "Conv1d")
    t.embedding(f"{at}.audio_bos_eos_token", 2, out)
    encoder_layers(t, at, f, hidden, inner, key_bias=False)
    t.linear(f"{at}.proj", out, hidden, bias=True)


def _downsampled(t: Tensors, at: str, config: Mapping[str, Any]) -> None:
    """Add the tensors of an audio encoder with Whisper's layers (Qwen3OmniMoeAudioEncoder).

    Three convolutions of stride two precede the layers.
    """
    f = Fields(config)
    hidden, out = downsampling(t, at, f)
    encoder_layers(t, at, f, hidden, _sizes(f)[1], key_bias=True)
    t.connector(at, hidden, hidden, out, names=("proj1", "proj2"))


_family = partial(Family, ignored=_IGNORED, files=RENAMED)
FAMILIES = {
    "qwen2_5_omni": _family(
        partial(
            thinker, class_name="Qwen2_5OmniForConditionalGeneration", text_type="qwen2", tower="qwen2_5",
            audio=_whisper, either=True,
        ),
        first_class="Qwen2_5OmniModel",
    ),
    "qwen3_omni_moe": _family(
        partial(
            thinker, class_name="Qwen3OmniMoeForConditionalGeneration", text_type="qwen3_moe", tower="qwen3",
            audio=_downsampled,
        )
    ),
}  # fmt: skip
