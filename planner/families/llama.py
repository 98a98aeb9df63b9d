"""Dense decoders of Llama's shape: embedding, layers of attention and MLP, final norm, head.

One row of the table per family, after transformers 5.19, models/<family>/modeling_<family>.py. What a
family has beyond the common parts is a small function at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from tonnage.planner.architecture import Architecture, Rotary
from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.common import Heads, Tensors
from tonnage.planner.fields import Fields, shown
from tonnage.planner.records import dataclass

Bias = bool | tuple[str, bool]  # always | (config field, its default)
_ATTENTION_BIAS = ("attention_bias", False)


@dataclass(frozen=True, slots=True)
class Variant:
    """How a family differs from Llama."""

    class_name: str
    qkv_bias: Bias = False
    out_bias: Bias = False
    mlp_bias: Bias = False
    qk_norm: str = "none"  # none | head | full
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qkv: str | None = None  # name of the fused projection
    out: str = "o_proj"
    mlp: str = "gated"  # gated | fused (gate and up in one matrix) | plain (no gate)
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: str = "rms"  # rms | layer | layer-weight | none
    final: str = "model.norm"
    head_bias: bool = False
    tied: bool = False  # tie_word_embeddings when the file does not say
    rotary_share: float = 1.0  # partial_rotary_factor when the file does not say
    window: str = "none"  # none | always | layer_types | qwen
    ignored: tuple[str, ...] = ()
    extra: Callable[[Tensors, str, Heads, int], None] | None = None


def _granite(name: str) -> Variant:
    return Variant(name, _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False))


_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_PLAIN = ("up_proj", "down_proj")


def _bitnet(t: Tensors, at: str, dims: Heads, inner: int) -> None:
    t.norm(f"{at}.self_attn.attn_sub_norm", dims.heads * dims.head_size)
    t.norm(f"{at}.mlp.ffn_sub_norm", inner)


def _apertus(t: Tensors, at: str, dims: Heads, inner: int) -> None:
    """xIELU: two learned scalars per layer, two constants."""
    for name in ("alpha_p", "alpha_n"):
        t.add(f"{at}.mlp.act_fn.{name}", (1,), "mlp", "XIELUActivation")
    for name in ("beta", "eps"):
        t.buffer(f"{at}.mlp.act_fn.{name}", (), "XIELUActivation", None, "model")


def _diffllama(t: Tensors, at: str, dims: Heads, inner: int) -> None:
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        t.add(f"{at}.self_attn.{name}", (dims.head_size,), "attention", "DiffLlamaAttention")


def _doge(t: Tensors, at: str, dims: Heads, inner: int) -> None:
    """Dynamic mask attention and per-channel residual weights."""
    t.add(f"{at}.self_attn.A", (dims.kv_heads,), "attention", "DogeAttention", shard=0)
    bias = any(s.name == f"{at}.self_attn.q_proj.bias" for s in t.specs[-32:])  # attention_bias
    t.linear(f"{at}.self_attn.dt_proj", dims.kv_heads, dims.kv_heads * dims.head_size, bias=bias)
    for name in ("input_residual", "post_attention_residual"):
        t.add(f"{at}.{name}", (dims.hidden,), "norm", "DogeDecoderLayer")


_VARIANTS = {
    "llama": _granite("LlamaForCausalLM"),
    "mistral": Variant("MistralForCausalLM", window="always"),
    # num_key_value_heads defaults to 32 in Qwen's config classes, not to num_attention_heads
    "qwen2": Variant("Qwen2ForCausalLM", True, window="qwen"),
    "qwen3": Variant(
        "Qwen3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head", window="qwen",
    ),
    "granite": _granite("GraniteForCausalLM"),
    "helium": Variant("HeliumForCausalLM", _ATTENTION_BIAS, mlp_bias=("mlp_bias", False)),
    "smollm3": Variant(
        "SmolLM3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), tied=True,
        window="layer_types", ignored=("no_rope_layers", "no_rope_layer_interval", "use_sliding_window"),
    ),
    "seed_oss": Variant(
        "SeedOssForCausalLM", ("attention_bias", True), ("attention_out_bias", False), ("mlp_bias", False),
    ),
    "glm": Variant(
        "GlmForCausalLM", ("attention_bias", True), mlp="fused", mlp_names=("gate_up_proj", "down_proj"),
        rotary_share=0.5,
    ),
    "glm4": Variant(
        "Glm4ForCausalLM", ("attention_bias", True), mlp="fused", mlp_names=("gate_up_proj", "down_proj"),
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        rotary_share=0.5,
    ),
    "ernie4_5": Variant(
        "Ernie4_5ForCausalLM", ("use_bias", False), ("use_bias", False), ("use_bias", False), tied=True,
    ),
    "exaone4": Variant(
        "Exaone4ForCausalLM", qk_norm="head", norms=_POST_NORMS, window="layer_types",
        ignored=("sliding_window_pattern",),
    ),
    "olmo": Variant("OlmoForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, norm="none", ignored=("clip_qkv",)),
    "olmo2": Variant("Olmo2ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="full", norms=_POST_NORMS),
    "olmo3": Variant(
        "Olmo3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="full", norms=_POST_NORMS,
        window="layer_types",
    ),
    "arcee": Variant(
        "ArceeForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), mlp="plain", mlp_names=_PLAIN
    ),
    "apertus": Variant(
        "ApertusForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head", mlp="plain", mlp_names=_PLAIN,
        norms=("attention_layernorm", "feedforward_layernorm"), extra=_apertus,
    ),
    "bitnet": Variant("BitNetForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, extra=_bitnet),
    "cohere": Variant(
        "CohereForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, norms=("input_layernorm",), norm="layer-weight",
        tied=True, ignored=("logit_scale",),
    ),
    "cohere2": Variant(
        "Cohere2ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, norms=("input_layernorm",), norm="layer-weight",
        tied=True, window="layer_types", ignored=("logit_scale", "sliding_window_pattern", "head_dim"),
    ),
    "diffllama": Variant("DiffLlamaForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, extra=_diffllama),
    "doge": Variant(
        "DogeForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), qk_norm="head", extra=_doge,
        ignored=("keep_window_size", "num_experts", "num_experts_per_tok"),
    ),
    "hunyuan_v1_dense": Variant(
        "HunYuanDenseV1ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head",
        qk_norm_names=("query_layernorm", "key_layernorm"),
    ),
    "starcoder2": Variant(
        "Starcoder2ForCausalLM", ("use_bias", True), ("use_bias", True), ("use_bias", True), mlp="plain",
        mlp_names=("c_fc", "c_proj"), norm="layer", tied=True, window="always",
    ),
    "stablelm": Variant(
        "StableLmForCausalLM", ("use_qkv_bias", False), norm="layer", rotary_share=0.25,
    ),
    "persimmon": Variant(
        "PersimmonForCausalLM", True, True, True, qkv="query_key_value", out="dense", mlp="plain",
        mlp_names=("dense_h_to_4h", "dense_4h_to_h"), norm="layer", final="model.final_layernorm",
        rotary_share=0.5,
    ),
    "phi": Variant(
        "PhiForCausalLM", True, True, True, out="dense", mlp="plain", mlp_names=("fc1", "fc2"),
        norms=("input_layernorm",), norm="layer", final="model.final_layernorm", head_bias=True,
        rotary_share=0.5,
    ),
    "phi3": Variant(
        "Phi3ForCausalLM", qkv="qkv_proj", mlp="fused", mlp_names=("gate_up_proj", "down_proj"),
        window="always", ignored=("original_max_position_embeddings", "attention_bias"),
    ),
    "nemotron": Variant(
        "NemotronForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), mlp="plain",
        mlp_names=_PLAIN, norm="layer", rotary_share=0.5,
    ),
    # Remote code of the hub repositories; the shapes are Llama's
    "xverse": Variant("XverseForCausalLM", ignored=("max_tokenizer_truncation",)),
    "baichuan": Variant(
        "BaichuanForCausalLM", qkv="W_pack", ignored=("model_max_length", "z_loss_weight"),
    ),
}  # fmt: skip


def build(fields: Fields, model_type: str) -> Architecture:
    variant = _VARIANTS[model_type]
    if model_type == "qwen2":
        # Qwen2Config has no head_dim field but the model reads one when the file has it
        fields.ignore("head_dim")
    dims = common.heads_of(fields)
    if model_type == "helium" and dims.heads * dims.head_size != dims.hidden:
        raise ConfigError(f"{dims.heads} heads of it are not hidden_size = {dims.hidden}", field="head_dim")
    if fields.boolean("is_moe", False):
        raise UnsupportedArchitecture("Doge's product-key experts are not planned", field="is_moe")
    fields.ignore(*variant.ignored)
    qkv_bias, out_bias, mlp_bias = (
        common.bias_of(fields, rule) for rule in (variant.qkv_bias, variant.out_bias, variant.mlp_bias)
    )
    inner = fields.integer("intermediate_size", limit="width")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    tied = fields.boolean("tie_word_embeddings", variant.tied)
    kinds, window = _kinds(fields, model_type, variant, layers)
    share = common.rotary_share(fields, variant.rotary_share)
    rotary = Rotary(int(dims.head_size * share), 1)
    norms = _norms(fields, model_type, variant)
    qk_layernorm = fields.boolean("qk_layernorm", model_type == "persimmon")

    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    for _, at in t.layers(layers, "model.layers"):
        if variant.qkv is not None:
            t.fused_attention(
                f"{at}.self_attn", dims, qkv=variant.qkv, out=variant.out, bias=qkv_bias, out_bias=out_bias
            )
        else:
            t.attention(
                f"{at}.self_attn", dims, bias=qkv_bias, out_bias=out_bias, out=variant.out,
                qk_norm=variant.qk_norm, norm_names=variant.qk_norm_names,
            )  # fmt: skip
        if qk_layernorm:
            _qk_layernorm(t, f"{at}.self_attn", model_type, dims)
        if variant.mlp == "gated":
            gate, up, down = variant.mlp_names
            t.gated_mlp(f"{at}.mlp", dims.hidden, inner, bias=mlp_bias, names=(gate, up, down))
        else:
            first, second = variant.mlp_names
            t.plain_mlp(
                f"{at}.mlp", dims.hidden, inner, bias=mlp_bias, names=(first, second),
                fused_gate=variant.mlp == "fused",
            )  # fmt: skip
        if variant.extra is not None:
            variant.extra(t, at, dims, inner)
        for name in norms:
            t.norm(f"{at}.{name}", dims.hidden, variant.norm)
    t.norm(variant.final, dims.hidden, variant.norm)
    t.head("lm_head", vocab, dims.hidden, "model.embed_tokens.weight" if tied else None, variant.head_bias)
    if model_type == "olmo3":
        names = dict.fromkeys(kinds)
        t.rotary(rotary.dim, *(f"model.rotary_emb.{kind}_" for kind in names))
        rotary = Rotary(rotary.dim, len(names))
    else:
        t.rotary(rotary.dim, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, variant.class_name, t, dims,
        common.cache_layers(kinds, window, dims.kv_heads, dims.head_size),
        layers=layers, inner=inner, vocab=vocab, rotary=rotary, gated=variant.mlp != "plain",
    )  # fmt: skip


def _norms(fields: Fields, model_type: str, variant: Variant) -> tuple[str, ...]:
    """StableLM's parallel residual has one norm per layer."""
    if model_type == "stablelm" and fields.boolean("use_parallel_residual", False):
        return variant.norms[:1]
    return variant.norms


def _qk_layernorm(t: Tensors, at: str, model_type: str, dims: Heads) -> None:
    if model_type == "stablelm":  # a LayerNorm without bias for each head
        for name, count in (("q_layernorm", dims.heads), ("k_layernorm", dims.kv_heads)):
            for head in range(count):
                t.norm(f"{at}.{name}.norms.{head}", dims.head_size, "layer-weight")
    elif model_type in ("phi", "persimmon"):
        t.norm(f"{at}.q_layernorm", dims.head_size, "layer")
        t.norm(f"{at}.k_layernorm", dims.head_size, "layer")
    else:
        raise UnsupportedArchitecture(f"is not known for {model_type}", field="qk_layernorm")


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
    every = fields.integer("no_rope_layer_interval", 4, limit="layers")
    rotary = fields.listed("no_rope_layers", layers, {1: True, 0: False})
    if rotary is None:
        rotary = tuple((i + 1) % every != 0 for i in range(layers))
    return tuple("full_attention" if r else "sliding_attention" for r in rotary)


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
