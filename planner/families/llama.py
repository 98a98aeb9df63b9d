"""Dense decoders of Llama's shape: embedding, layers of attention and MLP, final norm, head.

One row of the table per family, after transformers 5.19, models/<family>/modeling_<family>.py. What a
family has beyond the common parts is a small function at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import LORA_ON_VOCABULARY, QV, QV_DOWN, Family, InGGUF, InVLLM, Values
from tonnage.planner.families.tensors import tensors_of
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import (
    Attention,
    Embedding,
    Flow,
    Head,
    Heads,
    Layer,
    Mlp,
    Norm,
    NormKind,
    Recipe,
    Rope,
    Table,
    layer_of,
)  # fmt: skip
from tonnage.planner.model.tensor import Role, TensorSpec
from tonnage.planner.records import dataclass, replace

Bias = bool | tuple[str, bool]  # always | (config field, its default)
_ATTENTION_BIAS = ("attention_bias", False)
_TABLE = "model.rotary_emb."

# How a family's apply_rotary_pos_emb differs from Llama's
ROPES = {
    "half": Rope(0),
    "joined": Rope(0, joined=True),
    "helium": Rope(0, fresh=True),
    "glm": Rope(0, fresh=True, joined=True),
    "ernie": Rope(0, fresh=True, restored=True),
    "olmo": Rope(0, restored=True),
    "cohere": Rope(0, restored=True),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """How a family differs from Llama."""

    class_name: str
    qkv_bias: Bias = False
    out_bias: Bias = False
    mlp_bias: Bias = False
    qk_norm: str = "none"  # none | head | full
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    normed_last: bool = False  # q and k are normed after their rotation
    qkv: str | None = None  # name of the fused projection
    out: str = "o_proj"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: up and down, or fused
    fused: bool = False  # the first of two matrices holds gate and up
    act: str = "silu"  # hidden_act when the file does not say
    flow: Flow = "pre"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # as computed
    norm: NormKind = "rms"
    final: str = "model.norm"
    head_bias: bool = False
    tied: bool = False  # tie_word_embeddings when the file does not say
    rotary_share: float = 1.0  # partial_rotary_factor when the file does not say
    rope: str = "half"
    roped: str = "all"  # all | sliding (layers) | windowed (the sliding ones, where the file has a window)
    window: str = "none"  # none | always | layer_types | qwen
    attention_dropout: float = 0.0  # when the file does not say
    dropout: tuple[str, float] = ("", 0.0)  # field and default: behind attention and MLP ...
    dropped: tuple[bool, bool] = (True, True)  # ... or only one of them
    embedding_dropout: str = ""
    ignored: tuple[str, ...] = ()
    extra: Callable[[Attention, Mlp, Layer], Layer] | None = None
    taped: bool = True

    def build(self, fields: Fields, model_type: str) -> Architecture:
        return _build(self, fields, model_type)


def _granite(name: str) -> Variant:
    return Variant(name, _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False))


_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_PLAIN = ("up_proj", "down_proj")
_FUSED = ("gate_up_proj", "down_proj")


def _internlm3(fields: Fields, model_type: str) -> Architecture:
    """transformers 5.23 builds it of Llama's classes, with one switch for the biases of attention and MLP."""
    name = "attention_bias"
    if fields.boolean(name, False) != fields.boolean("mlp_bias", False):
        raise UnsupportedArchitecture(
            "differs from the bias of the other projections, which transformers does not build",
            field=fields.name(name),
        )
    return _granite("LlamaForCausalLM").build(fields, model_type)


def _iquestcoder(fields: Fields, model_type: str) -> Architecture:
    """Llama's classes in transformers 5.23, which refuse what no released file switches on."""
    for name in ("clip_qkv", "use_sliding_window"):
        if fields.raw(name):
            raise UnsupportedArchitecture(f"{shown(fields.raw(name))} is not known here", field=name)
    return _granite("LlamaForCausalLM").build(fields, model_type)


def _bitnet(attention: Attention, mlp: Mlp, layer: Layer) -> Layer:
    a, m = layer.branches
    dims = attention.heads
    attention = replace(attention, before_out=Norm("attn_sub_norm", dims.heads * dims.head_size))
    mlp = replace(mlp, before_out=Norm("ffn_sub_norm", mlp.inner))
    return replace(layer, branches=(replace(a, module=attention), replace(m, module=mlp)))


def _apertus(attention: Attention, mlp: Mlp, layer: Layer) -> Layer:
    """xIELU: two learned scalars per layer, two constants."""
    at, owner = "mlp.act_fn", "XIELUActivation"
    learned = [TensorSpec(f"{at}.{name}", (1,), "mlp", owner) for name in ("alpha_p", "alpha_n")]
    fixed = [TensorSpec(f"{at}.{name}", (), "buffer", owner, stored="model") for name in ("beta", "eps")]
    return replace(layer, extra=(*learned, *fixed))


def _diffllama(attention: Attention, mlp: Mlp, layer: Layer) -> Layer:
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    shape, owner = (attention.heads.head_size,), "DiffLlamaAttention"
    return replace(
        layer, extra=tuple(TensorSpec(f"self_attn.{name}", shape, "attention", owner) for name in names)
    )


def _doge(attention: Attention, mlp: Mlp, layer: Layer) -> Layer:
    """Dynamic mask attention and per-channel residual weights."""
    dims = attention.heads
    role: Role = "attention"
    extra = [
        TensorSpec("self_attn.A", (dims.kv_heads,), role, "DogeAttention", shard_dim=0),
        TensorSpec("self_attn.dt_proj.weight", (dims.kv_heads, dims.kv_heads * dims.head_size), role, "Linear"),
    ]
    if attention.bias:
        extra.append(TensorSpec("self_attn.dt_proj.bias", (dims.kv_heads,), role, "Linear"))
    weights = ("input_residual", "post_attention_residual")
    branches = (replace(b, weighted=w) for b, w in zip(layer.branches, weights, strict=True))
    return replace(layer, branches=tuple(branches), extra=tuple(extra))


def _build(variant: Variant, fields: Fields, model_type: str) -> Architecture:
    if model_type == "qwen2":
        # Qwen2Config has no head_dim field but the model reads one when the file has it
        fields.ignore("head_dim")
    dims = common.heads_of(fields)
    if model_type == "helium" and dims.heads * dims.head_size != dims.hidden:
        raise ConfigError(f"{dims.heads} heads of it are not hidden_size = {dims.hidden}", field="head_dim")
    if fields.boolean("is_moe", False):
        raise UnsupportedArchitecture("Doge's product-key experts are not planned", field="is_moe")
    fields.ignore(*variant.ignored)
    vocab, inner = (
        fields.integer("vocab_size", limit="vocab"),
        fields.integer("intermediate_size", limit="width"),
    )
    count = fields.integer("num_hidden_layers", limit="layers")
    tied = fields.boolean("tie_word_embeddings", variant.tied)
    kinds, window = _kinds(fields, model_type, variant, count)
    share = common.rotary_share(fields, variant.rotary_share)
    rotary = Rotary(int(dims.head_size * share), 1)
    tables: tuple[str, ...] = (_TABLE,)
    if model_type == "olmo3":
        tables = tuple(f"{_TABLE}{kind}_" for kind in dict.fromkeys(kinds))
        rotary = Rotary(rotary.dim, len(tables))
    layers = _layers(fields, model_type, variant, dims, inner, kinds, window, rotary.dim)
    recipe = Recipe(
        "model.layers",
        Embedding(
            "model.embed_tokens", vocab, dims.hidden,
            dropout=common.number(fields, variant.embedding_dropout, 0.0),
        ),
        layers,
        Norm(variant.final, dims.hidden, variant.norm),
        Head(tied, variant.head_bias),
        tuple(Table(table, rotary.dim, variant.rope in ("olmo", "ernie")) for table in tables),
        taped=variant.taped,
    )  # fmt: skip
    return common.decoder(
        fields, model_type, variant.class_name, tensors_of(recipe), dims,
        common.cache_layers(kinds, window, dims.kv_heads, dims.head_size),
        layers=count, inner=inner, vocab=vocab, rotary=rotary,
        gated=len(variant.mlp_names) == 3 or variant.fused, recipe=recipe,
    )  # fmt: skip


def _layers(
    fields: Fields, model_type: str, variant: Variant, dims: Heads, inner: int, kinds: tuple[str, ...],
    window: int | None, rotated: int,
) -> tuple[Layer, ...]:  # fmt: skip
    """Layers differ in the tables they read, if any."""
    qkv_bias, out_bias, mlp_bias = (
        common.bias_of(fields, rule) for rule in (variant.qkv_bias, variant.out_bias, variant.mlp_bias)
    )
    flow, names = variant.flow, variant.norms
    if model_type == "stablelm" and fields.boolean("use_parallel_residual", False):
        flow, names = "parallel", names[:1]
    q_norm, k_norm = _qk_norms(fields, model_type, variant, dims)
    attention = Attention(
        "self_attn", dims, out=variant.out, qkv=variant.qkv, bias=qkv_bias, out_bias=out_bias,
        q_norm=q_norm, k_norm=k_norm, normed_last=variant.normed_last,
        rope=replace(ROPES[variant.rope], dim=rotated, tables=_TABLE),
        clipped=model_type == "olmo" and fields.config.get("clip_qkv") is not None,
        dropout=common.number(fields, "attention_dropout", variant.attention_dropout),
    )  # fmt: skip
    mlp = Mlp(
        "mlp",
        dims.hidden,
        inner,
        common.act_of(fields, variant.act),
        variant.mlp_names,
        variant.fused,
        mlp_bias,
    )
    behind = common.number(fields, *variant.dropout)
    dropouts = (behind * variant.dropped[0], behind * variant.dropped[1])
    norms = tuple(Norm(name, dims.hidden, variant.norm) for name in names)

    def layer(table: str | None) -> Layer:
        rope = replace(attention.rope, tables=table) if attention.rope and table else None
        own = replace(attention, rope=rope)
        made = layer_of(flow, own, mlp, norms, dropouts)
        return made if variant.extra is None else variant.extra(own, mlp, made)

    read = _tables_read(fields, model_type, variant, kinds, window)
    made = {table: layer(table) for table in dict.fromkeys(read)}
    return tuple(made[table] for table in read)


def _tables_read(
    fields: Fields, model_type: str, variant: Variant, kinds: tuple[str, ...], window: int | None
) -> tuple[str | None, ...]:
    """Per layer the table of rotary frequencies it reads, None: no rotary embedding."""
    if model_type == "olmo3":
        return tuple(f"{_TABLE}{kind}_" for kind in kinds)
    if variant.roped == "listed":
        return tuple(_TABLE if rotated else None for rotated in _rotated(fields, len(kinds)))
    if variant.roped == "all" or (variant.roped == "windowed" and window is None):
        return (_TABLE,) * len(kinds)
    return tuple(_TABLE if kind == "sliding_attention" else None for kind in kinds)


def _qk_norms(
    fields: Fields, model_type: str, variant: Variant, dims: Heads
) -> tuple[Norm | None, Norm | None]:
    """Of each head, of all of them, or, where the file asks for it, a LayerNorm."""
    names, kind, each = variant.qk_norm_names, variant.norm, False
    own = model_type == "cohere" and fields.boolean("use_qk_norm", False)  # Command R+: a weight for each head
    if fields.boolean("qk_layernorm", model_type == "persimmon"):
        if model_type not in ("stablelm", "phi", "persimmon"):
            raise UnsupportedArchitecture(f"is not known for {model_type}", field="qk_layernorm")
        names, each = ("q_layernorm", "k_layernorm"), model_type == "stablelm"
        kind = "layer-weight" if each else "layer"  # StableLM: a LayerNorm without bias for each head
    elif variant.qk_norm == "none" and not own:
        return None, None
    q_norm, k_norm = (
        Norm(name, count * dims.head_size, kind) if variant.qk_norm == "full"
        else Norm(name, dims.head_size, kind, count, each, own)
        for name, count in zip(names, (dims.heads, dims.kv_heads), strict=True)
    )  # fmt: skip
    return q_norm, k_norm


def _kinds(
    fields: Fields, model_type: str, variant: Variant, layers: int
) -> tuple[tuple[str, ...], int | None]:
    """Which layers slide, by the model's own rule, and the window."""
    full = ("full_attention",) * layers
    if variant.window == "none":
        if model_type == "hunyuan_v1_dense":
            fields.layer_types(layers)
        return full, None
    window = common.window_of(fields)
    if variant.window == "always":
        # every layer, unless the field is null; absent means MistralConfig's default of 4096
        if "sliding_window" not in fields.config and model_type == "mistral":
            window = 4096
        return (full if window is None else ("sliding_attention",) * layers), window
    if variant.window == "layer_types":
        return _listed_kinds(fields, model_type, layers, window)
    return common.kinds_of(fields, "qwen", layers)


# When the file lists no layer_types: every n-th layer is full (n, as in the config classes), and the
# window when the file has none.
_PATTERNS = {"exaone4": (4, 4096), "olmo3": (4, 4096), "cohere2": (4, 4096)}


def _without_rope(fields: Fields, layers: int, window: int | None) -> tuple[str, ...]:
    """SmolLM3 without layer_types: layers without rotary embedding slide, where any do."""
    if window is None or not fields.boolean("use_sliding_window", False):
        return ("full_attention",) * layers
    return tuple("full_attention" if r else "sliding_attention" for r in _rotated(fields, layers))


def _rotated(fields: Fields, layers: int) -> tuple[bool, ...]:
    every = fields.integer("no_rope_layer_interval", 4, limit="layers")
    stated = fields.raw("no_rope_layers")
    if isinstance(stated, list) and len(stated) > layers:  # of a model with more layers: read by their numbers
        fields.config = {**fields.config, "no_rope_layers": stated[:layers]}
    listed = fields.listed("no_rope_layers", layers, {1: True, 0: False})
    return tuple((i + 1) % every != 0 for i in range(layers)) if listed is None else listed


def _listed_kinds(
    fields: Fields, model_type: str, layers: int, window: int | None
) -> tuple[tuple[str, ...], int | None]:
    kinds = fields.layer_types(layers)
    if model_type not in _PATTERNS:
        return kinds or _without_rope(fields, layers, window), window
    every, default = _PATTERNS[model_type]
    if "sliding_window" not in fields.config:
        window = default
    if kinds is None:
        stated = fields.config.get("sliding_window_pattern", every)
        if isinstance(stated, str) and set(stated) <= {"L", "G"} and stated:  # EXAONE 4: LLLG
            kinds = tuple(
                "sliding_attention" if stated[i % len(stated)] == "L" and i != layers - 1 else "full_attention"
                for i in range(layers)
            )
        elif isinstance(stated, int) and not isinstance(stated, bool) and stated > 0:
            kinds = tuple("sliding_attention" if (i + 1) % stated else "full_attention" for i in range(layers))
        else:
            raise ConfigError(f"{shown(stated)} is not a pattern", field="sliding_window_pattern")
        if window is None:
            kinds = ("full_attention",) * layers
    return kinds, window


_GGUF_NORMS = {"ffn_norm": "post_attention_layernorm"}
# Hunyuan's first class also made mixtures of experts, MLA and vision towers; the text models of these two types
# carry its fields (Hunyuan-MT, HY-MT), their classes in transformers build none of it. Not its kv_lora_rank:
# vLLM takes a model with one for MLA (model_executor/models/transformers/base.py).
HUNYUAN_LEFTOVERS: dict[str, Values] = {
    "anyres_pooling_size": (), "anyres_vit_max_image_size": (), "attention_head_dim": "head_dim",
    "cla_share_factor": (), "moe_drop_tokens": (), "moe_random_routing_dropped_token": (),
    "norm_type": ("rms",), "num_media_embeds": (), "org_vocab_size": (), "use_qk_norm": (True,),
    "vit_input_resolution": (), "vit_norm_type": (), "vit_token": (),
}  # fmt: skip
FAMILIES = {
    "llama": Family(
        _granite("LlamaForCausalLM").build,
        lora=QV, ia3=("k_proj", "v_proj", "down_proj"), hf="served", vllm=LORA_ON_VOCABULARY,
        gguf=InGGUF("llama", "LlamaForCausalLM", _GGUF_NORMS, rotary_head=True, bias=True),
    ),
    "mistral": Family(
        Variant("MistralForCausalLM", window="always").build,
        absent={"num_key_value_heads": 8}, lora=QV, ia3=("k_proj", "v_proj", "down_proj"), hf="served",
    ),
    # num_key_value_heads defaults to 32 in Qwen's config classes, not to num_attention_heads
    "qwen2": Family(
        Variant("Qwen2ForCausalLM", True, window="qwen").build,
        absent={"num_key_value_heads": 32}, lora=QV, ia3=QV_DOWN, hf="served",
        gguf=InGGUF("qwen2", "Qwen2ForCausalLM", _GGUF_NORMS),
    ),
    "qwen3": Family(
        Variant("Qwen3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head", window="qwen").build,
        absent={"num_key_value_heads": 32, "head_dim": 128}, lora=QV, ia3=QV_DOWN, hf="served",
        vllm=LORA_ON_VOCABULARY, gguf=InGGUF("qwen3", "Qwen3ForCausalLM", _GGUF_NORMS, bias=True),
    ),
    "granite": Family(_granite("GraniteForCausalLM").build, hf="served", vllm=LORA_ON_VOCABULARY),
    "helium": Family(
        Variant(
            "HeliumForCausalLM", _ATTENTION_BIAS, mlp_bias=("mlp_bias", False), norm="rms-cast", rope="helium",
        ).build,
        absent={"num_key_value_heads": 20, "head_dim": 128}, hf="served",
    ),
    "smollm3": Family(
        Variant(
            "SmolLM3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), tied=True,
            window="layer_types", roped="listed",
            ignored=("no_rope_layers", "no_rope_layer_interval", "use_sliding_window"),
        ).build,
        absent={"num_key_value_heads": 4}, hf="served",
        leftovers={"max_window_layers": ()},  # SmolLM3-3B; its class goes by layer_types alone
    ),
    "seed_oss": Family(
        Variant(
            "SeedOssForCausalLM", ("attention_bias", True), ("attention_out_bias", False), ("mlp_bias", False),
            attention_dropout=0.1, dropout=("residual_dropout", 0.1),
        ).build,
        absent={"num_key_value_heads": 8, "head_dim": 128}, hf="served",
    ),
    "glm": Family(
        Variant(
            "GlmForCausalLM", ("attention_bias", True), mlp_names=_FUSED, fused=True, rotary_share=0.5,
            rope="glm",
        ).build,
        absent={"num_key_value_heads": 2, "head_dim": 128}, hf="served",
    ),
    "glm4": Family(
        Variant(
            "Glm4ForCausalLM", ("attention_bias", True), mlp_names=_FUSED, fused=True, flow="sandwich",
            norms=(
                "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
            ),
            rotary_share=0.5, rope="glm",
        ).build,
        absent={"num_key_value_heads": 2, "head_dim": 128}, hf="served",
    ),
    "ernie4_5": Family(
        Variant(
            "Ernie4_5ForCausalLM", ("use_bias", False), ("use_bias", False), ("use_bias", False), tied=True,
            rope="ernie",
        ).build,
        absent={"num_key_value_heads": 2, "head_dim": 128}, hf="served",
    ),
    "exaone4": Family(
        Variant(
            "Exaone4ForCausalLM", qk_norm="head", flow="post", norms=_POST_NORMS, window="layer_types",
            roped="windowed", ignored=("sliding_window_pattern",),
        ).build,
        absent={"num_key_value_heads": 32}, hf="served", vllm=LORA_ON_VOCABULARY,
    ),
    "olmo": Family(
        Variant(
            "OlmoForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, norm="layer-none", rope="olmo",
            ignored=("clip_qkv",),
        ).build,
        hf="served",
    ),
    "olmo2": Family(
        Variant(
            "Olmo2ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="full", flow="post",
            norms=_POST_NORMS, norm="rms-wide", rope="olmo",
        ).build,
        hf="served",
    ),
    "olmo3": Family(
        Variant(
            "Olmo3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="full", flow="post",
            norms=_POST_NORMS, norm="rms-wide", rope="olmo", window="layer_types",
        ).build,
        hf="served",
    ),
    "arcee": Family(
        Variant(
            "ArceeForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), mlp_names=_PLAIN,
            act="relu2",
        ).build,
        hf="served",
    ),
    "apertus": Family(
        Variant(
            "ApertusForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head", mlp_names=_PLAIN,
            act="xielu", norms=("attention_layernorm", "feedforward_layernorm"), extra=_apertus,
        ).build,
        hf="served", vllm=LORA_ON_VOCABULARY,
    ),
    "bitnet": Family(
        Variant("BitNetForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, act="relu2", extra=_bitnet).build,
        absent={"num_key_value_heads": 5}, hf="served",
    ),
    "cohere": Family(
        Variant(
            "CohereForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, flow="parallel", norms=("input_layernorm",),
            norm="layer-written", rope="cohere", tied=True, ignored=("logit_scale",),
        ).build,
        hf="served", vllm=InVLLM(lora_vocabulary=1),
    ),
    "cohere2": Family(
        Variant(
            "Cohere2ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, flow="parallel", norms=("input_layernorm",),
            norm="layer-written", rope="cohere", roped="sliding", tied=True, window="layer_types",
            ignored=("logit_scale", "sliding_window_pattern", "head_dim"),
        ).build,
        leftovers={  # Command R7B, from before sliding_window_pattern; one norm, MLP and attention are added
            "layer_switch": "sliding_window_pattern", "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",), "use_parallel_block": (True,),
        },
        hf="served", vllm=InVLLM(lora_vocabulary=1),
    ),
    "diffllama": Family(
        Variant("DiffLlamaForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, extra=_diffllama, taped=False).build,
        hf="two attentions",
    ),
    "doge": Family(
        Variant(
            "DogeForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), qk_norm="head",
            extra=_doge, dropout=("hidden_dropout", 0.0),
            ignored=("keep_window_size", "num_experts", "num_experts_per_tok"), taped=False,
        ).build,
        hf="served",
    ),
    "hunyuan_v1_dense": Family(
        Variant(
            "HunYuanDenseV1ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head", normed_last=True,
            qk_norm_names=("query_layernorm", "key_layernorm"),
        ).build,
        leftovers={
            **HUNYUAN_LEFTOVERS, "moe_intermediate_size": (), "moe_layer_num_skipped": (), "moe_topk": (),
            "num_experts": (1,), "num_shared_expert": (),
        },
        hf="served",
    ),
    "starcoder2": Family(
        Variant(
            "Starcoder2ForCausalLM", ("use_bias", True), ("use_bias", True), ("use_bias", True),
            mlp_names=("c_fc", "c_proj"), act="gelu_pytorch_tanh", norm="layer", tied=True, window="always",
            dropout=("residual_dropout", 0.0), embedding_dropout="embedding_dropout",
        ).build,
        absent={"num_key_value_heads": 2}, leftovers={"norm_type": ("layer_norm",)}, hf="served",
    ),
    "stablelm": Family(
        Variant(
            "StableLmForCausalLM", ("use_qkv_bias", False), norm="layer", rotary_share=0.25, rope="joined",
            dropout=("hidden_dropout", 0.0), dropped=(False, True),
        ).build,
        absent={"num_key_value_heads": 32}, hf="keywords lost",
    ),
    "persimmon": Family(
        Variant(
            "PersimmonForCausalLM", True, True, True, qkv="query_key_value", out="dense",
            mlp_names=("dense_h_to_4h", "dense_4h_to_h"), act="relu2", norm="layer",
            final="model.final_layernorm", rotary_share=0.5, rope="joined", dropout=("hidden_dropout", 0.0),
            dropped=(False, True),
        ).build,
        hf="served",
    ),
    "phi": Family(
        Variant(
            "PhiForCausalLM", True, True, True, out="dense", mlp_names=("fc1", "fc2"), act="gelu_new",
            flow="parallel", norms=("input_layernorm",), norm="layer", final="model.final_layernorm",
            head_bias=True, rotary_share=0.5, rope="joined", dropout=("resid_pdrop", 0.0),
            embedding_dropout="embd_pdrop",
        ).build,
        lora=("q_proj", "v_proj", "fc1", "fc2"), hf="served",
    ),
    "phi3": Family(
        Variant(
            "Phi3ForCausalLM", qkv="qkv_proj", mlp_names=_FUSED, fused=True, rope="joined", window="always",
            dropout=("resid_pdrop", 0.0), ignored=("original_max_position_embeddings", "attention_bias"),
        ).build,
        leftovers={"full_attn_mod": (1,)}, hf="served",  # Phi-4-mini: every layer is full
    ),
    "nemotron": Family(
        Variant(
            "NemotronForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), mlp_names=_PLAIN,
            act="relu2", norm="layer-one", rotary_share=0.5, rope="joined",
        ).build,
        hf="keywords lost", vllm=LORA_ON_VOCABULARY,
    ),
    "jais2": Family(
        Variant(
            "Jais2ForCausalLM", ("attention_bias", True), ("attention_bias", True), ("mlp_bias", True),
            mlp_names=_PLAIN, act="relu2", norm="layer",
        ).build,
        hf="served",
    ),
    "internlm3": Family(
        _internlm3, aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        absent={"num_key_value_heads": 2, "head_dim": 128}, first_class="InternLM3ForCausalLM",
    ),
    "iquestcoder": Family(
        _iquestcoder, absent={"num_key_value_heads": 8, "head_dim": 128},
        first_class="IQuestCoderForCausalLM",
    ),
    # Remote code of the hub repositories; the shapes are Llama's
    "xverse": Family(Variant("XverseForCausalLM", ignored=("max_tokenizer_truncation",), taped=False).build),
    "baichuan": Family(
        Variant(
            "BaichuanForCausalLM", qkv="W_pack", ignored=("model_max_length", "z_loss_weight"), taped=False,
        ).build,
    ),
}  # fmt: skip
