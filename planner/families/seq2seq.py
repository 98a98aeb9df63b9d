"""Encoder-decoder models, and decoders of such models.

Families: BART, mBART, Pegasus, Whisper, T5, mT5, UMT5, T5Gemma and Moonshine, and the decoders of MusicGen and
Moshi, whose encoders are separate models. Shapes follow transformers 5.19 / 5.23.

A decoder layer caches K and V of each generated token, and K and V of the encoder's output once per sequence
(cache kind ``cross``).

If the config has no ``architectures``, and transformers has a class for the decoder alone (BartForCausalLM,
WhisperForCausalLM), that class is planned. AutoModelForCausalLM builds the same class.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads

Kind = Literal["decoder", "encoder-decoder", "encoder"]

IGNORED = (
    "activation_dropout", "activation_function", "apply_spec_augment", "classifier_dropout", "dropout",
    "dropout_rate",
    "decoder_hidden_act", "decoder_layerdrop", "decoder_start_token_id", "dense_act_fn", "encoder_hidden_act",
    "encoder_layerdrop", "init_std", "initializer_factor", "is_decoder", "is_encoder_decoder", "is_gated_act",
    "layerdrop", "mask_feature_length", "mask_feature_min_masks", "mask_feature_prob", "mask_time_length",
    "mask_time_min_masks", "mask_time_prob", "median_filter_width", "relative_attention_max_distance",
    "scale_decoder_outputs", "scale_embedding", "use_weighted_layer_sum", "classifier_proj_size",
    "forced_decoder_ids", "begin_suppress_tokens", "suppress_tokens", "normalize_before", "normalize_embedding",
    "static_position_embeddings", "add_bias_logits", "add_final_layer_norm", "extra_pos_embeddings",
    "classif_dropout", "n_positions", "tokenizer_class", "classifier_dropout_rate", "num_hidden_layers",
    "output_past", "alignment_heads",
)  # fmt: skip


def wanted(fields: Fields, known: dict[str, Kind], default: str) -> tuple[str, Kind]:
    """Return (class named in the config's ``architectures``, its kind).

    Without ``architectures``, the class is ``default``.

    Raises:
        UnsupportedArchitecture: the class is not among ``known``.
    """
    names = fields.raw("architectures")
    if not names:
        return default, known[default]
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in known:
        return names[0], known[names[0]]
    raise UnsupportedArchitecture(
        f"{shown(names)} is not supported", field="architectures", hint="supported: " + ", ".join(known)
    )


def _self_attention(t: Tensors, at: str, dims: Heads, k_bias: bool) -> None:
    """Add the tensors of the q, k, v and output projections, which have biases.

    If ``k_bias`` is False, the k projection has no bias, as in Whisper.
    """
    width = dims.heads * dims.head_size
    for name, bias in (("k_proj", k_bias), ("v_proj", True), ("q_proj", True)):
        t.linear(f"{at}.{name}", width, dims.hidden, bias=bias, shard="column")
    t.linear(f"{at}.out_proj", dims.hidden, width, bias=True, shard="row")


def bart(
    fields: Fields, model_type: str, *, name: str, offset: int = 0, first_norm: bool = False,
    last_norm: bool = True, speech: bool = False,
) -> Architecture:  # fmt: skip
    """Return the architecture of a BART, mBART, Pegasus or Whisper model from its checked config.

    Args:
        fields: the config.
        model_type: type of the model.
        name: prefix of the class names in transformers.
        offset: number of unused rows at the start of the position table.
        first_norm: whether a norm follows the embedding.
        last_norm: whether a norm follows the layers.
        speech: whether the encoder reads audio through convolutions (Whisper), not tokens.
    """
    known: dict[str, Kind] = {
        f"{name}ForCausalLM": "decoder",
        f"{name}ForConditionalGeneration": "encoder-decoder",
        f"{name}Model": "encoder-decoder",
    }
    class_name, kind = wanted(fields, known, f"{name}ForCausalLM")
    hidden = fields.integer("d_model", limit="width")
    layers = fields.integer("decoder_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    heads = fields.integer("decoder_attention_heads", limit="heads")
    inner = fields.integer("decoder_ffn_dim", limit="width")
    common.divisible(hidden, heads, "d_model", "decoder_attention_heads")
    positions_field = "max_target_positions" if speech else "max_position_embeddings"
    positions = fields.integer(positions_field, limit="positions")
    encoder_layers = fields.integer("encoder_layers", limit="layers")
    encoder_heads = fields.integer("encoder_attention_heads", limit="heads")
    encoder_inner = fields.integer("encoder_ffn_dim", limit="width")
    common.divisible(hidden, encoder_heads, "d_model", "encoder_attention_heads")
    source = fields.integer("max_source_positions", 1500, limit="positions") if speech else positions
    mels = fields.integer("num_mel_bins", 80, limit="width") if speech else 0
    tied = fields.boolean("tie_word_embeddings", True)
    k_bias = not speech
    dims = Heads(hidden, heads, heads, hidden // heads)
    t = Tensors()
    shared = "model.shared.weight" if kind != "decoder" and not speech else None
    if shared is not None:
        t.vocabulary("model.shared", vocab, hidden)
    if kind != "decoder":
        t.role = "encoder"
        at = "model.encoder"
        if speech:
            t.add(f"{at}.conv1.weight", (hidden, mels, 3), "encoder", "Conv1d")
            t.add(f"{at}.conv1.bias", (hidden,), "encoder", "Conv1d")
            t.add(f"{at}.conv2.weight", (hidden, hidden, 3), "encoder", "Conv1d")
            t.add(f"{at}.conv2.bias", (hidden,), "encoder", "Conv1d")
            t.embedding(f"{at}.embed_positions", source, hidden)
        else:
            t.vocabulary(f"{at}.embed_tokens", vocab, hidden, shared)
            t.embedding(f"{at}.embed_positions", positions + offset, hidden)
        own = Heads(hidden, encoder_heads, encoder_heads, hidden // encoder_heads)
        for i in range(encoder_layers):
            here = f"{at}.layers.{i}"
            _self_attention(t, f"{here}.self_attn", own, k_bias)
            t.norm(f"{here}.self_attn_layer_norm", hidden, "layer")
            t.plain_mlp(here, hidden, encoder_inner, bias=True, names=("fc1", "fc2"))
            t.norm(f"{here}.final_layer_norm", hidden, "layer")
        if first_norm:
            t.norm(f"{at}.layernorm_embedding", hidden, "layer")
        if last_norm:
            t.norm(f"{at}.layer_norm", hidden, "layer")
        t.role = None
    at = "model.decoder"
    t.vocabulary(f"{at}.embed_tokens", vocab, hidden, shared)
    t.embedding(f"{at}.embed_positions", positions + offset, hidden)
    cache = []
    for i, here in t.layers(layers, f"{at}.layers"):
        for attention in ("self_attn", "encoder_attn"):
            _self_attention(t, f"{here}.{attention}", dims, k_bias)
            t.norm(f"{here}.{attention}_layer_norm", hidden, "layer")
        t.plain_mlp(here, hidden, inner, bias=True, names=("fc1", "fc2"))
        t.norm(f"{here}.final_layer_norm", hidden, "layer")
        cache.append(CacheLayer(i, "full", None, heads, dims.head_size))
        if kind == "encoder-decoder":
            cache.append(_cross(i, heads, dims.head_size, source))
    if first_norm:
        t.norm(f"{at}.layernorm_embedding", hidden, "layer")
    if last_norm:
        t.norm(f"{at}.layer_norm", hidden, "layer")
    if kind == "encoder-decoder" and not speech and not class_name.endswith("Model"):
        t.buffer("final_logits_bias", (1, vocab), class_name, None)
    if not class_name.endswith("Model"):
        source_name = shared or f"{at}.embed_tokens.weight"
        t.head("proj_out" if speech else "lm_head", vocab, hidden, source_name if tied else None)
    return common.decoder(
        fields, model_type, class_name, t, dims, tuple(cache), layers=layers, inner=inner, vocab=vocab,
        max_model_len=positions, position_field=positions_field, gated=False, kind=kind,
    )  # fmt: skip


def _cross(layer: int, heads: int, size: int, tokens: int | None) -> CacheLayer:
    """Return the cache entry of a decoder layer's cross attention: K and V of the encoder's output.

    ``tokens`` is the number of output tokens of the encoder, None if it varies.
    """
    return CacheLayer(layer, "cross", None, heads, size, source_tokens=tokens)


def t5(fields: Fields, model_type: str, *, name: str, tables: bool = False) -> Architecture:
    """Return the architecture of a T5, mT5 or UMT5 model, or of its encoder alone.

    Relative positions are an embedding table of distance buckets in the first layer. The number of tokens has
    no limit.

    Args:
        fields: the config.
        model_type: type of the model.
        name: prefix of the class names in transformers.
        tables: whether every layer has its own table of buckets, as in UMT5.
    """
    known: dict[str, Kind] = {
        f"{name}ForConditionalGeneration": "encoder-decoder", f"{name}Model": "encoder-decoder",
        f"{name}EncoderModel": "encoder", f"{name}WithLMHeadModel": "encoder-decoder",
    }  # fmt: skip
    class_name, kind = wanted(fields, known, f"{name}ForConditionalGeneration")
    hidden, size, inner = common.widths(fields, "d_model", "d_kv", "d_ff")
    heads = fields.integer("num_heads", limit="heads")
    layers = fields.integer("num_layers", limit="layers")
    decoder_layers = fields.integer("num_decoder_layers", layers, limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    buckets = fields.integer("relative_attention_num_buckets", 32, limit="width")
    act = fields.raw("feed_forward_proj") or "relu"
    if not isinstance(act, str):
        raise ConfigError(f"{shown(act)} is not a string", field="feed_forward_proj")
    gated = act.startswith("gated-")
    if fields.boolean("is_gated_act", gated) != gated:
        raise ConfigError(f"{not gated} contradicts feed_forward_proj = {act}", field="is_gated_act")
    tied = fields.boolean("tie_word_embeddings", True)
    t = Tensors()
    t.vocabulary("shared", vocab, hidden)

    def stack(side: str, count: int, cross: bool) -> None:
        """Add the tensors of the layers of one side (encoder or decoder) below module ``side``.

        With ``cross``, the layers also have cross attention to the encoder's output.
        """
        t.vocabulary(f"{side}.embed_tokens", vocab, hidden, "shared.weight")
        for i in range(count):
            t.layer = i if cross else None
            at = f"{side}.block.{i}.layer"
            places = ["SelfAttention", "EncDecAttention"] if cross else ["SelfAttention"]
            for k, place in enumerate(places):
                here = f"{at}.{k}.{place}"
                for part in "qkv":
                    t.linear(f"{here}.{part}", heads * size, hidden, shard="column")
                t.linear(f"{here}.o", hidden, heads * size, shard="row")
                if place == "SelfAttention" and (i == 0 or tables):
                    t.embedding(f"{here}.relative_attention_bias", buckets, heads, shard=1)
                t.norm(f"{at}.{k}.layer_norm", hidden)
            here = f"{at}.{len(places)}"
            for part in ("wi_0", "wi_1") if gated else ("wi",):
                t.linear(f"{here}.DenseReluDense.{part}", inner, hidden, "mlp", shard="column")
            t.linear(f"{here}.DenseReluDense.wo", hidden, inner, "mlp", shard="row", module_class="KeptLinear")
            t.norm(f"{here}.layer_norm", hidden)
        t.layer = None
        t.norm(f"{side}.final_layer_norm", hidden)

    t.role = "encoder"
    stack("encoder", layers, False)
    t.role = None
    cache: list[CacheLayer] = []
    if kind == "encoder-decoder":
        stack("decoder", decoder_layers, True)
        for i in range(decoder_layers):
            cache += [CacheLayer(i, "full", None, heads, size), _cross(i, heads, size, None)]
        if not class_name.endswith("5Model"):
            t.head("lm_head", vocab, hidden, "shared.weight" if tied else None)
    stated = fields.optional_integer("n_positions", 512, limit="positions") or 512
    return common.decoder(
        fields, model_type, class_name, t, Heads(hidden, heads, heads, size), tuple(cache),
        layers=decoder_layers, inner=inner, vocab=vocab, max_model_len=stated, position_field="n_positions",
        gated=gated, kind=kind,
    )  # fmt: skip


def t5gemma(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a T5Gemma model: encoder and decoder consist of Gemma 2 layers.

    The decoder's cross attention reads the encoder's hidden states, which may be wider or narrower than its
    own.
    """
    known: dict[str, Kind] = {"T5GemmaForConditionalGeneration": "encoder-decoder"}
    class_name, kind = wanted(fields, known, "T5GemmaForConditionalGeneration")
    sides = {}
    for side in ("encoder", "decoder"):
        found = fields.mapping(side)
        if found is None:
            raise ConfigError("missing", field=side)
        sides[side] = Fields(found)
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore("vocab_size")  # encoder and decoder config each state their own vocab_size
    t = Tensors()
    cache: list[CacheLayer] = []
    widths: dict[str, int] = {}
    for side, own in sides.items():
        dims = common.heads_of(own, kv_default=4, head_default=256)
        widths[side] = dims.hidden
        count = own.integer("num_hidden_layers", limit="layers")
        vocab = own.integer("vocab_size", limit="vocab")
        inner = own.integer("intermediate_size", limit="width")
        bias = own.boolean("attention_bias", False)
        kinds = own.layer_types(count) or common.alternating_kinds(count, 2)
        window = own.optional_integer("sliding_window", 4096, limit="positions")
        decoder = side == "decoder"
        places = ("self_attn", "feedforward", "cross_attn") if decoder else ("self_attn", "feedforward")
        t.role = None if decoder else "encoder"
        t.vocabulary(f"model.{side}.embed_tokens", vocab, dims.hidden)
        for i in range(count):
            t.layer = i if decoder else None
            at = f"model.{side}.layers.{i}"
            t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias)
            if decoder:
                _wide_cross(t, f"{at}.cross_attn", dims, widths["encoder"], bias)
            t.gated_mlp(f"{at}.mlp", dims.hidden, inner)
            for place in places:
                t.norms(at, dims.hidden, f"pre_{place}_layernorm", f"post_{place}_layernorm")
        t.layer = None
        t.norm(f"model.{side}.norm", dims.hidden)
        t.rotary(dims.head_size, f"model.{side}.rotary_emb.")
    for layer in common.cache_layers(kinds, window, dims):
        cache += [layer, _cross(layer.layer, dims.kv_heads, dims.head_size, None)]
    t.head("lm_head.out_proj", vocab, dims.hidden, "model.decoder.embed_tokens.weight" if tied else None)
    last = sides["decoder"]
    return common.decoder(
        last, model_type, class_name, t, dims, tuple(cache), layers=count, inner=inner, vocab=vocab,
        rotary=Rotary(dims.head_size, 1), kind=kind,
    )  # fmt: skip


def _wide_cross(t: Tensors, at: str, dims: Heads, width: int, bias: bool) -> None:
    """Add the tensors of a cross attention whose K and V are projected from vectors of ``width`` values."""
    kv = dims.kv_heads * dims.head_size
    t.linear(f"{at}.q_proj", dims.heads * dims.head_size, dims.hidden, bias=bias, shard="column")
    for name in ("k_proj", "v_proj"):
        t.linear(f"{at}.{name}", kv, width, bias=bias, shard="column", kv=(kv, dims.kv_heads))
    t.linear(f"{at}.o_proj", dims.hidden, dims.heads * dims.head_size, bias=bias, shard="row")


def moonshine(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Moonshine speech model from its checked config.

    Three convolutions over the raw audio precede the encoder; the decoder's MLP is gated.
    """
    known: dict[str, Kind] = {
        "MoonshineModel": "encoder-decoder",
        "MoonshineForConditionalGeneration": "encoder-decoder",
    }
    class_name, kind = wanted(fields, known, "MoonshineModel")
    prefix = "" if class_name == "MoonshineModel" else "model."
    hidden, inner = common.widths(fields, "hidden_size", "intermediate_size")
    vocab = fields.integer("vocab_size", limit="vocab")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore("pad_head_dim_to_multiple_of")
    side_dims = {}
    counts = {}
    for side in ("encoder", "decoder"):
        heads = fields.integer(f"{side}_num_attention_heads", 8, limit="heads")
        kv_heads = fields.integer(f"{side}_num_key_value_heads", heads, limit="heads")
        common.divisible(hidden, heads, "hidden_size", f"{side}_num_attention_heads")
        common.divisible(heads, kv_heads, f"{side}_num_attention_heads", f"{side}_num_key_value_heads")
        side_dims[side] = Heads(hidden, heads, kv_heads, hidden // heads)
        counts[side] = fields.integer(f"{side}_num_hidden_layers", 6, limit="layers")
    encoder, decoder = (dims.kv_heads * dims.head_size for dims in side_dims.values())
    if encoder != decoder:  # transformers' classes would use the encoder's head size for encoder and decoder
        raise UnsupportedArchitecture(
            f"the encoder's keys have {encoder} values, the decoder's {decoder}; they must be equal",
            field="decoder_num_key_value_heads",
        )
    t = Tensors("encoder")
    at = f"{prefix}encoder"
    for name, shape, with_bias in (
        ("conv1", (hidden, 1, 127), False), ("conv2", (2 * hidden, hidden, 7), True),
        ("conv3", (hidden, 2 * hidden, 3), True),
    ):  # fmt: skip
        t.add(f"{at}.{name}.weight", shape, "encoder", "Conv1d")
        if with_bias:
            t.add(f"{at}.{name}.bias", shape[:1], "encoder", "Conv1d")
    t.norm(f"{at}.groupnorm", hidden, "layer")
    for i in range(counts["encoder"]):
        here = f"{at}.layers.{i}"
        t.attention(f"{here}.self_attn", side_dims["encoder"], bias=bias)
        t.plain_mlp(f"{here}.mlp", hidden, inner, bias=True, names=("fc1", "fc2"))
        t.layer_norms(here, hidden, "layer-weight")
    t.norm(f"{at}.layer_norm", hidden, "layer-weight")
    share = common.rotary_share(fields, 0.9)
    rotary = 2 * (int(side_dims["encoder"].head_size * share) // 2)
    t.rotary(rotary, f"{at}.rotary_emb.")
    t.role = None
    at = f"{prefix}decoder"
    dims = side_dims["decoder"]
    t.vocabulary(f"{at}.embed_tokens", vocab, hidden)
    cache: list[CacheLayer] = []
    for i, here in t.layers(counts["decoder"], f"{at}.layers"):
        t.attention(f"{here}.self_attn", dims, bias=bias)
        t.attention(f"{here}.encoder_attn", dims, bias=bias)
        t.plain_mlp(f"{here}.mlp", hidden, inner, bias=True, names=("fc1", "fc2"), fused_gate=True)
        t.norms(
            here, hidden, "input_layernorm", "post_attention_layernorm", "final_layernorm", kind="layer-weight"
        )
        cache += [CacheLayer(i, "full", None, dims.kv_heads, dims.head_size)]
        cache += [_cross(i, dims.kv_heads, dims.head_size, None)]
    t.norm(f"{at}.norm", hidden, "layer-weight")
    t.rotary(2 * (int(dims.head_size * share) // 2), f"{at}.rotary_emb.")
    if class_name != "MoonshineModel":
        t.head("proj_out", vocab, hidden, f"{at}.embed_tokens.weight" if tied else None)
    return common.decoder(
        fields, model_type, class_name, t, dims, tuple(cache), layers=counts["decoder"], inner=inner,
        vocab=vocab, rotary=Rotary(rotary, 1), kind=kind,
    )  # fmt: skip


def moshi(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Moshi's language model alone (MoshiForCausalLM).

    Every layer has a sliding window.
    """
    known: dict[str, Kind] = {"MoshiForCausalLM": "decoder"}
    class_name, kind = wanted(fields, known, "MoshiForCausalLM")
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("ffn_dim", limit="width")
    common.divisible(inner, 2, "ffn_dim", "gate and up")
    window = fields.optional_integer("sliding_window", 3000, limit="positions")
    # The head has one row less than the embedding, so the two tensors are never tied.
    fields.ignore(
        "tie_word_embeddings",
        "audio_vocab_size",
        "num_codebooks",
        "audio_encoder_config",
        "depth_decoder_config",
    )
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab + 1, dims.hidden)
    kv = dims.kv_heads * dims.head_size
    for _, at in t.layers(layers, "model.layers"):
        for name, rows, own in (
            ("q_proj", dims.heads * dims.head_size, (0, 0)), ("k_proj", kv, (kv, dims.kv_heads)),
            ("v_proj", kv, (kv, dims.kv_heads)),
        ):  # fmt: skip
            t.linear(f"{at}.self_attn.{name}.linear", rows, dims.hidden, shard="column", kv=own)
        t.linear(f"{at}.self_attn.o_proj.linear", dims.hidden, dims.heads * dims.head_size, shard="row")
        t.linear(f"{at}.mlp.fc1", inner, dims.hidden, "mlp", shard="column")
        t.linear(f"{at}.mlp.fc2", dims.hidden, inner // 2, "mlp", shard="row")
        t.layer_norms(at, dims.hidden)
        t.rotary(dims.head_size, f"{at}.self_attn.rotary_emb.")
    t.norm("model.norm", dims.hidden)
    t.head("lm_head", vocab, dims.hidden, None)
    kinds = ("sliding_attention" if window else "full_attention",) * layers
    return common.decoder(
        fields, model_type, class_name, t, dims,
        common.cache_layers(kinds, window, dims), layers=layers, inner=inner // 2,
        vocab=vocab, rotary=Rotary(dims.head_size, 1), kind=kind,
    )  # fmt: skip


def musicgen(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of MusicGen's decoder, with one embedding and one head per codebook.

    Its sinusoidal positions are computed, not stored.
    """
    known: dict[str, Kind] = {"MusicgenForCausalLM": "decoder"}
    class_name, kind = wanted(fields, known, "MusicgenForCausalLM")
    dims, layers, vocab = common.sizes(fields)
    hidden = dims.hidden
    inner = fields.integer("ffn_dim", limit="width")
    books = fields.integer("num_codebooks", 4, limit="width")
    positions = fields.integer("max_position_embeddings", 2048, limit="positions")
    fields.ignore("audio_channels", "tie_word_embeddings")
    t = Tensors()
    for k in range(books):
        t.vocabulary(f"model.decoder.embed_tokens.{k}", vocab + 1, hidden)
    t.buffer(
        "model.decoder.embed_positions.weights", (positions, hidden), "SinusoidalPositionalEmbedding", "float32"
    )
    for _, at in t.layers(layers, "model.decoder.layers"):
        for place in ("self_attn", "encoder_attn"):
            t.attention(f"{at}.{place}", dims, out="out_proj")
            t.norm(f"{at}.{place}_layer_norm", hidden, "layer")
        t.plain_mlp(at, hidden, inner, names=("fc1", "fc2"))
        t.norm(f"{at}.final_layer_norm", hidden, "layer")
    t.norm("model.decoder.layer_norm", hidden, "layer")
    for k in range(books):
        t.head(f"lm_heads.{k}", vocab, hidden, None)
    return common.decoder(
        fields, model_type, class_name, t, dims, layers=layers, inner=inner,
        vocab=vocab, max_model_len=positions, gated=False, kind=kind,
    )  # fmt: skip


_family = partial(Family, ignored=IGNORED, reads_class=True)
FAMILIES = {
    "bart": _family(
        partial(bart, name="Bart", offset=2, first_norm=True, last_norm=False), hf="encoder-decoder"
    ),
    "mbart": _family(partial(bart, name="MBart", offset=2, first_norm=True), hf="encoder-decoder"),
    "pegasus": _family(partial(bart, name="Pegasus"), hf="encoder-decoder"),
    "whisper": _family(partial(bart, name="Whisper", speech=True), hf="encoder-decoder"),
    "t5": _family(partial(t5, name="T5"), hf="encoder-decoder"),
    "mt5": _family(partial(t5, name="MT5"), hf="encoder-decoder"),
    "umt5": _family(partial(t5, name="UMT5", tables=True), hf="encoder-decoder"),
    "t5gemma": _family(t5gemma, hf="encoder-decoder", files=RENAMED),
    "moonshine": _family(moonshine, hf="encoder-decoder"),
    "moshi": _family(moshi, hf="encoder-decoder"),
    "musicgen_decoder": _family(musicgen),
}
