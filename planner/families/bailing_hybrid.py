"""Ling 3.0: Kimi delta attention in most layers, latent attention in the last layer of each group.

The latent attention has an output gate per head, and most layers route tokens to experts. Shapes follow
transformers 5.23, models/bailing_hybrid/.

Config files on the Hugging Face hub (class BailingMoeV3ForCausalLM) have switches that transformers' class
lacks. A switch value that transformers cannot build raises an error. Ling 2.5 has the same model_type but
another class.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common, mla
from tonnage.planner.families.family import RENAMED, Family, VLLMTraits
from tonnage.planner.families.linear_attention import position_field
from tonnage.planner.families.moe_layers import sparse_layers
from tonnage.planner.families.tensors import Tensors, latent
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary, StateTensor
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.tensor import TensorSpec

# Switches in config files on the Hugging Face hub (vLLM 0.32.0, models/bailing_moe_v3.py) -> the only value
# that transformers can build
_ONE_FORM: dict[str, object] = {
    "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise", "use_bias": False,
    "use_qkv_bias": False, "q_lora_rank": None,
}  # fmt: skip


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Ling 3.0 model from its checked config."""
    for name, known in _ONE_FORM.items():
        if name in fields.config and fields.raw(name) != known:
            raise UnsupportedArchitecture(
                f"{shown(fields.raw(name))} is not supported; transformers builds {shown(known)} only",
                field=name,
            )
    d = mla.read_latent(fields, defaults=True)
    # transformers' class sets head_dim to the size of the rotary key and keeps the head_dim of config.json as
    # linear_head_dim.
    heads = fields.integer("linear_num_heads", d.heads, limit="heads")
    size = fields.integer("linear_head_dim", fields.integer("head_dim", 128, limit="width"), limit="width")
    kernel = fields.integer("short_conv_kernel_size", 4, limit="width")
    kernel = fields.integer("linear_conv_kernel_dim", kernel, limit="width")
    layers, vocab = common.layers_and_vocab(fields)
    full = _full(fields, layers)
    count, chosen, inner = common.widths(fields, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    dense = fields.integer("intermediate_size", limit="width")
    shared = inner * fields.integer("n_shared_experts", limit="width", minimum=0)
    stated = fields.optional_integer("moe_shared_expert_intermediate_size", limit="width")
    if stated not in (None, inner):
        raise UnsupportedArchitecture(
            f"{stated} is not supported; it must equal moe_intermediate_size, {inner}",
            field="moe_shared_expert_intermediate_size",
        )
    bias = fields.boolean("attention_bias", False)
    tied = common.never_tied(fields)
    sparse = sparse_layers(fields, layers, 2)
    fields.ignore(
        "num_mtp_layers", "num_nextn_predict_layers", "num_expert_group", "moe_renormalize", "use_qk_norm",
        "moe_router_enable_expert_bias", "max_window_layers", "model_max_length", "layers_block_type",
        "expert_swiglu_limit_list", "share_expert_swiglu_limit_list", "max_position_embeddings",
    )  # fmt: skip
    gate = TensorSpec("self_attn.g_proj.weight", (d.heads, d.hidden), "attention", "Linear", shard_dim=0)
    proj = heads * size
    states = (
        StateTensor("conv", (kernel - 1, 3 * proj), shard_dim=1),
        StateTensor("recurrent", (heads, size, size), "float32"),
    )
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, d.hidden)
    cache: list[CacheLayer] = []
    for i, at in t.layers(layers, "model.layers"):
        if full[i]:
            latent(t, at, replace(d, bias=bias, extra=(gate,)))
            cache += mla.cache((i,), d)
        else:
            _delta(t, f"{at}.self_attn", d.hidden, heads, size, kernel)
            cache.append(CacheLayer(i, "state", None, 0, 0, states=states))
        t.layer_norms(at, d.hidden)
        if not sparse[i]:
            t.gated_mlp(f"{at}.mlp", d.hidden, dense)
            continue
        t.corrected_experts(f"{at}.mlp", count, d.hidden, inner)
        if shared:
            t.gated_mlp(f"{at}.mlp.shared_experts", d.hidden, shared)
    t.close("model.norm", "model.embed_tokens", vocab, d.hidden, tied)
    t.rotary(d.rotary, "model.rotary_emb.")
    positions = position_field(fields)
    return common.decoder(
        fields, model_type, "BailingHybridForCausalLM", t,
        mla.heads_of(d), tuple(cache), layers=layers,
        inner=max(chosen * inner + shared, 0 if all(sparse) else dense), vocab=vocab,
        rotary=Rotary(d.rotary, 1), experts=count, experts_per_token=chosen,
        max_model_len=fields.integer(positions, limit="positions"), position_field=positions,
    )  # fmt: skip


def _full(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has full (latent) attention.

    ``layer_types`` states the kind of each layer. Without this field, the last layer of every group of
    ``layer_group_size`` layers has full attention, and the group size must divide the number of layers.
    Otherwise the layers after the last whole group would have delta attention in transformers, but latent
    attention in vLLM.
    """
    listed = fields.listed("layer_types", layers, {"linear_attention": False, "full_attention": True})
    group = fields.integer("layer_group_size", 6, limit="layers")
    if listed is None and layers % group:
        raise ConfigError(
            f"{group} does not divide the {layers} layers, and no layer_types are given",
            field="layer_group_size",
        )
    return listed or tuple((i + 1) % group == 0 for i in range(layers))


def _delta(t: Tensors, at: str, hidden: int, heads: int, size: int, kernel: int) -> None:
    """Add the tensors of one Kimi delta attention module below module ``at``.

    The convolution and the decay parameters stay in fp32 (_keep_in_fp32_modules_strict in transformers; vLLM
    does the same).
    """
    proj = heads * size
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        t.linear(f"{at}.{name}", proj, hidden, "mixer", shard="column")
    wide = "float32"
    t.add(f"{at}.conv1d.weight", (3 * proj, 1, kernel), "mixer", "Conv1d", shard=0, dtype=wide)
    t.add(f"{at}.forget_gate.A_log", (heads,), "mixer", "BailingHybridForgetGate", shard=0, dtype=wide)
    t.add(f"{at}.forget_gate.dt_bias", (proj,), "mixer", "BailingHybridForgetGate", shard=0, dtype=wide)
    t.linear(f"{at}.forget_gate.f_proj", proj, hidden, "mixer", shard="column")
    t.linear(f"{at}.b_proj", heads, hidden, "mixer", shard="column")
    t.norm(f"{at}.o_norm", size)
    t.linear(f"{at}.o_proj", hidden, proj, "mixer", shard="row")


FAMILIES = {
    "bailing_hybrid": Family(
        build,
        aliases={
            "num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        absent={"n_shared_experts": 1}, first_class="BailingMoeV3ForCausalLM", hf="recurrent",
        vllm=VLLMTraits(float32_states=True, wide_router=True), files=RENAMED,
    ),
}  # fmt: skip
