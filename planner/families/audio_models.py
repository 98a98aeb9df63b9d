"""Audio-language models: an audio encoder, a connector and a text model.

Families: Voxtral, Qwen2-Audio, Qwen3-ASR, GLM-ASR and Audio Flamingo 3.
Shapes follow transformers 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import joined, text_of
from tonnage.planner.families.omni import downsampling, encoder_layers
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, shown

# Top-level config fields that determine no tensor shape, such as token ids. Nested objects are listed too,
# because the builder functions read their fields separately.
_TOP = (
    "text_config", "audio_config", "audio_token_id", "audio_token_index", "projector_hidden_act",
    "hidden_size", "vocab_size",
)  # fmt: skip


def _encoder(t: Tensors, at: str, f: Fields, names: tuple[str, str, str]) -> int:
    """Add the tensors of a Whisper encoder below module ``at`` and return its hidden size.

    ``names`` are the names of the config fields that state the hidden size, the number of layers and the MLP's
    inner size.
    """
    width, layers = f.integer(names[0], 1280, limit="width"), f.integer(names[1], 32, limit="layers")
    inner, mel = f.integer(names[2], 5120, limit="width"), f.integer("num_mel_bins", 128, limit="width")
    towers.conv(t, f"{at}.conv1", (width, mel, 3), True)
    towers.conv(t, f"{at}.conv2", (width, width, 3), True)
    t.embedding(f"{at}.embed_positions", f.integer("max_source_positions", 1500, limit="positions"), width)
    for i in range(layers):
        here = f"{at}.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            t.linear(f"{here}.self_attn.{name}", width, width, bias=name != "k_proj")
        t.norm(f"{here}.self_attn_layer_norm", width, "layer")
        t.plain_mlp(here, width, inner, bias=True, names=("fc1", "fc2"))
        t.norm(f"{here}.final_layer_norm", width, "layer")
    t.norm(f"{at}.layer_norm", width, "layer")
    return width


def voxtral(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Voxtral model from its checked config."""
    config = fields.mapping("text_config") or {}
    if (kind := config.get("model_type", "llama")) not in ("llama", "mistral"):
        raise UnsupportedArchitecture(f"{shown(kind)} is not llama or mistral", field="text_config.model_type")
    text = text_of(fields, kind, config)
    f = Fields(fields.mapping("audio_config") or {})
    t, at = Tensors("audio"), "model.audio_tower"
    _encoder(t, at, f, ("hidden_size", "num_hidden_layers", "intermediate_size"))
    t.role, joint = "projector", f.integer("intermediate_size", 5120, limit="width")
    t.connector("model.multi_modal_projector", joint, text.hidden_size, text.hidden_size, bias=False)
    return joined(text, model_type, "VoxtralForConditionalGeneration", t)


def qwen2_audio(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Qwen2-Audio model from its checked config."""
    text = text_of(fields, "qwen2", fields.mapping("text_config"))
    t = Tensors("audio")
    f = Fields(fields.mapping("audio_config") or {})
    width = _encoder(t, "model.audio_tower", f, ("d_model", "encoder_layers", "encoder_ffn_dim"))
    t.role = "projector"
    t.linear("model.multi_modal_projector.linear", text.hidden_size, width, bias=True)
    return joined(text, model_type, "Qwen2AudioForConditionalGeneration", t)


def qwen3_asr(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Qwen3-ASR model from its checked config.

    Config files on the Hugging Face hub keep the model's fields in ``thinker_config``; files that transformers
    writes have them at the top level. In checkpoints on the hub the connector's matrices belong to the encoder
    module. The shapes are the same in both forms.
    """
    published = fields.mapping("thinker_config")
    if published is not None:
        fields.ignore(*fields.config)
    inner = fields if published is None else Fields(published)
    text = text_of(inner, "qwen3", inner.mapping("text_config"), tied=True, either=published is not None)
    f = Fields(inner.mapping("audio_config") or {})
    stated = {"d_model": 1024, "encoder_layers": 24, "encoder_ffn_dim": 4096, **f.config}
    # Config files on the hub state the encoder's number of positions in max_source_positions. Files that
    # transformers writes state it in max_position_embeddings: the positions of one chunk of audio (default 13).
    if published is None:
        stated["max_source_positions"] = f.integer("max_position_embeddings", 13, limit="positions")
    f = Fields(stated)
    t, at = Tensors("audio"), "model.audio_tower"
    width, out = downsampling(t, at, f)
    encoder_layers(t, at, f, width, f.integer("encoder_ffn_dim", limit="width"), key_bias=True)
    t.role, at = "projector", "model.multi_modal_projector"
    t.connector(at, width, width, out)
    return joined(text, model_type, "Qwen3ASRForConditionalGeneration", t)


def glmasr(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a GLM-ASR model: Whisper's encoder with rotary positions, and a Llama."""
    text = text_of(fields, "llama", fields.mapping("text_config"), tied=False)
    f = Fields(fields.mapping("audio_config") or {})
    width, inner = (
        f.integer("hidden_size", 1280, limit="width"),
        f.integer("intermediate_size", 5120, limit="width"),
    )
    heads = f.integer("num_attention_heads", 20, limit="heads")
    kv_heads = f.optional_integer("num_key_value_heads", limit="heads") or heads
    size = f.optional_integer("head_dim", limit="width") or width // heads
    t, at = Tensors("audio"), "model.audio_tower"
    towers.conv(t, f"{at}.conv1", (width, f.integer("num_mel_bins", 128, limit="width"), 3), True)
    towers.conv(t, f"{at}.conv2", (width, width, 3), True)
    for i in range(f.integer("num_hidden_layers", 32, limit="layers")):
        here = f"{at}.layers.{i}"
        for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            t.linear(f"{here}.self_attn.{name}", rows * size, width, bias=name != "k_proj")
        t.linear(f"{here}.self_attn.o_proj", width, heads * size, bias=True)
        t.plain_mlp(f"{here}.mlp", width, inner, bias=True, names=("fc1", "fc2"))
        t.layer_norms(here, width, "layer")
    t.norm(f"{at}.norm", width, "layer")
    t.role, at = "projector", "model.multi_modal_projector"
    t.connector(at, inner, 2 * text.hidden_size, text.hidden_size)
    return joined(text, model_type, "GlmAsrForConditionalGeneration", t)


def audioflamingo3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an Audio Flamingo 3 model: Whisper's encoder, a connector and a Qwen2."""
    text = text_of(fields, "qwen2", fields.mapping("text_config"))
    t = Tensors("audio")
    f = Fields(fields.mapping("audio_config") or {})
    width = _encoder(t, "model.audio_tower", f, ("hidden_size", "num_hidden_layers", "intermediate_size"))
    t.role, at = "projector", "model.multi_modal_projector"
    bias = fields.boolean("projector_bias", True)
    t.connector(at, width, text.hidden_size, text.hidden_size, bias=bias)
    return joined(text, model_type, "AudioFlamingo3ForConditionalGeneration", t)


FAMILIES = {
    "voxtral": Family(voxtral, ignored=_TOP, files=RENAMED),
    "qwen2_audio": Family(qwen2_audio, ignored=_TOP, files=RENAMED),
    "qwen3_asr": Family(
        qwen3_asr,
        ignored=(*_TOP, "timestamp_token_id", "token_classification_bias"),
        files=RENAMED,
        other_classes=("Qwen3ASRRealtimeGeneration",),
    ),
    "audioflamingo3": Family(audioflamingo3, ignored=_TOP, files=RENAMED),
    "glmasr": Family(glmasr, ignored=_TOP, files=RENAMED),
}
