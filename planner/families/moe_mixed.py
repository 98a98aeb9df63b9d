"""Mixture-of-experts decoders with several kinds of layers, and one builder function per family.

Families: gpt-oss, Laguna, MiMo-V2, Step-3.7, MiniMax-M3, DBRX and JetMoE. Shapes follow transformers 5.19 /
5.23, models/<family>/.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import RENAMED, Family, VLLMTraits
from tonnage.planner.families.moe_layers import sparse_layers
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import (
    Attention,
    Embedding,
    Experts,
    Head,
    Heads,
    Norm,
    Recipe,
    Rope,
    Router,
    Table,
    layer_of,
)  # fmt: skip
from tonnage.planner.model.tensor import TensorSpec


def gpt_oss(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a gpt-oss model: full and sliding layers alternate.

    Its experts have biases, and their matrices are stored as [experts, in, out].
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    count = fields.integer("num_local_experts", limit="width")
    chosen = fields.integer("num_experts_per_tok", 4, limit="width")
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", True)
    tied = fields.boolean("tie_word_embeddings", False)
    fields.ignore("experts_per_token", "initial_context_length")
    # by default full and sliding layers alternate, starting with sliding (configuration_gpt_oss.py)
    kinds = fields.layer_types(layers) or common.alternating_kinds(layers, 2)
    window = fields.integer("sliding_window", 128, limit="positions")
    table = Table("model.rotary_emb.", dims.head_size, half=True)
    sinks = TensorSpec("self_attn.sinks", (dims.heads,), "attention", "GptOssAttention", shard_dim=0)
    attention = Attention(
        "self_attn", dims, bias=bias, out_bias=bias, rope=Rope(dims.head_size, table.name), sinks=True,
        dropout=common.number(fields, "attention_dropout", 0.0), extra=(sinks,),
    )  # fmt: skip
    routed = Experts(
        "mlp", dims.hidden, inner, count, chosen, "clamped-swiglu",
        Router("router", "softmax-typed", normed=False, bias=True), biased=True,
    )  # fmt: skip
    norms = ("input_layernorm", "post_attention_layernorm")
    layer = layer_of("pre", attention, routed, tuple(Norm(name, dims.hidden, "rms-wide") for name in norms))
    recipe = Recipe(
        "model.layers", Embedding("model.embed_tokens", vocab, dims.hidden), (layer,) * layers,
        Norm("model.norm", dims.hidden, "rms-wide"), Head(tied), (table,),
        taped=not fields.config.get("output_router_logits"),
    )  # fmt: skip
    return common.described(
        fields, model_type, "GptOssForCausalLM", recipe, dims, chosen * inner,
        common.cache_layers(kinds, window, dims), rotary=Rotary(dims.head_size, 1), experts=count,
        experts_per_token=chosen,
    )  # fmt: skip


def laguna(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Laguna model from its checked config.

    Full and sliding layers have different numbers of query heads, and a gate scales the attention output.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    count, chosen, inner = common.widths(fields, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    shared, dense = common.widths(fields, "shared_expert_intermediate_size", "intermediate_size")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    query_heads = _numbers(fields, "num_attention_heads_per_layer", layers) or (dims.heads,) * layers
    kinds = fields.layer_types(layers) or ("full_attention",) * layers
    sparse = sparse_layers(fields, layers, 1)
    gates = fields.raw("gating")
    if gates not in (True, "per-head", "per_head"):
        raise UnsupportedArchitecture(
            f"{shown(gates)} is not supported; only true and 'per-head' are", field="gating"
        )
    fields.ignore(
        "gating_types", "moe_apply_router_weight_on_input", "use_bidirectional_attention",
        "decoder_sparse_step",
        "mlp_only_layers", "moe_router_logit_softcapping", "swa_attention_sink_enabled",
    )  # fmt: skip
    window = common.window_of(fields)
    share = _kind_shares(fields, kinds)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    for i, at in t.layers(layers, "model.layers"):
        own = replace(dims, heads=query_heads[i])
        common.divisible(own.heads, own.kv_heads, "num_attention_heads_per_layer", "num_key_value_heads")
        t.attention(f"{at}.self_attn", own, bias=bias, out_bias=bias, qk_norm="head")
        t.linear(f"{at}.self_attn.g_proj", own.heads, dims.hidden, shard="column")
        t.layer_norms(at, dims.hidden)
        if not sparse[i]:
            t.gated_mlp(f"{at}.mlp", dims.hidden, dense)
            continue
        t.experts(f"{at}.mlp.experts", count, dims.hidden, inner)
        t.router(f"{at}.mlp.gate", count, dims.hidden)
        t.add(f"{at}.mlp.gate.e_score_correction_bias", (count,), "router", "Router")
        t.gated_mlp(f"{at}.mlp.shared_experts", dims.hidden, shared)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    for kind in dict.fromkeys(kinds):
        t.rotary(int(dims.head_size * share[kind]), f"model.rotary_emb.{kind}_")
    return common.decoder(
        fields, model_type, "LagunaForCausalLM", t, replace(dims, heads=max(query_heads)),
        common.cache_layers(kinds, window, dims), layers=layers,
        inner=max(chosen * inner + shared, dense), vocab=vocab, rotary=Rotary(dims.head_size, len(share)),
        experts=count, experts_per_token=chosen,
    )  # fmt: skip


def mimo_v2(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a MiMo-V2-Flash model from its checked config.

    Sliding layers have attention sinks, and their own number of KV heads and head sizes. V may be narrower than
    K.
    """
    full = common.heads_of(fields)
    full = replace(full, value=fields.integer("v_head_dim", full.head_size, limit="width"))
    heads = fields.integer("swa_num_attention_heads", full.heads, limit="heads")
    kv_heads = fields.integer("swa_num_key_value_heads", 2 * full.kv_heads, limit="heads")
    sliding_size = fields.integer("swa_head_dim", full.head_size, limit="width")
    value = fields.integer("swa_v_head_dim", full.value_size, limit="width")
    sliding = Heads(full.hidden, heads, kv_heads, sliding_size, value)
    common.divisible(sliding.heads, sliding.kv_heads, "swa_num_attention_heads", "swa_num_key_value_heads")
    layers, vocab = common.layers_and_vocab(fields)
    pattern = _numbers(fields, "hybrid_layer_pattern", layers, zero=True)
    sparse = _frequencies(fields, layers)
    kinds = fields.layer_types(layers)  # files written by transformers 5 state layer_types
    if pattern is None and kinds is not None:
        pattern = tuple(int(kind == "sliding_attention") for kind in kinds)
    if pattern is None or sparse is None:
        missing = "moe_layer_freq" if pattern is not None else "hybrid_layer_pattern"
        raise ConfigError("missing", field=missing)
    count, chosen = common.widths(fields, "n_routed_experts", "num_experts_per_tok")
    inner, dense = common.widths(fields, "moe_intermediate_size", "intermediate_size")
    window = fields.integer("sliding_window", limit="positions")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    sink_full = fields.boolean("add_full_attention_sink_bias", False)
    sink_sliding = fields.boolean("add_swa_attention_sink_bias", True)
    common.refuse(fields, "n_shared_experts", why="the planner cannot build shared experts of this family")
    fields.ignore("swa_rope_theta", "sliding_window_size", "attention_chunk_size", "attention_value_scale")
    share = _kind_shares(fields, ("full_attention", "sliding_attention"), 0.334)["full_attention"]
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, full.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        own = sliding if pattern[i] else full
        t.attention(f"{at}.self_attn", own, bias=bias)
        if sink_sliding if pattern[i] else sink_full:
            t.add(f"{at}.self_attn.sinks", (own.heads,), "attention", "MiMoV2FlashAttention", shard=0)
        t.layer_norms(at, full.hidden)
        kind: Any = "sliding" if pattern[i] else "full"
        seen = window if pattern[i] else None
        cache.append(CacheLayer(i, kind, seen, own.kv_heads, own.head_size, value_head_size=own.value_size))
        if not sparse[i]:
            t.gated_mlp(f"{at}.mlp", full.hidden, dense)
            continue
        t.corrected_experts(f"{at}.mlp", count, full.hidden, inner)
    t.close("model.norm", "model.embed_tokens", vocab, full.hidden, tied)
    for name, own in (("full_attention", full), ("sliding_attention", sliding)):
        t.rotary(int(own.head_size * share), f"model.rotary_emb.{name}_")
    return common.decoder(
        fields, model_type, "MiMoV2FlashForCausalLM", t, full, tuple(cache), layers=layers,
        inner=max(chosen * inner, dense), vocab=vocab, rotary=Rotary(int(full.head_size * share), 2),
        experts=count, experts_per_token=chosen,
    )  # fmt: skip


def step3p7(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the Step-3.7 text model from its checked config.

    Sliding layers have their own number of query heads.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    kinds = fields.layer_types(layers) or tuple(
        "sliding_attention" if i % 4 else "full_attention" for i in range(layers)
    )
    sparse = sparse_layers(fields, layers, 3)
    count, chosen, inner = common.widths(fields, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    shared, dense = common.widths(fields, "share_expert_dim", "intermediate_size")
    tied = fields.boolean("tie_word_embeddings", False)
    window = common.window_of(fields)
    wide = fields.integer("num_sliding_attention_heads", dims.heads, limit="heads")
    local = replace(dims, heads=wide)
    common.refuse(fields, "attention_bias", "mlp_bias", "per_layer_config")
    fields.ignore("mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers")
    fields.ignore("swiglu_limits", "swiglu_limits_shared", "moe_router_scaling_factor", "query_pre_attn_scalar")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    for i, at in t.layers(layers, "model.layers"):
        own = local if kinds[i] == "sliding_attention" else dims
        t.attention(f"{at}.self_attn", own, qk_norm="head")
        t.linear(f"{at}.self_attn.g_proj", own.heads, dims.hidden, shard="column")
        t.layer_norms(at, dims.hidden)
        if not sparse[i]:
            t.gated_mlp(f"{at}.mlp", dims.hidden, dense)
            continue
        t.corrected_experts(f"{at}.mlp", count, dims.hidden, inner, None)
        t.gated_mlp(f"{at}.mlp.shared_experts", dims.hidden, shared)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, *(f"model.rotary_emb.{kind}_" for kind in dict.fromkeys(kinds)))
    return common.decoder(
        fields, "step3p7", "Step3p7ForCausalLM", t, dims,
        common.cache_layers(kinds, window, dims), layers=layers,
        inner=max(chosen * inner + shared, dense), vocab=vocab, rotary=Rotary(dims.head_size, 2), experts=count,
        experts_per_token=chosen,
    )  # fmt: skip


def minimax_m3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a MiniMax-M3 model from its checked config.

    Besides grouped-query attention there is a block-sparse indexer, whose keys are cached too.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    sparse = _frequencies(fields, layers)
    if sparse is None:
        raise ConfigError("missing", field="moe_layer_freq")
    count, chosen = common.widths(fields, "num_local_experts", "num_experts_per_tok")
    inner = fields.integer("intermediate_size", limit="width")
    stated = fields.optional_integer("moe_intermediate_size", limit="width")
    if stated not in (None, inner):
        raise ConfigError(f"{stated} contradicts intermediate_size = {inner}", field="moe_intermediate_size")
    dense = fields.integer("dense_intermediate_size", limit="width")
    shared = fields.integer("shared_intermediate_size", inner, limit="width")
    number = fields.optional_integer("n_shared_experts", 1, limit="width", minimum=0) or 0
    tied = fields.boolean("tie_word_embeddings", False)
    index_heads, index_size, indexed = _minimax_indexer(fields, layers, dims)
    common.refuse(fields, "attention_output_gate", why="the planner cannot build this gate")
    fields.ignore(
        "use_qk_norm", "qk_norm_type", "use_gemma_norm", "use_routing_bias", "num_mtp_modules",
        "num_nextn_predict_layers", "rotary_dim", "first_k_dense_replace",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        t.attention(f"{at}.self_attn", dims, qk_norm="head")
        t.layer_norms(at, dims.hidden)
        if indexed[i]:
            index = f"{at}.self_attn.indexer"
            t.linear(f"{index}.q_proj", index_heads * index_size, dims.hidden)
            t.linear(f"{index}.k_proj", index_size, dims.hidden)
            t.norms(index, index_size, "q_norm", "k_norm")
        cache.append(
            CacheLayer(
                i, "full", None, dims.kv_heads, dims.head_size, index_size=index_size if indexed[i] else 0
            )
        )
        if not sparse[i]:
            t.plain_mlp(f"{at}.mlp", dims.hidden, dense, names=("gate_up_proj", "down_proj"), fused_gate=True)
            continue
        t.corrected_experts(f"{at}.mlp", count, dims.hidden, inner, None)
        if number:
            t.plain_mlp(
                f"{at}.mlp.shared_experts", dims.hidden, shared * number, names=("gate_up_proj", "down_proj"),
                fused_gate=True,
            )  # fmt: skip
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(int(dims.head_size * common.rotary_share(fields, 0.5)), "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "MiniMaxM3ForCausalLM", t, dims, tuple(cache), layers=layers,
        inner=max(chosen * inner + shared * number, dense), vocab=vocab, rotary=Rotary(dims.head_size // 2, 1),
        experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _minimax_indexer(fields: Fields, layers: int, dims: Heads) -> tuple[int, int, tuple[bool, ...]]:
    """Return MiniMax-M3's sparse-attention indexer: (heads, key size, whether each layer has an indexer)."""
    sparse = fields.mapping("sparse_attention_config")
    words = {"full_attention": False, "minimax_m3_sparse": True}
    indexed = fields.listed("layer_types", layers, words) if sparse is None else None
    if indexed is not None:  # transformers 5 writes the indexer's fields at the top level
        fields.ignore("index_block_size", "index_topk_blocks", "index_local_blocks")
        return (
            fields.integer("index_n_heads", dims.kv_heads, limit="heads"),
            fields.integer("index_head_dim", dims.head_size, limit="width"),
            indexed,
        )
    if sparse is None or not sparse.get("use_sparse_attention", True):
        return 0, 0, (False,) * layers
    inner = Fields(sparse)
    every = _numbers(inner, "sparse_attention_freq", layers, zero=True) or (1,) * layers
    heads = inner.integer("sparse_num_index_heads", dims.kv_heads, limit="heads")
    size = inner.integer("sparse_index_dim", dims.head_size, limit="width")
    return heads, size, tuple(bool(flag) for flag in every)


def dbrx(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a DBRX model from its checked config.

    The config has its own field names, with the fields of attention and experts in two nested objects. Experts
    are stored as [experts x inner, hidden].
    """
    attention, ffn = fields.mapping("attn_config"), fields.mapping("ffn_config")
    if attention is None or ffn is None:
        raise ConfigError("missing", field="attn_config" if attention is None else "ffn_config")
    hidden = fields.integer("d_model", limit="width")
    heads = fields.integer("n_heads", limit="heads")
    common.divisible(hidden, heads, "d_model", "n_heads")
    kv_heads = Fields(attention).integer("kv_n_heads", 1, limit="heads")
    common.divisible(heads, kv_heads, "n_heads", "attn_config.kv_n_heads")
    dims = Heads(hidden, heads, kv_heads, hidden // heads)
    layers = fields.integer("n_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    moe = Fields(ffn)
    count = moe.integer("moe_num_experts", 4, limit="width")
    chosen = moe.integer("moe_top_k", 1, limit="width")
    inner = moe.integer("ffn_hidden_size", 3584, limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    fields.ignore("emb_pdrop", "rope_parameters", "max_position_embeddings", "num_key_value_heads")
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, hidden)
    for _, at in t.layers(layers, "transformer.blocks"):
        t.fused_attention(f"{at}.norm_attn_norm.attn", dims, qkv="Wqkv", out="out_proj")
        t.norms(f"{at}.norm_attn_norm", hidden, "norm_1", "norm_2", kind="layer-weight")
        t.router(f"{at}.ffn.router.layer", count, hidden, linear=True)
        for name in ("w1", "v1", "w2"):
            t.add(f"{at}.ffn.experts.mlp.{name}", (count * inner, hidden), "expert", "DbrxExpertGLU", shard=0)
    t.norm("transformer.norm_f", hidden, "layer-weight")
    t.head("lm_head", vocab, hidden, "transformer.wte.weight" if tied else None)
    t.rotary(dims.head_size, "transformer.rotary_emb.")
    return common.decoder(
        fields, model_type, "DbrxForCausalLM", t, dims, layers=layers,
        inner=chosen * inner, vocab=vocab, rotary=Rotary(dims.head_size, 1), experts=count,
        experts_per_token=chosen, max_model_len=fields.integer("max_seq_len", limit="positions"),
        position_field="max_seq_len",
    )  # fmt: skip


def jetmoe(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a JetMoE model, which has experts in the attention too.

    Each token's queries are computed by ``num_experts_per_tok`` attention experts.
    """
    hidden = fields.integer("hidden_size", limit="width")
    layers, vocab = common.layers_and_vocab(fields)
    kv_heads = fields.integer("num_key_value_heads", 16, limit="heads")
    size = fields.integer("kv_channels", 128, limit="width")
    chosen = fields.integer("num_experts_per_tok", 2, limit="width")
    count = fields.integer("num_local_experts", 8, limit="width")
    inner = fields.integer("intermediate_size", limit="width")
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore("num_attention_heads", "activation_function")
    kv = kv_heads * size
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    for _, at in t.layers(layers, "model.layers"):
        for module, into, up, down in (
            ("mlp", hidden, 2 * inner, inner), ("self_attention.experts", hidden, kv, kv),
        ):  # fmt: skip
            role: Any = "expert"
            t.add(f"{at}.{module}.bias", (hidden,), role, "JetMoeMoE")
            t.add(f"{at}.{module}.input_linear.weight", (count, up, into), role, "ParallelExperts", shard=1)
            t.add(
                f"{at}.{module}.output_linear.weight", (count, hidden, down), role, "ParallelExperts", shard=2
            )
            t.router(f"{at}.{module}.router.layer", count, hidden, linear=True)
        t.linear(f"{at}.self_attention.kv_proj", 2 * kv, hidden, shard="column", kv=(2 * kv, kv_heads))
        t.layer_norms(at, hidden)
    dims = Heads(hidden, kv_heads * chosen, kv_heads, size)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(size, "model.rotary_emb.")
    cache = tuple(CacheLayer(i, "full", None, kv_heads, size, kv_heads * chosen) for i in range(layers))
    return common.decoder(
        fields, model_type, "JetMoeForCausalLM", t, dims, cache, layers=layers, inner=chosen * inner,
        vocab=vocab, rotary=Rotary(size, 1), experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _frequencies(fields: Fields, layers: int) -> tuple[int, ...] | None:
    """Return for each layer a number above 0 if it has routed experts, else 0; None if no field states it.

    Published files state ``moe_layer_freq``. Files that transformers 5 writes state ``mlp_layer_types``.
    """
    stated = _numbers(fields, "moe_layer_freq", layers, zero=True)
    if stated is None and fields.raw("mlp_layer_types") is not None:
        stated = tuple(map(int, sparse_layers(fields, layers)))
    return stated


def _numbers(fields: Fields, name: str, layers: int, *, zero: bool = False) -> tuple[int, ...] | None:
    """Return the list in the config field ``name`` (one positive integer per layer), or None without the field.

    With ``zero``, 0 is valid too.
    """
    value = fields.raw(name)
    if value is None:
        return None
    low = 0 if zero else 1
    if (
        not isinstance(value, list)
        or len(value) != layers
        or not all(type(v) is int and low <= v <= 1 << 20 for v in value)
    ):
        raise ConfigError(f"{shown(value)} is not a list of {layers} integers of at least {low}", field=name)
    return tuple(value)


def _kind_shares(fields: Fields, kinds: tuple[str, ...], default: float = 1.0) -> dict[str, float]:
    """Return a dict: attention kind -> fraction of each head that is rotated.

    The config field ``rope_parameters`` states the fraction per kind, else ``partial_rotary_factor`` for all
    kinds.
    """
    parameters = fields.raw("rope_parameters")
    base = fields.number("partial_rotary_factor", default)
    out = {}
    for kind in dict.fromkeys(kinds):
        own = parameters.get(kind) if isinstance(parameters, dict) else None
        share = own.get("partial_rotary_factor") if isinstance(own, dict) else None
        share = share if isinstance(share, int | float) else base
        if not 0 < share <= 1:
            raise ConfigError(f"{shown(share)} is not in (0, 1]", field="partial_rotary_factor")
        out[kind] = float(share)
    return out


FAMILIES = {
    "gpt_oss": Family(
        gpt_oss, absent={"num_key_value_heads": 8, "head_dim": 64}, attentions=("flash",), hf="sinks",
        vllm=VLLMTraits(alternating=True),
    ),
    "laguna": Family(laguna, absent={"num_key_value_heads": 8, "head_dim": 128}),
    "mimo_v2_flash": Family(
        mimo_v2, absent={"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128}, attentions=("flash",),
        hf="sinks", other_classes=("MiMoV2ForCausalLM",),
    ),
    "step3p7_text": Family(
        step3p7, aliases={"num_experts": "n_routed_experts"},
        absent={"num_key_value_heads": 8, "head_dim": 128}, vllm=VLLMTraits(wide_router=True),
    ),
    "minimax_m3": Family(
        minimax_m3, absent={"num_key_value_heads": 4, "head_dim": 128}, files=RENAMED,
        other_classes=("MiniMaxM3SparseForCausalLM",),
    ),
    "dbrx": Family(dbrx, files=RENAMED),
    "jetmoe": Family(jetmoe, files=RENAMED),
}  # fmt: skip
