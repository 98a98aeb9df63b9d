"""Falcon: multi-query (7B), new_decoder_architecture (40B, 180B) and the old multi-head one.

Shapes after transformers 5.19, models/falcon/. Its linear layers are of the class FalconLinear, which
bitsandbytes' replacement does not touch (integrations/bitsandbytes.py: ``type(module) is nn.Linear``).
"""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.planner.architecture import Architecture, CacheLayer, Rotary, TensorSpec
from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.fields import Fields, shown

_LINEAR = "FalconLinear"


def build(fields: Fields, model_type: str) -> Architecture:
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, fields.name("hidden_size"), fields.name("num_attention_heads"))
    head_size = hidden // heads
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    new = fields.boolean("new_decoder_architecture", False)
    multi_query = fields.boolean("multi_query", True)
    parallel = fields.boolean("parallel_attn", True)
    bias = fields.boolean("bias", False)
    alibi = fields.boolean("alibi", False)
    inner = fields.integer("ffn_hidden_size", 4 * hidden, limit="width")
    tied = fields.boolean("tie_word_embeddings", True)
    stated = fields.optional_integer("num_kv_heads", limit="heads")
    if new:
        kv_heads = stated or heads
        common.divisible(heads, kv_heads, "num_attention_heads", "num_kv_heads")
    else:
        kv_heads = 1 if multi_query else heads  # num_kv_heads is not read
    qkv_rows = (heads + 2 * kv_heads) * head_size
    norms = _norms(fields, new, parallel)
    rotary = Rotary(head_size, 1)
    _, factor = common.read_rope(fields)
    fields.ignore("apply_residual_connection_post_layernorm")

    def tensors() -> Iterator[TensorSpec]:
        yield common.embedding("transformer.word_embeddings", vocab, hidden)
        for i in range(layers):
            at = f"transformer.h.{i}"
            attention = (("query_key_value", qkv_rows, hidden), ("dense", hidden, hidden))
            for name, out, into in attention:
                module = f"{at}.self_attention.{name}"
                yield from common.linear(module, out, into, "attention", i, bias, _LINEAR)
            for name, out, into in (("dense_h_to_4h", inner, hidden), ("dense_4h_to_h", hidden, inner)):
                yield from common.linear(f"{at}.mlp.{name}", out, into, "mlp", i, bias, _LINEAR)
            for name in norms:
                yield from common.layer_norm(f"{at}.{name}", hidden, i)
        yield from common.layer_norm("transformer.ln_f", hidden, None)
        yield common.lm_head(vocab, hidden, "transformer.word_embeddings.weight" if tied else None)
        # built even where alibi takes its place
        yield from common.rotary_buffers(rotary, ("transformer.rotary_emb.",))

    return Architecture(
        model_type=model_type,
        class_name="FalconForCausalLM",
        layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab,
        max_model_len=int(fields.integer("max_position_embeddings", 2048, limit="positions") * factor),
        tensors=tuple(tensors()),
        # transformers repeats K and V to all heads before it stores them in the new architecture
        cache_layers=tuple(
            CacheLayer(i, "full", None, kv_heads, head_size, heads if new else None) for i in range(layers)
        ),
        rotary=None if alibi else rotary,
        position_field="max_position_embeddings",
        gated_mlp=False,
    )


def _norms(fields: Fields, new: bool, parallel: bool) -> tuple[str, ...]:
    count = fields.raw("num_ln_in_parallel_attn")
    if count is not None and (isinstance(count, bool) or count not in (1, 2)):
        raise ConfigError(f"{shown(count)} is not 1 or 2", field="num_ln_in_parallel_attn")
    if not parallel:
        if new:
            raise ConfigError(
                "false contradicts new_decoder_architecture, which is always parallel", field="parallel_attn"
            )
        return ("post_attention_layernorm", "input_layernorm")
    if (count or (2 if new else 1)) == 2:
        return ("ln_attn", "ln_mlp")
    return ("input_layernorm",)
