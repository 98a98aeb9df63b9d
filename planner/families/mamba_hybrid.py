"""Models with both Mamba and attention layers: Bamba, Granite hybrid, Falcon-H1, Jamba and Nemotron-H.

Shapes follow transformers 5.19 / 5.23, models/<family>/; the mixers are in mamba.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.family import LORA_ON_VOCABULARY, RENAMED, Family, VLLMTraits
from tonnage.planner.families.mamba import TIME_STEP, Mamba1, Mamba2, auto, chunk_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import LIMITS, Fields, shown
from tonnage.planner.model.recipe import Heads


def _mamba2_of(fields: Fields, hidden: int, *, falcon: bool = False) -> Mamba2:
    """Return the Mamba-2 mixer of a Bamba, Granite hybrid or, with ``falcon``, a Falcon-H1 config.

    Only Falcon-H1 states the mixer's width and whether the mixer has a norm.
    """
    inner = fields.integer("mamba_expand", 2, limit="width") * hidden
    if falcon:
        inner = fields.integer("mamba_d_ssm", inner, limit="width")
    heads = fields.integer("mamba_n_heads", 128, limit="heads")
    head_size = auto(fields, "mamba_d_head", inner // heads)
    if heads * head_size != inner:
        raise ConfigError(
            f"{heads} x mamba_d_head {head_size} is not the mixer's width {inner}", field="mamba_n_heads"
        )
    fields.ignore("mamba_norm_before_gate")
    return Mamba2(
        hidden, heads, head_size, fields.integer("mamba_n_groups", 1, limit="heads"),
        fields.integer("mamba_d_state", 256, limit="width"), fields.integer("mamba_d_conv", 4, limit="width"),
        inner, fields.boolean("mamba_proj_bias", False), fields.boolean("mamba_conv_bias", True),
        not falcon or fields.boolean("mamba_rms_norm", False),
        chunk=chunk_of(fields, "mamba_chunk_size"),
    )  # fmt: skip


def bamba(fields: Fields, model_type: str, *, granite: bool = False) -> Architecture:
    """Return the architecture of a Bamba or Granite hybrid model from its checked config.

    Each layer is a Mamba-2 or an attention layer followed by an MLP. In Granite hybrid (``granite`` True),
    routed experts and a shared expert follow instead.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", False)
    mlp_bias = not granite and fields.boolean("mlp_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    mixer = _mamba2_of(fields, dims.hidden)
    attends = _attends(fields, layers)
    count = (fields.optional_integer("num_local_experts", 8, limit="width", minimum=0) or 0) if granite else 0
    chosen = (
        (fields.optional_integer("num_experts_per_tok", 2, limit="width", minimum=0) or 0) if granite else 0
    )
    shared = fields.integer("shared_intermediate_size", 1024, limit="width") if granite else 0
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        if attends[i]:
            t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        else:
            mixer.add(t, f"{at}.mamba")
            cache.append(mixer.cache(i))
        t.norm(f"{at}.input_layernorm", dims.hidden)
        if not granite:
            t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner, bias=mlp_bias)
            t.norm(f"{at}.pre_ff_layernorm", dims.hidden)
            continue
        t.norm(f"{at}.post_attention_layernorm", dims.hidden)
        if count:
            t.router(f"{at}.block_sparse_moe.router", count, dims.hidden)
            t.experts(f"{at}.block_sparse_moe.experts", count, dims.hidden, inner)
        names = ("input_linear", "output_linear")
        t.plain_mlp(f"{at}.shared_mlp", dims.hidden, shared, names=names, fused_gate=True)
    t.norm("model.norm" if granite else "model.final_layernorm", dims.hidden)
    t.head("lm_head", vocab, dims.hidden, "model.embed_tokens.weight" if tied else None)
    rotary = Rotary(int(dims.head_size * common.rotary_share(fields, 1.0 if granite else 0.5)), 1)
    if not granite or fields.raw("position_embedding_type") == "rope":
        t.rotary(rotary.dim, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "GraniteMoeHybridForCausalLM" if granite else "BambaForCausalLM", t, dims,
        tuple(cache), layers=layers, inner=chosen * inner + shared if granite else inner, vocab=vocab,
        rotary=rotary, experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _attends(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is an attention layer.

    The config states it in ``layer_types``, ``layers_block_type`` or ``attn_layer_indices``.
    """
    words = {"mamba": False, "attention": True, "linear_attention": False, "full_attention": True}
    listed = fields.listed("layer_types", layers, words) or fields.listed("layers_block_type", layers, words)
    indices = fields.raw("attn_layer_indices")
    if listed is None and indices is not None and not isinstance(indices, list):
        raise ConfigError(f"{shown(indices)} is not a list of layer indices", field="attn_layer_indices")
    attending = common.numbers_in(indices)
    return listed or tuple(i in attending for i in range(layers))


def falcon_h1(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Falcon-H1 model from its checked config.

    Every layer runs Mamba-2 and attention in parallel, so it has both a state and a KV cache.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", False)
    mlp_bias = fields.boolean("mlp_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    mixer = replace(
        _mamba2_of(fields, dims.hidden, falcon=True), out_bias=fields.boolean("projectors_bias", False)
    )
    fields.ignore(
        "lm_head_multiplier", "mlp_multipliers", "key_multiplier", "attention_out_multiplier",
        "attention_in_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner, bias=mlp_bias)
        mixer.add(t, f"{at}.mamba")
        rows = mixer.inner + mixer.channels + mixer.heads
        t.buffer(f"{at}.mamba.mup_vector", (1, 1, rows), "FalconH1Mixer", None)
        t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias)
        t.norms(at, dims.hidden, "input_layernorm", "pre_ff_layernorm")
        cache += [CacheLayer(i, "full", None, dims.kv_heads, dims.head_size), mixer.cache(i)]
    t.close("model.final_layernorm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "FalconH1ForCausalLM", t, dims, tuple(cache), layers=layers, inner=inner,
        vocab=vocab, rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def jamba(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Jamba model: some layers have attention, some have experts.

    There are no rotary positions.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    count = fields.integer("num_experts", 16, limit="width")
    chosen = fields.integer("num_experts_per_tok", 2, limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    attends, routes = (
        _periodic(fields, name, layers, default) for name, default in (("attn", (8, 4)), ("expert", (2, 1)))
    )
    mixer = Mamba1(
        dims.hidden, fields.integer("mamba_expand", 2, limit="width") * dims.hidden,
        auto(fields, "mamba_dt_rank", -(-dims.hidden // 16)),
        fields.integer("mamba_d_state", 16, limit="width"), fields.integer("mamba_d_conv", 4, limit="width"),
        fields.boolean("mamba_proj_bias", False), fields.boolean("mamba_conv_bias", True), norms=True,
    )  # fmt: skip
    fields.ignore("sliding_window", "mamba_inner_layernorms")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        if attends[i]:
            t.attention(f"{at}.self_attn", dims)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        else:
            mixer.add(t, f"{at}.mamba")
            cache.append(mixer.cache(i))
        if routes[i] and count > 1:
            t.router(f"{at}.feed_forward.router", count, dims.hidden, linear=True)
            t.experts(f"{at}.feed_forward.experts", count, dims.hidden, inner)
        else:
            t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner)
        t.norms(at, dims.hidden, "input_layernorm", "pre_ff_layernorm")
    t.close("model.final_layernorm", "model.embed_tokens", vocab, dims.hidden, tied)
    return common.decoder(
        fields, model_type, "JambaForCausalLM", t, dims, tuple(cache), layers=layers, inner=chosen * inner,
        vocab=vocab, experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _periodic(fields: Fields, name: str, layers: int, default: tuple[int, int]) -> tuple[bool, ...]:
    """Return for each Jamba layer whether it has attention (``name`` is ``attn``) or experts (``expert``).

    The value is True for every ``{name}_layer_period``-th layer, starting with layer ``{name}_layer_offset``.
    Both are config fields.
    """
    period = fields.integer(f"{name}_layer_period", default[0], limit="layers")
    offset = fields.integer(f"{name}_layer_offset", default[1], limit="layers", minimum=0)
    return tuple(i % period == offset for i in range(layers))


def nemotron_h(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Nemotron-H model from its checked config.

    Each layer has one mixer: Mamba-2 (M), attention (*), a plain MLP (-) or experts without gates (E).
    """
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    kv_heads = fields.integer("num_key_value_heads", 8, limit="heads")
    common.divisible(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    name = "attention_head_dim" if "head_dim" not in fields.config else "head_dim"
    dims = Heads(hidden, heads, kv_heads, fields.integer(name, 128, limit="width"))
    fields.ignore("attention_head_dim")
    kinds = _nemotron_kinds(fields)
    layers, vocab = len(kinds), fields.integer("vocab_size", limit="vocab")
    mamba_heads = fields.integer("mamba_num_heads", 128, limit="heads")
    size = fields.integer("mamba_head_dim", 64, limit="width")
    name = "mamba_ssm_cache_dtype"
    dtype = None if fields.raw(name) == "auto" else common.dtype_of(fields, name)
    bias = fields.boolean("use_bias", False)
    mixer = Mamba2(
        hidden, mamba_heads, size, fields.integer("n_groups", 8, limit="heads"),
        fields.integer("ssm_state_size", 128, limit="width"), fields.integer("conv_kernel", 4, limit="width"),
        mamba_heads * size, bias, fields.boolean("use_conv_bias", True),
        dtype=dtype, chunk=chunk_of(fields, default=128),
    )  # fmt: skip
    mlp_bias = fields.boolean("mlp_bias", False)
    tied = common.never_tied(fields)
    inner = fields.integer("intermediate_size", 21504, limit="width")
    count = fields.integer("n_routed_experts", 8, limit="width") if "E" in kinds else 0
    chosen = fields.integer("num_experts_per_tok", 2, limit="width") if count else 0
    expert = fields.integer("moe_intermediate_size", 7688, limit="width") if count else 0
    latent = (fields.optional_integer("moe_latent_size", limit="width") if count else None) or hidden
    number = (fields.optional_integer("n_shared_experts", 1, limit="width", minimum=0) or 0) if count else 0
    shared = fields.integer("moe_shared_expert_intermediate_size", 7688, limit="width") if number else 0
    fields.ignore(
        "attention_bias", "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type",
        "mtp_hybrid_override_pattern", "mamba_proj_bias", "sliding_window", "time_step_rank",
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size",
        "n_shared_experts",
        "moe_shared_expert_intermediate_size", "mtp_num_hidden_layers",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("model.embeddings", vocab, hidden)
    cache = []
    for i, layer in t.layers(layers, "model.layers"):
        kind, at = kinds[i], f"{layer}.mixer"
        t.norm(f"{layer}.norm", hidden)
        if kind == "M":
            mixer.add(t, at)
            cache.append(mixer.cache(i))
        elif kind == "*":
            t.attention(at, dims)  # modeling_nemotron_h.py ignores attention_bias
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        elif kind == "-":
            t.plain_mlp(at, hidden, inner, bias=mlp_bias)
        else:
            names = ("up_proj", "down_proj")
            t.experts(f"{at}.experts", count, latent, expert, gated=False, names=names)
            t.router(f"{at}.gate", count, hidden)
            t.correction_bias(f"{at}.gate.e_score_correction_bias", (count,))
            if shared:
                t.plain_mlp(f"{at}.shared_experts", hidden, shared, bias=mlp_bias)
            if latent != hidden:
                t.linear(f"{at}.fc1_latent_proj", latent, hidden, "mlp", bias=mlp_bias)
                t.linear(f"{at}.fc2_latent_proj", hidden, latent, "mlp", bias=mlp_bias)
    t.close("model.norm_f", "model.embeddings", vocab, hidden, tied)
    return common.decoder(
        fields, model_type, "NemotronHForCausalLM", t, dims, tuple(cache), layers=layers,
        inner=max(inner if "-" in kinds else 0, chosen * expert + shared, mixer.inner), vocab=vocab,
        gated=False, experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _nemotron_kinds(fields: Fields) -> str:
    """Return one letter per Nemotron-H layer: M (Mamba-2), * (attention), - (MLP) or E (experts).

    The config field ``hybrid_override_pattern`` or ``layers_block_type`` states the kinds.
    """
    pattern = fields.raw("hybrid_override_pattern")
    if pattern is None:
        letters = {
            "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-",
            "moe": "E",
        }  # fmt: skip
        listed = fields.raw("layers_block_type")
        known = isinstance(listed, list) and all(isinstance(kind, str) and kind in letters for kind in listed)
        if not known or not listed:
            raise ConfigError(
                f"{shown(listed)} is not a list whose items are among {', '.join(letters)}",
                field="layers_block_type",
            )
        pattern = "".join(letters[kind] for kind in listed)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*-E"):
        raise ConfigError(
            f"{shown(pattern)} is not a string of the letters M, *, - and E", field="hybrid_override_pattern"
        )
    stated = fields.optional_integer("num_hidden_layers", limit="layers")
    if len(pattern) > LIMITS["layers"]:
        raise ConfigError(
            f"{len(pattern):,} layers are more than the limit of {LIMITS['layers']:,}",
            field="num_hidden_layers",
        )
    if stated not in (None, len(pattern)):
        raise ConfigError(
            f"{stated} contradicts the {len(pattern)} layers in hybrid_override_pattern or layers_block_type",
            field="num_hidden_layers",
        )
    return pattern


_family = partial(Family, ignored=TIME_STEP)
FAMILIES = {
    "bamba": _family(bamba, absent={"num_key_value_heads": 8}, hf="recurrent"),
    "granitemoehybrid": _family(
        partial(bamba, granite=True), hf="recurrent", vllm=LORA_ON_VOCABULARY, files=RENAMED,
    ),
    "falcon_h1": _family(falcon_h1, absent={"num_key_value_heads": 8}, hf="recurrent", vllm=LORA_ON_VOCABULARY),
    "jamba": _family(jamba, absent={"num_key_value_heads": 8}, hf="recurrent", vllm=LORA_ON_VOCABULARY),
    "nemotron_h": _family(
        nemotron_h, absent={"num_key_value_heads": 8}, hf="recurrent",
        vllm=VLLMTraits(float32_states=True, lora_vocabulary=2), files=RENAMED,
    ),
}  # fmt: skip
