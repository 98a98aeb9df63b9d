"""DeepSeek-V4: each layer caches a window of recent tokens and compressed entries for older tokens.

Shapes follow transformers 5.23, models/deepseek_v4/. A layer's window has one KV head of ``head_dim`` values,
where K and V are the same tensor. The compressed entries depend on the layer's value in ``compress_ratios``:

- ratio 4: one entry per 4 tokens, selected by an indexer whose keys are compressed in the same way
- ratio 128: one entry per 128 tokens

A layer with compressed entries also keeps the tokens that do not yet fill an entry.
"""

from __future__ import annotations

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import EAGER, Family, FileTraits
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary, StateTensor
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads

# Tokens per compressed cache entry: _SPARSE in layers with an indexer, _HEAVY in layers without one
_SPARSE, _HEAVY = 4, 128
_RATES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": _SPARSE,
    "heavily_compressed_attention": _HEAVY,
}


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a DeepSeek-V4 model from its checked config."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    size = fields.integer("head_dim", 512, limit="width")
    if fields.integer("num_key_value_heads", 1, limit="heads") != 1:
        raise ConfigError("must be 1: K and V are one shared head", field="num_key_value_heads")
    layers, vocab = common.layers_and_vocab(fields)
    q_rank = fields.integer("q_lora_rank", limit="width")
    groups = fields.integer("o_groups", limit="heads")
    o_rank = fields.integer("o_lora_rank", limit="width")
    common.divisible(heads, groups, "num_attention_heads", "o_groups")
    # transformers 5 states the rotary size as a fraction of head_dim (partial_rotary_factor)
    rope = fields.integer("qk_rope_head_dim", int(size * common.rotary_share(fields, 0.125)), limit="width")
    window = fields.integer("sliding_window", 128, limit="positions")
    index_heads = fields.integer("index_n_heads", 64, limit="heads")
    index_size = fields.integer("index_head_dim", 128, limit="width")
    count = fields.integer("n_routed_experts", limit="width")
    chosen = fields.integer("num_experts_per_tok", 6, limit="width")
    inner = fields.integer("moe_intermediate_size", limit="width")
    shared = inner * fields.integer("n_shared_experts", 1, limit="width", minimum=0)
    hashed = fields.integer("num_hash_layers", _hashed(fields), limit="layers", minimum=0)
    streams = fields.integer("hc_mult", 4, limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    ratios = _ratios(fields, layers)
    fields.ignore(
        "attention_bias", "compress_rope_parameters", "compress_rope_theta", "expert_dtype",
        "first_k_dense_replace",
        "hc_eps", "hc_sinkhorn_iters", "index_topk", "kv_lora_rank", "num_nextn_predict_layers",
        "qk_nope_head_dim",
        "v_head_dim",
    )  # fmt: skip
    half = rope // 2
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        attention = f"{at}.self_attn"
        t.add(f"{attention}.sinks", (heads,), "attention", "DeepseekV4Attention", shard=0)
        t.linear(f"{attention}.q_a_proj", q_rank, hidden)
        t.norm(f"{attention}.q_a_norm", q_rank)
        t.linear(f"{attention}.q_b_proj", heads * size, q_rank, shard="column")
        t.linear(f"{attention}.kv_proj", size, hidden)
        t.norm(f"{attention}.kv_norm", size)
        into = heads * size // groups
        t.linear(f"{attention}.o_a_proj", groups * o_rank, into, shard="column", module_class="GroupedLinear")
        t.linear(f"{attention}.o_b_proj", hidden, groups * o_rank, shard="row")
        cache.append(CacheLayer(i, "sliding", window, 1, size, value_head_size=0))
        if ratios[i]:
            sparse = ratios[i] == _SPARSE
            here = f"{attention}.compressor"
            _compressor(t, here, ratios[i], hidden, size, 2 if sparse else 1, "Compressor")
            _rotary(t, here, half)
            if sparse:
                index = f"{here}.indexer"
                _compressor(t, index, ratios[i], hidden, index_size, 2, "Indexer")
                t.linear(f"{index}.q_b_proj", index_heads * index_size, q_rank)
                t.linear(f"{index}.scorer.weights_proj", index_heads, hidden)
                _rotary(t, index, half)
            cache.append(
                CacheLayer(
                    i, "mla", None, 1, size, compression=ratios[i], index_size=index_size if sparse else 0
                )
            )
            cache.append(CacheLayer(i, "state", None, 0, 0, states=_gathered(ratios[i], size, index_size)))
        t.layer_norms(at, hidden)
        for name in ("attn_hc", "ffn_hc"):
            rows = streams * (streams + 2)
            t.add(f"{at}.{name}.fn", (rows, streams * hidden), "norm", "HyperConnection")
            t.add(f"{at}.{name}.base", (rows,), "norm", "HyperConnection")
            t.add(f"{at}.{name}.scale", (3,), "norm", "HyperConnection")
        t.router(f"{at}.mlp.gate", count, hidden)
        if i < hashed:
            t.buffer(f"{at}.mlp.gate.tid2eid", (vocab, chosen), "HashRouter", "int64", "int64")
        else:
            t.correction_bias(f"{at}.mlp.gate.e_score_correction_bias", (count,))
        t.experts(f"{at}.mlp.experts", count, hidden, inner)
        if shared:
            t.gated_mlp(f"{at}.mlp.shared_experts", hidden, shared)
    t.norm("model.norm", hidden)
    t.add("model.hc_head.hc_fn", (streams, streams * hidden), "norm", "HyperHead")
    t.add("model.hc_head.hc_base", (streams,), "norm", "HyperHead")
    t.add("model.hc_head.hc_scale", (1,), "norm", "HyperHead")
    t.head("lm_head", vocab, hidden, "model.embed_tokens.weight" if tied else None)
    _rotary(t, "model", half)
    return common.decoder(
        fields, model_type, "DeepseekV4ForCausalLM", t, Heads(hidden, heads, 1, size), tuple(cache),
        layers=layers, inner=chosen * inner + shared, vocab=vocab, rotary=Rotary(rope, 2), experts=count,
        experts_per_token=chosen,
    )  # fmt: skip


def _hashed(fields: Fields) -> int:
    """Return how many layers at the start look up a token's experts in a table by token id (default 3)."""
    kinds = fields.raw("mlp_layer_types")
    if kinds is None:
        return 3
    if not isinstance(kinds, list) or not all(kind in ("hash_moe", "moe") for kind in kinds):
        raise ConfigError(
            f"{shown(kinds)} is not a list whose items are 'hash_moe' or 'moe'", field="mlp_layer_types"
        )
    count = kinds.count("hash_moe")
    if "moe" in kinds[:count]:
        raise UnsupportedArchitecture(
            "a hash_moe layer after a moe layer is not supported", field="mlp_layer_types"
        )
    return count


def _ratios(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the compression ratio of each layer: 0, 4 or 128.

    ``compress_ratios`` lists the ratios, with one more entry for the MTP layer. Files that transformers writes
    state ``layer_types`` instead.
    """
    value, kinds = fields.raw("compress_ratios"), fields.raw("layer_types")
    for kind, rate in (fields.mapping("compress_rates") or {}).items():
        if _RATES.get(kind) != rate:
            raise UnsupportedArchitecture(
                f"{shown(rate)} for {shown(kind)} is not supported; only {shown(_RATES.get(kind))} is",
                field="compress_rates",
            )
    if value is None and isinstance(kinds, list):
        value = [_RATES.get(kind) if isinstance(kind, str) else None for kind in kinds]
    if not isinstance(value, list) or len(value) < layers or not all(type(v) is int for v in value):
        raise ConfigError(
            f"{shown(value)} is not a list of at least {layers} integers", field="compress_ratios"
        )
    if not set(value) <= {0, _SPARSE, _HEAVY}:
        raise ConfigError(
            f"{shown(value)} has ratios other than 0, {_SPARSE} and {_HEAVY}", field="compress_ratios"
        )
    return tuple(value[:layers])


def _compressor(t: Tensors, at: str, ratio: int, hidden: int, size: int, overlap: int, name: str) -> None:
    """Add the projections that compress ``ratio`` tokens into one cache entry of ``size`` values.

    With ``overlap`` 2, each entry is made of two groups of ``ratio`` tokens, so the K and gate matrices have
    twice the rows. ``name`` is the class name of the compressor module.
    """
    t.add(f"{at}.position_bias", (ratio, overlap * size), "attention", name)
    t.linear(f"{at}.kv_proj", overlap * size, hidden)
    t.linear(f"{at}.gate_proj", overlap * size, hidden)
    t.norm(f"{at}.kv_norm", size)


def _gathered(ratio: int, size: int, index_size: int) -> tuple[StateTensor, ...]:
    """Return the per-sequence state tensors that hold tokens which do not yet fill a compressed cache entry."""
    if ratio == _HEAVY:
        return (StateTensor("compressor", (2, ratio, size), shard_dim=None),)
    return (
        StateTensor("compressor", (2, 2 * ratio, 2 * size), shard_dim=None),
        StateTensor("indexer", (2, 2 * ratio, 2 * index_size), shard_dim=None),
    )


def _rotary(t: Tensors, at: str, half: int) -> None:
    """Add the rotary frequency buffers of uncompressed and of compressed positions below module ``at``."""
    for kind in ("main", "compress"):
        t.rotary(2 * half, f"{at}.rotary_emb.{kind}_")


FAMILIES = {
    "deepseek_v4": Family(build, attentions=EAGER, files=FileTraits(renamed=True, exponent_scales=True)),
    "deepseek_ref": Family(build, attentions=EAGER, files=FileTraits(renamed=True, exponent_scales=True)),
}
