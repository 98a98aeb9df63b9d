"""Gemma 3n (text model), and modules that Gemma 4's small models have in common with Gemma 3n.

The last layers use the KV cache of an earlier layer, and every layer has its own token embedding.
Shapes follow transformers 5.19, models/gemma3n/ and models/gemma4/. The towers of multimodal files are in
gemma3n_towers.py.
"""

from __future__ import annotations

from typing import Literal

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.family import Family
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Gemma 3n text model from its checked config."""
    hidden = fields.integer("hidden_size", 2048, limit="width")
    heads, kv_heads = (
        fields.integer("num_attention_heads", 8, limit="heads"),
        fields.integer("num_key_value_heads", 2, limit="heads"),
    )
    common.divisible(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    dims = Heads(hidden, heads, kv_heads, fields.integer("head_dim", 256, limit="width"))
    layers = fields.integer("num_hidden_layers", 35, limit="layers")
    inner = _widths(fields, layers)
    vocab = fields.integer("vocab_size", 262_400, limit="vocab")
    per_layer = fields.integer("hidden_size_per_layer_input", 256, limit="width")
    rank, inputs = (
        fields.integer("laurel_rank", 64, limit="width"),
        fields.integer("altup_num_inputs", 4, limit="heads"),
    )
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore(
        "activation_sparsity_pattern", "altup_active_idx", "altup_coef_clip", "altup_correct_scale",
        "rope_parameters", "rope_local_base_freq", "rope_theta", "rope_scaling",
    )  # fmt: skip
    # by default every fifth layer has full attention (configuration_gemma3n.py)
    kinds = fields.layer_types(layers) or common.alternating_kinds(layers, 5)
    window = fields.integer("sliding_window", 512, limit="positions")
    sources = shared_layers(fields, kinds, default=15)
    t, cache = Tensors(), []
    t.vocabulary("model.embed_tokens", vocab, hidden)
    t.buffer("model.embed_tokens.embed_scale", (), "ScaledWordEmbedding", None)
    for i, at in t.layers(layers, "model.layers"):
        attention(t, f"{at}.self_attn", dims, bias, value=True, shared=i in sources)
        own = window if kinds[i] == "sliding_attention" else None
        cache.append(cache_layer(i, own, dims, sources.get(i)))
        t.gated_mlp(f"{at}.mlp", hidden, inner[i])
        t.norms(at, hidden, *common.FOUR_NORMS)
        _altup(t, f"{at}.altup", hidden, inputs)
        t.linear(f"{at}.laurel.linear_left", rank, hidden, "mlp")
        t.linear(f"{at}.laurel.linear_right", hidden, rank, "mlp")
        t.norm(f"{at}.laurel.post_laurel_norm", hidden)
        per_layer_input(t, at, hidden, per_layer)
    t.norm("model.norm", hidden)
    per_layer_embeddings(t, fields, layers, hidden, per_layer)
    for name in ("altup_projections", "altup_unembed_projections"):
        for i in range(inputs - 1):
            t.linear(f"model.{name}.{i}", hidden, hidden, "mlp")
    for name in ("per_layer_projection_scale", "per_layer_input_scale"):
        t.buffer(f"model.{name}", (), "Gemma3nTextModel", None)
    t.head("lm_head", vocab, hidden, "model.embed_tokens.weight" if tied else None)
    t.rotary(dims.head_size, *(f"model.rotary_emb.{kind}_" for kind in dict.fromkeys(kinds)))
    return common.decoder(
        fields, model_type, "Gemma3nForCausalLM", t, dims, tuple(cache), layers=layers, inner=max(inner),
        vocab=vocab, rotary=Rotary(dims.head_size, len(set(kinds))),
        max_model_len=fields.integer("max_position_embeddings", 32_768, limit="positions"),
    )  # fmt: skip


def _widths(fields: Fields, layers: int) -> list[int]:
    """Return the MLP's inner size in each layer, from ``intermediate_size`` (a number or a list)."""
    value = fields.raw("intermediate_size")
    if not isinstance(value, list):
        return [fields.integer("intermediate_size", 16_384, limit="width")] * layers
    if len(value) != layers:
        raise ConfigError(f"has {len(value)} widths; the model has {layers} layers", field="intermediate_size")
    one = Fields({str(i): width for i, width in enumerate(value)})
    return [one.integer(str(i), limit="width") for i in range(layers)]


def _altup(t: Tensors, at: str, hidden: int, inputs: int) -> None:
    """Add the tensors of a layer's AltUp module, which updates ``inputs`` parallel hidden states."""
    t.add(f"{at}.correct_output_scale", (hidden,), "norm", "Gemma3nTextAltUp")
    t.linear(f"{at}.correction_coefs", inputs, inputs, "mlp")
    t.linear(f"{at}.prediction_coefs", inputs * inputs, inputs, "mlp")
    t.linear(f"{at}.modality_router", inputs, hidden, "mlp")
    t.norm(f"{at}.router_norm", hidden)
    t.buffer(f"{at}.router_input_scale", (), "Gemma3nTextAltUp", None)


def shared_layers(fields: Fields, kinds: tuple[str, ...], default: int = 0) -> dict[int, int]:
    """Return a dict: layer without its own KV cache -> earlier layer whose KV cache it uses.

    The last ``num_kv_shared_layers`` layers have no KV cache of their own. Each of them uses the last earlier
    layer of the same attention kind that has a cache.
    """
    shared = fields.integer("num_kv_shared_layers", default, limit="layers", minimum=0)
    first = len(kinds) - shared
    if not shared:
        return {}
    own = {kind: i for i, kind in enumerate(kinds[: max(first, 0)])}
    missing = [kind for kind in kinds[first:] if kind not in own] if first > 0 else ["any"]
    if missing:
        raise ConfigError(
            f"{shown(shared)} of {len(kinds)} layers share the KV cache of an earlier layer of their kind, but "
            f"no earlier layer is of the kind {missing[0]}",
            field="num_kv_shared_layers",
        )
    return {i: own[kinds[i]] for i in range(first, len(kinds))}


def cache_layer(i: int, window: int | None, dims: Heads, source: int | None) -> CacheLayer:
    """Return the KV cache entry of one Gemma layer.

    ``source`` is the earlier layer whose KV cache this layer uses, None if it has its own.
    """
    kind: Literal["full", "sliding"] = "full" if window is None else "sliding"
    return CacheLayer(i, kind, window, dims.kv_heads, dims.head_size, shares=source)


def per_layer_embeddings(t: Tensors, fields: Fields, layers: int, hidden: int, width: int) -> None:
    """Add the table that holds the token embeddings of all layers side by side, and its projection.

    Args:
        t: receives the tensors.
        fields: the config.
        layers: number of layers.
        hidden: hidden size.
        width: size of one layer's embedding; 0 when the model has none.
    """
    rows = fields.integer("vocab_size_per_layer_input", 262_144, limit="vocab")
    if not width:
        return
    t.vocabulary("model.embed_tokens_per_layer", rows, layers * width)
    t.buffer("model.embed_tokens_per_layer.embed_scale", (), "ScaledWordEmbedding", None)
    t.linear("model.per_layer_model_projection", layers * width, hidden, "mlp")
    t.norm("model.per_layer_projection_norm", width)


def per_layer_input(t: Tensors, at: str, hidden: int, width: int) -> None:
    """Add the gate, projection and norm that add a layer's own token embedding to the layer's output."""
    t.linear(f"{at}.per_layer_input_gate", width, hidden, "mlp")
    t.linear(f"{at}.per_layer_projection", hidden, width, "mlp")
    t.norm(f"{at}.post_per_layer_input_norm", hidden)


def attention(t: Tensors, at: str, dims: Heads, bias: bool, *, value: bool, shared: bool) -> None:
    """Add the tensors of one layer's attention, which has norms of q and k.

    Args:
        t: receives the tensors.
        at: module of the attention.
        dims: head geometry.
        bias: whether the projections have biases.
        value: whether there is a v_proj. Without it, K is also used as V; K and V are still both cached.
        shared: whether the layer uses the KV cache of an earlier layer, so that it has neither k_proj nor
            v_proj.
    """
    kv = dims.kv_heads * dims.head_size
    names = () if shared else ("k_proj", "v_proj") if value else ("k_proj",)
    t.linear(f"{at}.q_proj", dims.heads * dims.head_size, dims.hidden, bias=bias, shard="column")
    for name in names:
        t.linear(f"{at}.{name}", kv, dims.hidden, bias=bias, shard="column", kv=(kv, dims.kv_heads))
    t.linear(f"{at}.o_proj", dims.hidden, dims.heads * dims.head_size, bias=bias, shard="row")
    t.norm(f"{at}.q_norm", dims.head_size)
    if not shared:
        t.norm(f"{at}.k_norm", dims.head_size)


FAMILIES = {
    "gemma3n_text": Family(build, final_norm="rms-one", hf="page sizes"),
}
