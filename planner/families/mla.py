"""Multi-head latent attention: K and V are cached as one compressed latent and one rotary key per token.

Families: DeepSeek-V2 / V3 / V3.2, Kimi-K2, GLM-4.7-Flash, GLM-5, MiniCPM3, Mistral 4 and LongCat-Flash. Shapes
follow transformers 5.19 and 5.23, models/<family>/. One layer caches kv_lora_rank + qk_rope_head_dim elements
per token on every tensor-parallel rank (DeepSeek-V2, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import Family, VLLMTraits
from tonnage.planner.families.moe_layers import sparse_layers
from tonnage.planner.families.tensors import Tensors, latent
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import (
    Attention,
    Embedding,
    Experts,
    Head,
    Heads,
    LatentAttention,
    Mlp,
    Norm,
    Recipe,
    Rope,
    Router,
    Table,
    layer_of,
)  # fmt: skip
from tonnage.planner.model.tensor import TensorSpec

_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


def read_latent(fields: Fields, *, defaults: bool = False, value_default: int | None = None) -> LatentAttention:
    """Return the sizes of the latent attention (MLA), from the config.

    Args:
        fields: the config.
        defaults: whether missing sizes default to those of DeepSeek-V3, as in some config classes.
        value_default: default of v_head_dim if ``defaults`` is False.
    """

    def size(name: str, default: int) -> int:
        return fields.integer(name, default if defaults else None, limit="width")

    # K and V of all heads are computed from the latent, so no shape depends on num_key_value_heads and
    # head_dim.
    fields.ignore("num_key_value_heads", "head_dim")
    return LatentAttention(
        fields.integer("hidden_size", limit="width"),
        fields.integer("num_attention_heads", limit="heads"),
        fields.optional_integer("q_lora_rank", limit="width"),
        size("kv_lora_rank", 512),
        size("qk_nope_head_dim", 128),
        size("qk_rope_head_dim", 64),
        fields.integer("v_head_dim", 128 if defaults else value_default, limit="width"),
    )


def heads_of(d: LatentAttention) -> Heads:
    """Return the head geometry of latent attention, with as many KV heads as query heads."""
    return Heads(d.hidden, d.heads, d.heads, d.head_size, d.value)


def cache(
    layers: Iterable[int], d: LatentAttention, index_sizes: dict[int, int] | None = None
) -> tuple[CacheLayer, ...]:
    """Return the KV cache entries of the layers with indices ``layers``, which have latent attention.

    ``index_sizes`` maps each layer with a sparse indexer to the size of the indexer's keys.
    """
    index = index_sizes or {}
    return tuple(
        CacheLayer(i, "mla", None, 1, d.entry, value_head_size=d.value, index_size=index.get(i, 0))
        for i in layers
    )


@dataclass(frozen=True, slots=True)
class LatentVariant:
    """Options by which a family with latent attention and experts differs from DeepSeek-V3.

    Attributes:
        class_name: the causal language model's class in transformers.
        dense_layers: default of first_k_dense_replace.
        indexer: whether layers have sparse indexers.
        correction: whether the router has e_score_correction_bias.
        softmax: whether the router's scores are a softmax; if False, they are a sigmoid. A token first selects
            groups of experts, except with a softmax and the topk_method greedy.
        complex_rope: whether rotary positions are computed as complex numbers.
        mlp_bias: whether the class reads the config field mlp_bias.
        latent: whether attention is latent. If False, it has ordinary heads, as in the first DeepSeek-MoE.
        sandwiched: whether the config field sandwich_norm adds norms in front of and behind the MLP.
        taped: whether training activations can be derived from the recipe (the description of layers).
    """

    class_name: str
    dense_layers: int
    indexer: bool = False
    correction: bool = True
    softmax: bool = False
    complex_rope: bool = False
    mlp_bias: bool = False
    latent: bool = True
    sandwiched: bool = False
    taped: bool = True

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of a latent-attention model of this family from its checked config."""
        # DeepSeek's small vision models set use_mla to false and have ordinary multi-head attention.
        plain = common.heads_of(fields) if fields.boolean("use_mla", self.latent) is False else None
        if plain is not None:
            fields.ignore("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
            fields.ignore("lm_head", "rm_head")
            d = LatentAttention(plain.hidden, plain.heads, None, 0, plain.head_size, 0, plain.head_size)
        else:
            d = read_latent(fields, defaults=True)
        layers, vocab = common.layers_and_vocab(fields)
        count = fields.integer("n_routed_experts", limit="width")
        chosen = fields.optional_integer("num_experts_per_tok", limit="width") or 1
        inner, dense = common.widths(fields, "moe_intermediate_size", "intermediate_size")
        shared = inner * (fields.optional_integer("n_shared_experts", 0, limit="width", minimum=0) or 0)
        bias = fields.boolean("attention_bias", False)
        tied = fields.boolean("tie_word_embeddings", False)
        fields.ignore("num_nextn_predict_layers")
        mlp_bias = fields.boolean("mlp_bias", False) and self.mlp_bias
        common.only(fields, moe_layer_freq=1)
        sparse = sparse_layers(fields, layers, self.dense_layers)
        index_heads, index_size, indexed = indexer(fields, layers) if self.indexer else (0, 0, ())

        table = Table("model.rotary_emb.", d.rotary or d.nope, complex=self.complex_rope)
        dropout = common.number(fields, "attention_dropout", 0.0)
        rope = Rope(d.rotary, table.name, restored=self.complex_rope)
        d = replace(d, bias=bias, rope=rope, dropout=dropout)
        mixers: dict[bool, Attention | LatentAttention] = {False: d}
        if self.indexer:
            if d.q_rank is None:
                raise ConfigError(
                    "missing; the sparse indexer needs the compressed query of this rank", field="q_lora_rank"
                )
            mixers[True] = replace(d, extra=index_tensors(d.hidden, d.q_rank, index_heads, index_size))
        if plain is not None:
            mixers[False] = Attention("self_attn", plain, bias=bias, out_bias=bias)
        sandwich = self.sandwiched and fields.boolean("sandwich_norm", False)
        norms = tuple(Norm(name, d.hidden) for name in (_SANDWICH if sandwich else _SANDWICH[:2]))
        act = common.act_of(fields, "silu")
        routed = Experts(
            "mlp", d.hidden, inner, count, chosen, act, _router(fields, self),
            Mlp("mlp.shared_experts", d.hidden, shared, act, bias=mlp_bias) if shared else None,
            first=True, extra=_correction(count) if self.correction else (),
        )  # fmt: skip
        mlps: dict[bool, Mlp | Experts] = {True: routed, False: Mlp("mlp", d.hidden, dense, act, bias=mlp_bias)}
        kinds = {
            (own, routes): layer_of("sandwich" if sandwich else "pre", mixer, module, norms)
            for own, mixer in mixers.items() for routes, module in mlps.items()
        }  # fmt: skip
        recipe = Recipe(
            "model.layers", Embedding("model.embed_tokens", vocab, d.hidden),
            tuple(kinds[self.indexer and indexed[i], sparse[i]] for i in range(layers)),
            Norm("model.norm", d.hidden), Head(tied), (table,),
            taped=plain is None and self.taped and not fields.config.get("output_router_logits"),
        )  # fmt: skip
        # A layer without an indexer reuses the indices of the last layer that has an indexer, and caches no
        # index keys.
        index_sizes = {i: index_size for i, own in enumerate(indexed) if own}
        read = fields.integer("index_topk", 2048, limit="positions") if index_sizes else 0
        architecture = common.described(
            fields, model_type, self.class_name, recipe, plain or heads_of(d),
            max(chosen * inner + shared, dense if not all(sparse) else 0),
            None if plain else cache(range(layers), d, index_sizes), rotary=Rotary(table.dim, 1),
            experts=count, experts_per_token=chosen,
        )  # fmt: skip
        return replace(architecture, index_topk=read)


def _correction(count: int) -> tuple[TensorSpec, ...]:
    """Return the router's e_score_correction_bias, a buffer that stays in fp32."""
    name = "mlp.gate.e_score_correction_bias"
    return (TensorSpec(name, (count,), "buffer", "Router", dtype="float32", stored="float32"),)


def _router(fields: Fields, v: LatentVariant) -> Router:
    """Return the description of the router that assigns tokens to experts."""
    if v.softmax:
        grouped = fields.config.get("topk_method", "greedy") != "greedy"
        groups = _groups(fields) if grouped else (0, 0)
        return Router("gate", "softmax-groups", False, groups)
    return Router("gate", "sigmoid-groups", bool(fields.config.get("norm_topk_prob", True)), _groups(fields))


def _groups(fields: Fields) -> tuple[int, int]:
    """Return the router's (number of groups of experts, number of groups that a token may use)."""
    return int(common.number(fields, "n_group", 8.0)), int(common.number(fields, "topk_group", 4.0))


def index_tensors(hidden: int, query: int, heads: int, size: int) -> tuple[TensorSpec, ...]:
    """Return the projections and the norm of a sparse indexer, whose queries come from ``query`` values."""
    at = "self_attn.indexer"
    return (
        TensorSpec(f"{at}.wq_b.weight", (heads * size, query), "attention", "Linear"),
        TensorSpec(f"{at}.wk.weight", (size, hidden), "attention", "Linear"),
        TensorSpec(f"{at}.k_norm.weight", (size,), "norm", "LayerNorm"),
        TensorSpec(f"{at}.k_norm.bias", (size,), "norm", "LayerNorm"),
        TensorSpec(f"{at}.weights_proj.weight", (heads, hidden), "attention", "KeptLinear"),
    )


def indexer(fields: Fields, layers: int) -> tuple[int, int, tuple[bool, ...]]:
    """Return the sparse-attention indexer's (heads, key size, whether each layer has an indexer of its own).

    The config field ``indexer_types`` states which layers have one, else the letters of
    ``index_topk_pattern`` (F for a layer with an indexer). If both fields are missing, the first
    ``index_skip_topk_offset`` layers have an indexer, and then one layer in ``index_topk_freq``
    (configuration_glm_moe_dsa.py, transformers 5.19; models/deepseek_v2.py, vLLM 0.32).
    """
    heads = fields.integer("index_n_heads", 64, limit="heads")
    size = fields.integer("index_head_dim", 128, limit="width")
    fields.ignore("layer_types", "num_experts", "index_share_for_mtp_iteration", "indexer_rope_interleave")
    own = fields.listed("indexer_types", layers, {"full": True, "shared": False})
    step = fields.optional_integer("index_topk_freq", limit="layers") or 1
    offset = fields.optional_integer("index_skip_topk_offset", limit="layers", minimum=0)
    offset = 2 if offset is None else offset
    pattern = fields.raw("index_topk_pattern")
    if own is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - {"F", "S"}:
            raise ConfigError(
                f"{shown(pattern)} is not a string with one letter, F or S, per layer",
                field="index_topk_pattern",
            )
        own = tuple(letter == "F" for letter in pattern)
    return heads, size, own or tuple(max(i - offset + 1, 0) % step == 0 for i in range(layers))


def _minicpm3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a MiniCPM3 model: latent attention and a dense MLP."""
    hidden, heads = (fields.raw(name) for name in ("hidden_size", "num_attention_heads"))
    value = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
    d = read_latent(fields, value_default=value)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore("dim_model_base")
    table = Table("model.rotary_emb.", d.rotary)
    mixer = replace(
        d, bias=bias, rope=Rope(d.rotary, table.name), dropout=common.number(fields, "attention_dropout", 0.0)
    )
    layer = layer_of(
        "pre", mixer, Mlp("mlp", d.hidden, inner, common.act_of(fields, "silu")),
        (Norm("input_layernorm", d.hidden), Norm("post_attention_layernorm", d.hidden)),
    )  # fmt: skip
    scale = TensorSpec("model.embed_tokens.embed_scale", (), "buffer", "ScaledWordEmbedding")
    recipe = Recipe(
        "model.layers", Embedding("model.embed_tokens", vocab, d.hidden, buffers=(scale,)), (layer,) * layers,
        Norm("model.norm", d.hidden), Head(tied), (table,),
    )  # fmt: skip
    return common.described(
        fields, model_type, "MiniCPM3ForCausalLM", recipe, heads_of(d), inner, cache(range(layers), d),
        rotary=Rotary(d.rotary, 1),
    )  # fmt: skip


def _longcat(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a LongCat-Flash model from its checked config.

    Each layer has two attention modules, two dense MLPs and one routed MLP. Some experts are empty: they return
    their input.
    """
    d = read_latent(fields, defaults=True)
    # Of the families with latent attention, only LongCat-Flash's config class reads qk_head_dim.
    stated = fields.optional_integer("qk_head_dim", limit="width")
    if stated not in (None, d.head_size):
        raise ConfigError(
            f"{stated} is not qk_nope_head_dim + qk_rope_head_dim = {d.head_size}", field="qk_head_dim"
        )
    layers = fields.integer("num_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    dense, count = common.widths(fields, "ffn_hidden_size", "n_routed_experts")
    empty = fields.integer("zero_expert_num", 0, limit="width", minimum=0)
    inner, chosen = common.widths(fields, "expert_ffn_hidden_size", "moe_topk")
    bias = fields.boolean("attention_bias", False)
    router_bias = fields.boolean("router_bias", False)
    fields.ignore(
        "num_hidden_layers", "zero_expert_type", "mla_scale_q_lora", "mla_scale_kv_lora", "attention_method"
    )
    tied = fields.boolean("tie_word_embeddings", False)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, d.hidden)
    for _, at in t.layers(layers, "model.layers"):
        # transformers allocates gate_up_proj for the empty experts too (modeling_longcat_flash.py)
        t.add(
            f"{at}.mlp.experts.gate_up_proj", (count + empty, 2 * inner, d.hidden), "expert", "Experts",
            shard=1, matrices=2,
        )  # fmt: skip
        t.add(f"{at}.mlp.experts.down_proj", (count, d.hidden, inner), "expert", "Experts", shard=2)
        t.router(f"{at}.mlp.router.classifier", count + empty, d.hidden, linear=True, bias=router_bias)
        t.correction_bias(f"{at}.mlp.router.e_score_correction_bias", (count + empty,), None)
        for half in range(2):
            latent(t, at, replace(d, bias=bias, name=f"self_attn.{half}"))
            t.gated_mlp(f"{at}.mlps.{half}", d.hidden, dense)
            t.norm(f"{at}.input_layernorm.{half}", d.hidden)
            t.norm(f"{at}.post_attention_layernorm.{half}", d.hidden)
    t.close("model.norm", "model.embed_tokens", vocab, d.hidden, tied)
    t.rotary(d.rotary, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "LongcatFlashForCausalLM", t,
        heads_of(d),
        cache((i // 2 for i in range(2 * layers)), d), layers=layers, inner=dense + chosen * inner, vocab=vocab,
        rotary=Rotary(d.rotary, 1), experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _longcat_ngram(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of LongCat-Flash-Lite: LongCat-Flash with hashed embeddings of n-grams.

    There are emb_split_num x (emb_neighbor_num - 1) tables; table i has ngram_vocab_size_ratio x vocab_size +
    2 i + 1 rows. vLLM keeps all tables in one tensor (models/longcat_flash_ngram.py, 0.32).
    """
    found = _longcat(fields, model_type)
    split = fields.integer("emb_split_num", limit="layers")
    grams = fields.integer("emb_neighbor_num", limit="layers")
    ratio = fields.integer("ngram_vocab_size_ratio", limit="width")
    tables = split * (grams - 1)
    if tables < 1:
        raise ConfigError(f"{grams} must be at least 2", field="emb_neighbor_num")
    common.divisible(found.hidden_size, tables, "hidden_size", "the number of n-gram tables")
    width = found.hidden_size // tables
    rows = sum(ratio * found.vocab_size + 2 * i + 1 for i in range(tables))
    at, owner = "model.ngram_embeddings", "NgramEmbedding"
    more = (
        TensorSpec(f"{at}.embedders.weight", (rows, width), "embedding", "Embedding", shard_dim=0),
        TensorSpec(f"{at}.post_projs", (tables, width, found.hidden_size), "embedding", owner),
    )
    return replace(found, class_name="LongcatFlashNgramForCausalLM", tensors=(*more, *found.tensors))


def _axk1(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an A.X-K1 model: DeepSeek-V3 with a norm after the experts."""
    found = LatentVariant("AXK1ForCausalLM", 1, taped=False).build(fields, model_type)
    layers = sorted({spec.layer for spec in found.tensors if spec.role == "expert" and spec.layer is not None})
    norms = [
        TensorSpec(
            f"model.layers.{layer}.mlp.post_mlp_layernorm.weight",
            (found.hidden_size,),
            "norm",
            "RMSNorm",
            layer,
        )
        for layer in layers
    ]
    return replace(found, tensors=(*found.tensors, *norms), recipe=None)


def _deepseek_v3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of DeepSeek-V3, or of Mistral Large 3, whose router has no bias per expert.

    vLLM makes a deepseek_v3 config from Mistral's params.json (transformers_utils/configs/mistral.py, 0.32).
    """
    large = fields.config.get("architectures") == ["MistralLarge3ForCausalLM"]
    corrected = not large or fields.raw("topk_method") == "noaux_tc"
    return LatentVariant("DeepseekV3ForCausalLM", 3, correction=corrected).build(fields, model_type)


def _sarvam(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Sarvam model with latent attention, whose router has a bias per expert."""
    inner = fields.optional_integer("moe_intermediate_size", limit="width")
    shared = fields.optional_integer("moe_shared_expert_intermediate_size", limit="width")
    if shared not in (None, inner):
        raise UnsupportedArchitecture(
            f"{shared} is not supported; it must equal moe_intermediate_size, {inner}",
            field="moe_shared_expert_intermediate_size",
        )
    for name, only in (("moe_router_enable_expert_bias", True), ("use_bias", False), ("use_qkv_bias", False)):
        if fields.boolean(name, only) is not only:
            raise UnsupportedArchitecture(
                f"{shown(not only)} is not supported; only {shown(only)} is", field=name
            )
    fields.ignore("embedding_dropout", "output_dropout", "max_window_layers", "use_qk_norm", "head_dim")
    return LatentVariant("SarvamMLAForCausalLM", 1, taped=False).build(fields, model_type)


def _pangu(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an openPangu-Ultra model: DeepSeek-V3 with norms around the MLP.

    The router has a bias per expert only if ``router_enable_expert_bias`` is set (models/openpangu.py of vLLM
    0.32).
    """
    common.refuse(fields, "param_sink_number", why="the planner cannot build learned sinks")
    biased = fields.boolean("router_enable_expert_bias", False)
    return LatentVariant("PanguUltraMoEForCausalLM", 3, correction=biased, sandwiched=True, taped=False).build(
        fields, model_type
    )


FAMILIES = {
    "deepseek": Family(
        # DeepSeek-MoE, the first version: ordinary attention, and no correction bias of the router
        LatentVariant(
            "DeepseekForCausalLM", 0, correction=False, softmax=True, latent=False, taped=False
        ).build,
    ),
    "sarvam_mla": Family(
        _sarvam,
        aliases={
            "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts",
        },
        absent={"n_shared_experts": 1}, hf="latent",
    ),
    "pangu_ultra_moe": Family(_pangu, hf="latent"),
    "deepseek_v2": Family(
        LatentVariant(
            "DeepseekV2ForCausalLM", 0, correction=False, softmax=True, complex_rope=True, mlp_bias=True,
        ).build,
        absent={"q_lora_rank": 1536, "n_shared_experts": 2}, hf="latent",
    ),
    "deepseek_v3": Family(
        _deepseek_v3, absent={"q_lora_rank": 1536, "n_shared_experts": 1}, hf="latent",
        other_classes=("MistralLarge3ForCausalLM",),
    ),
    "deepseek_v32": Family(
        LatentVariant("DeepseekV32ForCausalLM", 3, indexer=True, taped=False).build,
        absent={"q_lora_rank": 1536, "n_shared_experts": 1}, hf="latent",
    ),
    "kimi_k2": Family(
        # Published files of Kimi K2 name DeepSeek-V3's class.
        LatentVariant("DeepseekV3ForCausalLM", 3, taped=False).build,
        absent={"q_lora_rank": 1536, "n_shared_experts": 1}, hf="latent",
    ),
    "glm_moe_dsa": Family(
        LatentVariant("GlmMoeDsaForCausalLM", 3, indexer=True, taped=False).build,
        absent={
            "v_head_dim": 256, "qk_nope_head_dim": 192, "index_n_heads": 32, "q_lora_rank": 2048,
            "n_shared_experts": 1,
        },
        hf="latent",
    ),
    "axk1": Family(
        _axk1, absent={"q_lora_rank": 1536, "n_shared_experts": 1}, hf="latent", ignored=("pretraining_tp",),
    ),
    "glm4_moe_lite": Family(
        LatentVariant("Glm4MoeLiteForCausalLM", 1).build,
        absent={"v_head_dim": 256, "qk_nope_head_dim": 192, "q_lora_rank": 768, "n_shared_experts": 1},
        hf="latent", vllm=VLLMTraits(wide_router=True),
    ),
    "mistral4": Family(
        LatentVariant("Mistral4ForCausalLM", 0, correction=False, taped=False).build,
        absent={"qk_nope_head_dim": 64, "kv_lora_rank": 256, "q_lora_rank": 1024, "n_shared_experts": 1},
        hf="latent",
    ),
    "minicpm3": Family(_minicpm3, absent={"q_lora_rank": 768}, hf="latent", vllm=VLLMTraits(expanded_mla=True)),
    "longcat_flash_ngram": Family(
        _longcat_ngram, absent={"q_lora_rank": 1536, "zero_expert_num": 256}, hf="latent",
        vllm=VLLMTraits(wide_router=True),
    ),
    "longcat_flash": Family(
        _longcat, absent={"q_lora_rank": 1536, "zero_expert_num": 256}, hf="latent",
        vllm=VLLMTraits(wide_router=True),
    ),
}  # fmt: skip
