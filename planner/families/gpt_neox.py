"""GPT-NeoX (Pythia, RedPajama-INCITE). Shapes after transformers 5.19, models/gpt_neox/."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.planner.architecture import Architecture, Rotary, TensorSpec
from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.fields import Fields, shown


def build(fields: Fields, model_type: str) -> Architecture:
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, "hidden_size", "num_attention_heads")
    head_size = hidden // heads
    inner = fields.integer("intermediate_size", limit="width")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    bias = fields.boolean("attention_bias", True)
    tied = fields.boolean("tie_word_embeddings", False)
    fields.ignore("use_parallel_residual", "rotary_emb_base", "is_decoder", "classifier_dropout")
    rotary = Rotary(_rotary_dim(fields, head_size), 1)
    _, factor = common.read_rope(fields)

    def tensors() -> Iterator[TensorSpec]:
        yield common.embedding("gpt_neox.embed_in", vocab, hidden)
        for i in range(layers):
            at = f"gpt_neox.layers.{i}"
            yield from common.linear(
                f"{at}.attention.query_key_value", 3 * hidden, hidden, "attention", i, bias
            )
            yield from common.linear(f"{at}.attention.dense", hidden, hidden, "attention", i, bias)
            yield from common.linear(f"{at}.mlp.dense_h_to_4h", inner, hidden, "mlp", i, True)
            yield from common.linear(f"{at}.mlp.dense_4h_to_h", hidden, inner, "mlp", i, True)
            yield from common.layer_norm(f"{at}.input_layernorm", hidden, i)
            yield from common.layer_norm(f"{at}.post_attention_layernorm", hidden, i)
        yield from common.layer_norm("gpt_neox.final_layer_norm", hidden, None)
        yield common.lm_head(vocab, hidden, "gpt_neox.embed_in.weight" if tied else None)
        yield from common.rotary_buffers(rotary, ("gpt_neox.rotary_emb.",))

    return Architecture(
        model_type=model_type,
        class_name="GPTNeoXForCausalLM",
        layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads,
        kv_heads=heads,
        head_size=head_size,
        vocab_size=vocab,
        max_model_len=int(fields.integer("max_position_embeddings", limit="positions") * factor),
        tensors=tuple(tensors()),
        cache_layers=common.cache_layers(("full_attention",) * layers, None, heads, head_size),
        rotary=rotary,
        position_field="max_position_embeddings",
        gated_mlp=False,
    )


def _rotary_dim(fields: Fields, head_size: int) -> int:
    """Only ``rotary_pct`` of each head is rotated (0.25 when absent)."""
    share = fields.number("rotary_pct", 0.25)
    parameters = fields.raw("rope_parameters")
    if isinstance(parameters, dict) and "partial_rotary_factor" in parameters:
        share = parameters["partial_rotary_factor"]
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise ConfigError(f"{shown(share)} is not a number", field="rope_parameters.partial_rotary_factor")
    if not 0 < share <= 1:
        raise ConfigError(f"{shown(share)} is not in (0, 1]", field="rotary_pct")
    return int(head_size * share)
