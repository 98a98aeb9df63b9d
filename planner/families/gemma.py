"""Gemma 1, 2 and 3 (text), VaultGemma. Shapes after transformers 5.19, models/{gemma,gemma2,gemma3}/.

Gemma 2 and 3 put four norms into a layer; Gemma 3 adds q and k norms and a second rotary table. The
multimodal Gemma 3 is in multimodal.py.
"""

from __future__ import annotations

from typing import Any

from tonnage.planner.architecture import Architecture, Rotary
from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.common import Heads, Tensors
from tonnage.planner.fields import Fields, shown
from tonnage.planner.records import dataclass


@dataclass(frozen=True, slots=True)
class _Variant:
    class_name: str
    defaults: dict[str, Any]
    four_norms: bool
    qk_norm: bool


_VARIANTS = {
    "gemma": _Variant(
        "GemmaForCausalLM",
        {
            "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192,
        },
        four_norms=False,
        qk_norm=False,
    ),
    "gemma2": _Variant(
        "Gemma2ForCausalLM",
        {
            "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
        },
        four_norms=True,
        qk_norm=False,
    ),
    "gemma3_text": _Variant(
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
        },
        four_norms=True,
        qk_norm=True,
    ),
    "vaultgemma": _Variant(
        "VaultGemmaForCausalLM",
        {
            "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
        },
        four_norms=False,
        qk_norm=False,
    ),
}  # fmt: skip
_HEAD_DIM = 256  # head_dim of all three config classes when the file has none; never hidden / heads
_WINDOW = 4096  # sliding_window of Gemma2Config and Gemma3TextConfig when the file has none


def build(fields: Fields, model_type: str) -> Architecture:
    variant = _VARIANTS[model_type]
    default = variant.defaults

    def integer(field: str, limit: str) -> int:
        return fields.integer(field, default[field], limit=limit)

    hidden, layers = integer("hidden_size", "width"), integer("num_hidden_layers", "layers")
    heads, kv_heads = integer("num_attention_heads", "heads"), integer("num_key_value_heads", "heads")
    common.divisible(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    common.divisible(hidden, heads, "hidden_size", "num_attention_heads")  # required by the config class
    head_size = fields.integer("head_dim", _HEAD_DIM, limit="width")
    inner, vocab = integer("intermediate_size", "width"), integer("vocab_size", "vocab")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore(
        "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "cache_implementation"
    )
    kinds, window = _kinds(fields, model_type, layers)
    prefixes, factor = _rotary(fields, model_type, kinds)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model_type == "vaultgemma":
        norms = ["input_layernorm", "pre_feedforward_layernorm"]
    if variant.four_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]

    dims = Heads(hidden, heads, kv_heads, head_size)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    # the scalar sqrt(hidden_size) the embedding is multiplied by, in the model's dtype
    t.buffer("model.embed_tokens.embed_scale", (), "ScaledWordEmbedding", None)
    for _, at in t.layers(layers, "model.layers"):
        qk_norm = "head" if variant.qk_norm else "none"
        t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias, qk_norm=qk_norm)
        t.gated_mlp(f"{at}.mlp", hidden, inner)
        for name in norms:
            t.norm(f"{at}.{name}", hidden)
    t.close("model.norm", "model.embed_tokens", vocab, hidden, tied)
    t.rotary(head_size, *prefixes)
    return common.decoder(
        fields, model_type, variant.class_name, t, dims,
        common.cache_layers(kinds, window, kv_heads, head_size),
        layers=layers, inner=inner, vocab=vocab, rotary=Rotary(head_size, len(prefixes)),
        max_model_len=int(integer("max_position_embeddings", "positions") * factor),
    )  # fmt: skip


def _kinds(fields: Fields, model_type: str, layers: int) -> tuple[tuple[str, ...], int | None]:
    if model_type == "gemma":
        return ("full_attention",) * layers, None
    window = common.window_of(fields)
    if "sliding_window" not in fields.config:
        window = _WINDOW
    kinds = fields.layer_types(layers)
    pattern = 2  # Gemma 2 alternates, beginning with a sliding layer (configuration_gemma2.py)
    if model_type == "gemma3_text":
        # every sixth layer is full unless the file says otherwise (configuration_gemma3.py)
        fields.ignore("_sliding_window_pattern")
        pattern = fields.integer("sliding_window_pattern", 6, limit="layers")
        stated = fields.config.get("_sliding_window_pattern")
        if kinds is None and stated not in (None, pattern):
            raise ConfigError(
                f"{shown(stated)} contradicts sliding_window_pattern = {pattern}",
                field="_sliding_window_pattern",
            )
    if kinds is None:
        kinds = tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers))
    return kinds, window


def _rotary(fields: Fields, model_type: str, kinds: tuple[str, ...]) -> tuple[tuple[str, ...], float]:
    """Prefixes of the rotary tables and the factor on max_position_embeddings (Gemma 3 states the scaled
    length already)."""
    if model_type != "gemma3_text":
        return ("model.rotary_emb.",), common.read_rope(fields)[1]
    fields.ignore("rope_theta", "rope_local_base_freq")
    new = fields.raw("rope_parameters")
    common.rope_kind(fields.raw("rope_scaling"), "rope_scaling")
    if isinstance(new, dict):
        for kind in ("full_attention", "sliding_attention"):
            common.rope_kind(new.get(kind), f"rope_parameters.{kind}")
    elif new is not None:
        raise ConfigError(f"{shown(new)} is not an object", field="rope_parameters")
    return tuple(f"model.rotary_emb.{kind}_" for kind in dict.fromkeys(kinds)), 1.0
