"""Llama and the families with its skeleton: Mistral, Qwen2, Qwen3.

Pre-norm decoder with RMSNorm, rotary embedding and a gated MLP. Shapes after transformers 5.19
(models/{llama,mistral,qwen2,qwen3}/modeling_*.py); defaults of absent fields after configuration_*.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.planner.architecture import Architecture, Rotary, TensorSpec
from tonnage.planner.families import common
from tonnage.planner.fields import Fields


@dataclass(frozen=True, slots=True)
class _Variant:
    """How a family differs from Llama."""

    class_name: str
    qkv_bias: bool | None  # None: attention_bias decides
    out_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool = False
    head_dim_default: int | None = None
    kv_default: int | None = None


_VARIANTS = {
    "llama": _Variant("LlamaForCausalLM", None, None, None),
    "mistral": _Variant("MistralForCausalLM", False, False, False, kv_default=8),
    # num_key_value_heads defaults to 32 in Qwen's config classes, not to num_attention_heads
    "qwen2": _Variant("Qwen2ForCausalLM", True, False, False, kv_default=32),
    "qwen3": _Variant("Qwen3ForCausalLM", None, None, False, qk_norm=True, head_dim_default=128, kv_default=32),
}


def build(fields: Fields, model_type: str) -> Architecture:
    variant = _VARIANTS[model_type]
    hidden, heads, kv_heads, head_size = common.geometry(fields, kv_default=_kv_default(fields, variant))
    if fields.raw("head_dim") is None and variant.head_dim_default is not None:
        head_size = variant.head_dim_default
    if model_type == "qwen2":
        # Qwen2Config has no head_dim field but the model reads one when the file has it
        fields.ignore("head_dim")
    if variant.qkv_bias is None:
        qkv_bias = out_bias = fields.boolean("attention_bias", False)
    else:
        qkv_bias, out_bias = variant.qkv_bias, bool(variant.out_bias)
    mlp_bias = fields.boolean("mlp_bias", False) if variant.mlp_bias is None else variant.mlp_bias
    inner = fields.integer("intermediate_size", limit="width")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    rotary = Rotary(head_size, 1)
    _, factor = common.read_rope(fields)
    tied = fields.boolean("tie_word_embeddings", False)
    kinds, window = _kinds(fields, model_type, layers)

    def tensors() -> Iterator[TensorSpec]:
        yield common.embedding("model.embed_tokens", vocab, hidden)
        for i in range(layers):
            at = f"model.layers.{i}"
            for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
                module = f"{at}.self_attn.{name}"
                yield from common.linear(module, rows * head_size, hidden, "attention", i, qkv_bias)
            module = f"{at}.self_attn.o_proj"
            yield from common.linear(module, hidden, heads * head_size, "attention", i, out_bias)
            if variant.qk_norm:
                yield common.rms_norm(f"{at}.self_attn.q_norm", head_size, i)
                yield common.rms_norm(f"{at}.self_attn.k_norm", head_size, i)
            yield from common.linear(f"{at}.mlp.gate_proj", inner, hidden, "mlp", i, mlp_bias)
            yield from common.linear(f"{at}.mlp.up_proj", inner, hidden, "mlp", i, mlp_bias)
            yield from common.linear(f"{at}.mlp.down_proj", hidden, inner, "mlp", i, mlp_bias)
            yield common.rms_norm(f"{at}.input_layernorm", hidden, i)
            yield common.rms_norm(f"{at}.post_attention_layernorm", hidden, i)
        yield common.rms_norm("model.norm", hidden, None)
        yield common.lm_head(vocab, hidden, "model.embed_tokens.weight" if tied else None)
        yield from common.rotary_buffers(rotary, ("model.rotary_emb.",))

    return Architecture(
        model_type=model_type,
        class_name=variant.class_name,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab,
        max_model_len=int(fields.integer("max_position_embeddings", limit="positions") * factor),
        tensors=tuple(tensors()),
        cache_layers=common.cache_layers(kinds, window, kv_heads, head_size),
        rotary=rotary,
        position_field="max_position_embeddings",
    )


def _kv_default(fields: Fields, variant: _Variant) -> int | None:
    """An explicit null means num_attention_heads; an absent field means the config class's default."""
    return variant.kv_default if "num_key_value_heads" not in fields.config else None


def _kinds(fields: Fields, model_type: str, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Which layers slide, by the model's own rule, and the window."""
    full = ("full_attention",) * layers
    if model_type == "llama":
        return full, None
    window = common.window_of(fields)
    if model_type == "mistral":
        # every layer, unless the field is null; absent means MistralConfig's default of 4096
        if "sliding_window" not in fields.config:
            window = 4096
        return (full if window is None else ("sliding_attention",) * layers), window
    used = fields.boolean("use_sliding_window", False)
    first_sliding = fields.integer("max_window_layers", 28, limit="layers", minimum=0)
    if "sliding_window" not in fields.config:
        window = 4096
    if not used:
        window = None
    kinds = fields.layer_types(layers)
    if kinds is None:
        # the layers from max_window_layers on slide (configuration_qwen2.py); the first ones are full
        kinds = tuple(
            "sliding_attention" if window is not None and i >= first_sliding else "full_attention"
            for i in range(layers)
        )
    return kinds, window
