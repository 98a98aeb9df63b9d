"""GPTBigCode (StarCoder, SantaCoder): learned positions, multi-query attention. transformers 5.19,
models/gpt_bigcode/."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.fields import Fields


def build(fields: Fields, model_type: str) -> Architecture:
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, fields.name("hidden_size"), fields.name("num_attention_heads"))
    head_size = hidden // heads
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * hidden, limit="width")
    kv_heads = 1 if fields.boolean("multi_query", True) else heads
    fields.ignore("num_key_value_heads", "head_dim")
    tied = fields.boolean("tie_word_embeddings", True)
    if fields.boolean("add_cross_attention", False):
        raise UnsupportedArchitecture("cross attention is not planned yet", field="add_cross_attention")
    fields.ignore(
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout", "inference_runner", "validate_runner_input", "pre_allocate_kv_cache",
        "max_sequence_length", "max_batch_size", "pad_key_length", "activation_function",
    )  # fmt: skip

    def tensors() -> Iterator[TensorSpec]:
        yield common.embedding("transformer.wte", vocab, hidden)
        yield common.embedding("transformer.wpe", positions, hidden)
        for i in range(layers):
            at = f"transformer.h.{i}"
            yield from common.linear(
                f"{at}.attn.c_attn", hidden + 2 * kv_heads * head_size, hidden, "attention", i, True
            )
            yield from common.linear(f"{at}.attn.c_proj", hidden, hidden, "attention", i, True)
            yield from common.linear(f"{at}.mlp.c_fc", inner, hidden, "mlp", i, True)
            yield from common.linear(f"{at}.mlp.c_proj", hidden, inner, "mlp", i, True)
            yield from common.layer_norm(f"{at}.ln_1", hidden, i)
            yield from common.layer_norm(f"{at}.ln_2", hidden, i)
        yield from common.layer_norm("transformer.ln_f", hidden, None)
        # the causal mask of all positions: 64 MiB for StarCoder's 8,192
        mask = (positions, positions)
        yield TensorSpec("transformer.bias", mask, "buffer", "GPTBigCodeModel", dtype="bool")
        yield common.lm_head(vocab, hidden, "transformer.wte.weight" if tied else None)

    return Architecture(
        model_type=model_type,
        class_name="GPTBigCodeForCausalLM",
        layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab,
        max_model_len=positions,
        tensors=tuple(tensors()),
        cache_layers=common.cache_layers(("full_attention",) * layers, None, kv_heads, head_size),
        rotary=None,
        position_field=fields.name("max_position_embeddings"),
        gated_mlp=False,
    )
