"""Dense decoders that were published with their own code and have a class in vLLM; most have Llama's shapes.

The families are Orion, Solar Pro, MiniCPM, Tele-FLM, TeleChat 2 and 3, openPangu Embedded, Step 1, PLaMo 3 and
IQuest-LoopCoder.
Shapes follow vLLM 0.32.0, model_executor/models/<family>.py. The planner never runs a model's own code.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.dense import DenseVariant
from tonnage.planner.families.family import LORA_ON_VOCABULARY, Family
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.tensor import TensorSpec

_BIAS = ("attention_bias", False)
_MUP = ("use_mup", "mup_scale_factor", "input_mult", "output_mult")  # Tele-FLM's scale factors have no tensors.


def _minicpm(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a dense MiniCPM 1 or 2 model; its scale factors have no tensors."""
    common.refuse(fields, "num_experts", why="the planner cannot build MiniCPM's experts")
    return DenseVariant(
        "MiniCPMForCausalLM", tied=True, window="always", ignored=("dim_model_base", "scale_depth"),
        taped=False,
    ).build(fields, model_type)  # fmt: skip


def _telechat2(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a TeleChat 2 model.

    K and V are projected by one matrix. Only the output projections of attention and MLP have biases.
    """
    dims, layers, vocab = common.sizes(fields)
    hidden, heads = dims.hidden, dims.heads
    kv_heads = fields.optional_integer("num_key_value_heads", limit="heads") or heads
    if kv_heads != heads:
        raise UnsupportedArchitecture(
            f"{kv_heads} is not num_attention_heads = {heads}; vLLM's class has one KV head per query head",
            field="num_key_value_heads",
        )
    common.refuse(fields, "num_moe_experts", "embed_layernorm")
    inner = fields.integer("intermediate_size", limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    fields.ignore(
        "apply_residual_connection_post_layernorm", "attention_softmax_in_fp32", "bias_dropout_fusion",
        "skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "hidden_dropout", "layer_norm_epsilon", "n_inner",
        "masked_softmax_fusion",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("transformer.word_embeddings", vocab, hidden)
    for _, at in t.layers(layers, "transformer.h"):
        own = f"{at}.self_attention"
        t.norm(f"{at}.input_layernorm", hidden)
        t.linear(f"{own}.query", hidden, hidden, shard="column")
        t.linear(f"{own}.key_value", 2 * hidden, hidden, shard="column", kv=(2 * hidden, heads))
        t.linear(f"{own}.dense", hidden, hidden, bias=True, shard="row")
        t.norm(f"{at}.post_attention_layernorm", hidden)
        t.linear(f"{at}.mlp.gate_proj", inner, hidden, "mlp", shard="column")
        t.linear(f"{at}.mlp.up_proj", inner, hidden, "mlp", shard="column")
        t.linear(f"{at}.mlp.down_proj", hidden, inner, "mlp", bias=True, shard="row")
    t.close("transformer.ln_f", "transformer.word_embeddings", vocab, hidden, tied)
    return common.decoder(
        fields, model_type, "TeleChat2ForCausalLM", t, dims, layers=layers, inner=inner, vocab=vocab,
        rotary=Rotary(dims.head_size, 1), max_model_len=fields.integer("seq_length", limit="positions"),
        position_field="seq_length",
    )  # fmt: skip


def _step1(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Step 1 model: Llama's shapes, with ALiBi instead of rotary positions."""
    found = DenseVariant("Step1ForCausalLM", _BIAS, _BIAS, ("mlp_bias", False), tied=True, taped=False).build(
        fields, model_type
    )
    tensors = tuple(tensor for tensor in found.tensors if "rotary_emb" not in tensor.name)
    return replace(found, tensors=tensors, rotary=None, recipe=None)


def _pangu(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a dense openPangu model: Llama, with attention biases if ``bias`` is true."""
    names = ("input_layernorm", "post_attention_layernorm")
    variant = DenseVariant(
        "PanguEmbeddedForCausalLM", ("bias", False), ("bias", False), ("mlp_bias", False), taped=False
    )
    if fields.boolean("sandwich_norm", False):
        more = ("pre_mlp_layernorm", "post_mlp_layernorm")
        variant = replace(variant, flow="sandwich", norms=(*names, *more))
    common.refuse(fields, "param_sink_number", "n_routed_experts", "interleaved_sliding_window", "kv_lora_rank")
    return variant.build(fields, model_type)


def _plamo3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a PLaMo 3 model, whose full and sliding layers have different rotary tables.

    Without layer_types, every ``sliding_window_pattern``-th layer has full attention, by default every eighth.
    The window is ``window_size``; older files list one per layer in ``sliding_window``.
    """
    window = fields.config.get("window_size", fields.config.get("sliding_window", 2048))
    if isinstance(window, list):
        stated = [entry for entry in window if entry is not None]
        if not stated or stated.count(stated[0]) != len(stated):
            raise UnsupportedArchitecture(
                f"{shown(window)} is not supported: the layers' windows must be equal", field="sliding_window"
            )
        window = stated[0]
    fields.config = {"sliding_window_pattern": 8, **fields.config, "sliding_window": window}
    return DenseVariant(
        "Plamo3ForCausalLM", qk_norm="head", qkv="qkv_proj", mlp_names=("gate_up_proj", "down_proj"),
        fused=True, flow="sandwich",
        norms=("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
        window="pattern", table_by_kind=True, tied=True,
        ignored=("sliding_window_pattern", "interleaved_sliding_window", "window_size"), taped=False,
    ).build(fields, model_type)  # fmt: skip


def _loopcoder(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an IQuest-LoopCoder model, which runs its layers ``loop_num`` times.

    Each pass after the first has its own KV cache, with a sliding window of ``loop_window_size`` tokens. A gate
    per head and layer mixes the attention of a later pass with that of the first (models/iquest_loopcoder.py).
    """
    loops = fields.integer("loop_num", 2, limit="layers")
    window = fields.integer("loop_window_size", 64, limit="positions")
    common.refuse(fields, "attention_bias", "mlp_bias")
    found = DenseVariant("IQuestLoopCoderForCausalLM", taped=False).build(fields, model_type)
    gates = []
    for layer in range(found.layers):
        at = f"model.gate_projections.{layer}.gate_proj"
        weight = TensorSpec(
            f"{at}.weight", (found.heads, found.head_size), "attention", "Linear", layer, shard_dim=0
        )
        gates += [weight, replace(weight, name=f"{at}.bias", shape=(found.heads,))]
    later = (CacheLayer(0, "sliding", window, found.kv_heads, found.head_size),) * (loops - 1)
    caches = (replace(cache, layer=first.layer) for first in found.cache_layers for cache in (first, *later))
    return replace(found, tensors=(*found.tensors, *gates), cache_layers=tuple(caches), recipe=None)


FAMILIES = {
    "orion": Family(
        DenseVariant(
            "OrionForCausalLM", norm="layer", window="always", ignored=("max_sequence_length",), taped=False
        ).build
    ),
    "solar": Family(
        # bskcn_*: layers to which an earlier layer's output is added; the addition has no tensors
        DenseVariant(
            "SolarForCausalLM", _BIAS, _BIAS, ("mlp_bias", False), window="always",
            ignored=("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4", "bskcn_tv"), taped=False,
        ).build,
        vllm=LORA_ON_VOCABULARY,
    ),
    "minicpm": Family(_minicpm, vllm=LORA_ON_VOCABULARY),
    "TeleFLM": Family(DenseVariant("TeleFLMForCausalLM", ignored=_MUP, taped=False).build),
    "telechat": Family(
        _telechat2,
        aliases={
            "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "intermediate_size": "ffn_hidden_size",
        },
        first_class="TeleChatForCausalLM",
    ),
    "telechat3": Family(
        DenseVariant(
            "TeleChat3ForCausalLM", _BIAS, _BIAS, ("mlp_bias", False), window="always", taped=False
        ).build
    ),
    "step1": Family(
        _step1,
        aliases={"num_key_value_heads": "num_attention_groups", "max_position_embeddings": "max_seq_len"},
    ),
    "PanguEmbedded": Family(_pangu),
    "iquestloopcoder": Family(_loopcoder, absent={"num_key_value_heads": 8, "head_dim": 128}),
    "plamo3": Family(_plamo3),
}  # fmt: skip
