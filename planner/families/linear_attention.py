"""Models with both full and linear attention layers: Qwen3-Next, Qwen3.5, Kimi Linear, MiniMax-01 and LFM2.

Their linear layers are gated delta nets (Qwen), Kimi delta attention (KDA), lightning attention (MiniMax) and
short convolutions (LFM2). Shapes follow transformers 5.19 / 5.23, models/<family>/.

A linear layer keeps a state per sequence whose size does not depend on the sequence length. The state consists
of the last inputs of a convolution (LFM2), one matrix per head (MiniMax) or both. vLLM 0.32.0 has the same
shapes (model_executor/layers/mamba/mamba_utils.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common, mla
from tonnage.planner.families.family import LORA_ON_VOCABULARY, RENAMED, Family, VLLMTraits
from tonnage.planner.families.moe_layers import sparse_layers, stepped_layers
from tonnage.planner.families.tensors import Tensors, latent
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary, StateTensor
from tonnage.planner.model.fields import Fields, shown


@dataclass(frozen=True, slots=True)
class Delta:
    """Number and size of the key heads and value heads of a gated delta net."""

    hidden: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @property
    def keys(self) -> int:
        """Return the width of the key of one token: number of key heads times key head size."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Return the width of the value of one token: number of value heads times value head size."""
        return self.value_heads * self.value_size


def qwen(
    fields: Fields, model_type: str, *, class_name: str, moe: bool = True, fused: bool = False
) -> Architecture:
    """Return the architecture of Qwen3-Next or Qwen3.5 from its checked config.

    Args:
        fields: the config.
        model_type: type of the model.
        class_name: the causal language model's class in transformers.
        moe: whether layers may route to experts.
        fused: whether the delta nets have two input projections instead of four.
    """
    dims = common.heads_of(fields)
    d = Delta(
        dims.hidden,
        fields.integer("linear_num_key_heads", 16, limit="heads"),
        fields.integer("linear_num_value_heads", 32, limit="heads"),
        fields.integer("linear_key_head_dim", 128, limit="width"),
        fields.integer("linear_value_head_dim", 128, limit="width"),
        fields.integer("linear_conv_kernel_dim", 4, limit="width"),
    )
    common.divisible(d.value_heads, d.key_heads, "linear_num_value_heads", "linear_num_key_heads")
    layers, vocab = common.layers_and_vocab(fields)
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    interval = fields.integer("full_attention_interval", 4, limit="layers")
    listed = fields.listed("layer_types", layers, _KINDS)
    full = listed or tuple((i + 1) % interval == 0 for i in range(layers))
    if fields.boolean("attn_output_gate", True) is False:
        raise UnsupportedArchitecture("false is not supported; only true is", field="attn_output_gate")
    state_dtype = common.dtype_of(fields, "mamba_ssm_dtype")
    experts = _QwenExperts.read(fields, layers) if moe else None
    inner = fields.integer("intermediate_size", 5632 if moe else None, limit="width")
    fields.ignore(
        "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers", "output_gate_type"
    )
    fields.ignore("partial_rotary_factor")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        if full[i]:
            t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias, qk_norm="head", gated=True)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        else:
            delta_net(t, f"{at}.linear_attn", d, fused=fused)
            cache.append(delta_cache(i, d, state_dtype))
        if experts is not None and experts.sparse[i]:
            experts.add(t, f"{at}.mlp", dims.hidden)
        else:
            t.gated_mlp(f"{at}.mlp", dims.hidden, inner)
        t.layer_norms(at, dims.hidden)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    rotary = Rotary(int(dims.head_size * common.rotary_share(fields, 0.25)), 1)
    t.rotary(rotary.dim, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, class_name, t, dims, tuple(cache), layers=layers,
        inner=experts.widest if experts is not None else inner, vocab=vocab, rotary=rotary,
        experts=experts.count if experts is not None else 0,
        experts_per_token=experts.chosen if experts is not None else 0,
    )  # fmt: skip


def delta_net(t: Tensors, at: str, d: Delta, *, fused: bool) -> None:
    """Add the tensors of one gated delta net below module ``at``.

    With ``fused`` there are two input projections: one for q, k, v and the gate, one for two scalars per head
    (Qwen3-Next). Otherwise there are four input projections (Qwen3.5).
    """
    for name in ("dt_bias", "A_log"):
        t.add(f"{at}.{name}", (d.value_heads,), "mixer", "GatedDeltaNet", shard=0)
    channels = 2 * d.keys + d.values
    t.conv1d(f"{at}.conv1d", channels, d.kernel)
    if fused:
        t.linear(f"{at}.in_proj_qkvz", channels + d.values, d.hidden, "mixer", shard="column")
        t.linear(f"{at}.in_proj_ba", 2 * d.value_heads, d.hidden, "mixer", shard="column")
    else:
        t.linear(f"{at}.in_proj_qkv", channels, d.hidden, "mixer", shard="column")
        t.linear(f"{at}.in_proj_z", d.values, d.hidden, "mixer", shard="column")
        t.linear(f"{at}.in_proj_b", d.value_heads, d.hidden, "mixer", shard="column")
        t.linear(f"{at}.in_proj_a", d.value_heads, d.hidden, "mixer", shard="column")
    t.norm(f"{at}.norm", d.value_size)
    t.linear(f"{at}.out_proj", d.hidden, d.values, "mixer", shard="row")


def delta_cache(layer: int, d: Delta, dtype: str | None) -> CacheLayer:
    """Return the cache entry of one gated delta net: the state that it keeps per sequence.

    ``dtype`` is the dtype of the recurrent state; None means the model's dtype.
    """
    states = (
        StateTensor("conv", (d.kernel - 1, 2 * d.keys + d.values), shard_dim=1),
        StateTensor("recurrent", (d.value_heads, d.value_size, d.key_size), dtype),
    )
    return CacheLayer(layer, "state", None, 0, 0, states=states)


@dataclass(frozen=True, slots=True)
class _QwenExperts:
    """Numbers and sizes of the routed and shared experts of a Qwen model with gated delta nets."""

    count: int
    chosen: int
    inner: int
    shared: int
    sparse: tuple[bool, ...]

    @classmethod
    def read(cls, fields: Fields, layers: int) -> _QwenExperts:
        """Return the numbers and sizes of the routed and shared experts, from the config."""
        sparse = stepped_layers(fields, layers)
        return cls(
            fields.integer("num_experts", limit="width"),
            fields.integer("num_experts_per_tok", limit="width"),
            fields.integer("moe_intermediate_size", limit="width"),
            fields.integer("shared_expert_intermediate_size", limit="width"),
            sparse,
        )

    @property
    def widest(self) -> int:
        """Return the MLP width that one token uses: the selected experts' and the shared expert's together."""
        return self.chosen * self.inner + self.shared

    def add(self, t: Tensors, at: str, hidden: int) -> None:
        """Add the tensors of router, experts, shared expert and its gate below module ``at``."""
        t.router(f"{at}.gate", self.count, hidden)
        t.experts(f"{at}.experts", self.count, hidden, self.inner)
        t.gated_mlp(f"{at}.shared_expert", hidden, self.shared)
        t.linear(f"{at}.shared_expert_gate", 1, hidden, "router")


_KINDS = {"linear_attention": False, "full_attention": True}


def kimi(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Kimi Linear model from its checked config.

    Most layers have Kimi delta attention, the others latent attention; the first layer has a dense MLP.
    """
    d = mla.read_latent(fields)
    layers, vocab = common.layers_and_vocab(fields)
    heads, size, kernel, full = _kimi_linear(fields, layers)
    count, chosen = common.widths(fields, "num_experts", "num_experts_per_token")
    inner, dense = common.widths(fields, "moe_intermediate_size", "intermediate_size")
    shared = inner * (fields.optional_integer("num_shared_experts", 0, limit="width", minimum=0) or 0)
    bias = fields.boolean("attention_bias", False)
    tied = common.never_tied(fields)
    common.only(fields, moe_layer_freq=1)
    sparse = sparse_layers(fields, layers, 1)
    unknown = ("routed_expert_hidden_size", "attn_res_block_size", "mla_use_output_gate")
    common.refuse(fields, *unknown, why="the code that reads it is not public")
    fields.ignore("num_expert_group", "moe_renormalize", "model_max_length", "head_dim")
    fields.ignore("linear_attn_config", "moe_router_activation_func", "use_grouped_topk", "mla_use_nope")
    fields.ignore("num_nextn_predict_layers", "max_position_embeddings")
    proj = heads * size
    states = tuple(
        [StateTensor(f"conv_{name}", (kernel - 1, proj), shard_dim=1) for name in "qkv"]
        + [StateTensor("recurrent", (heads, size, size), "float32")]
    )
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, d.hidden)
    cache: list[CacheLayer] = []
    for i, at in t.layers(layers, "model.layers"):
        if full[i]:
            latent(t, at, replace(d, bias=bias))
            cache += mla.cache((i,), d)
        else:
            _kda(t, f"{at}.self_attn", d.hidden, heads, size, kernel)
            cache.append(CacheLayer(i, "state", None, 0, 0, states=states))
        t.layer_norms(at, d.hidden)
        if not sparse[i]:
            t.gated_mlp(f"{at}.mlp", d.hidden, dense)
            continue
        t.corrected_experts(f"{at}.mlp", count, d.hidden, inner, None)
        if shared:
            t.gated_mlp(f"{at}.mlp.shared_experts", d.hidden, shared)
    t.close("model.norm", "model.embed_tokens", vocab, d.hidden, tied)
    positions = position_field(fields)
    return common.decoder(
        fields, "kimi_linear", "KimiLinearForCausalLM", t,
        mla.heads_of(d),
        tuple(cache), layers=layers, inner=max(chosen * inner + shared, dense), vocab=vocab, experts=count,
        experts_per_token=chosen, max_model_len=fields.integer(positions, limit="positions"),
        position_field=positions,
    )  # fmt: skip


def position_field(fields: Fields) -> str:
    """Return the config field of the maximum length: max_position_embeddings if set, else model_max_length."""
    name = "max_position_embeddings"
    return "model_max_length" if fields.config.get(name) is None else name


def _kda(t: Tensors, at: str, hidden: int, heads: int, size: int, kernel: int) -> None:
    """Add the tensors of one Kimi delta attention module below module ``at``."""
    proj = heads * size
    for name in ("q_proj", "k_proj", "v_proj"):
        t.linear(f"{at}.{name}", proj, hidden, "mixer", shard="column")
    t.conv1d(f"{at}.conv1d", 3 * proj, kernel)
    t.add(f"{at}.forget_gate.dt_bias", (proj,), "mixer", "KimiLinearForgetGate", shard=0)
    t.add(f"{at}.forget_gate.A_log", (1, 1, heads, 1), "mixer", "KimiLinearForgetGate", shard=2)
    t.linear(f"{at}.forget_gate.f_a_proj", size, hidden, "mixer")
    t.linear(f"{at}.forget_gate.f_b_proj", proj, size, "mixer", shard="column")
    t.linear(f"{at}.b_proj", heads, hidden, "mixer", shard="column")
    t.linear(f"{at}.g_a_proj", size, hidden, "mixer")
    t.linear(f"{at}.g_b_proj", proj, size, "mixer", shard="column")
    t.norm(f"{at}.o_norm", size)
    t.linear(f"{at}.o_proj", hidden, proj, "mixer", shard="row")


def _kimi_linear(fields: Fields, layers: int) -> tuple[int, int, int, tuple[bool, ...]]:
    """Return (heads, head size, kernel) of Kimi's delta attention, and whether each layer has full attention.

    Config files on the Hugging Face hub state these values in ``linear_attn_config``, where layer numbers start
    at 1. Files that transformers writes state them at the top level.
    """
    nested = fields.mapping("linear_attn_config")
    if nested is None:
        # By default, the config class gives full attention to the layers with index 4, 8, 12 and so on.
        return (
            fields.integer("linear_num_heads", limit="heads"),
            fields.integer("linear_head_dim", limit="width"),
            fields.integer("linear_conv_kernel_dim", 4, limit="width"),
            fields.listed("layer_types", layers, _KINDS) or tuple(i > 0 and i % 4 == 0 for i in range(layers)),
        )
    inner = Fields(nested)
    full = inner.raw("full_attn_layers")
    if not isinstance(full, list) or not all(type(i) is int and 1 <= i <= layers for i in full):
        raise ConfigError(
            f"{shown(full)} is not a list of layers counted from 1", field="linear_attn_config.full_attn_layers"
        )
    attending = common.numbers_in(full)
    return (
        inner.integer("num_heads", limit="heads"),
        inner.integer("head_dim", limit="width"),
        inner.integer("short_conv_kernel_size", 4, limit="width"),
        tuple(i + 1 in attending for i in range(layers)),
    )


def minimax(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a MiniMax-01 model from its checked config.

    Its lightning attention keeps one fp32 matrix per head and sequence.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    count = fields.integer("num_local_experts", limit="width")
    chosen = fields.integer("num_experts_per_tok", 2, limit="width")
    inner = fields.integer("intermediate_size", limit="width")
    block = fields.integer("block_size", 256, limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    # Files on the Hugging Face hub state a number per layer: 1 is full attention, 0 lightning attention.
    listed = fields.raw("attn_type_list")
    if fields.raw("layer_types") is None and isinstance(listed, list) and len(listed) == layers:
        full = tuple(bool(kind) for kind in listed)
    else:
        full = fields.listed("layer_types", layers, _KINDS) or tuple(i % 2 == 0 for i in range(layers))
    fields.ignore(
        "sliding_window", "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor",
        "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor",
    )  # fmt: skip
    width = dims.heads * dims.head_size
    state = StateTensor("linear", (dims.heads, dims.head_size, dims.head_size), "float32")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        if full[i]:
            t.attention(f"{at}.self_attn", dims)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        else:
            here = f"{at}.self_attn"
            t.norm(f"{here}.norm", width)
            t.linear(f"{here}.qkv_proj", 3 * width, dims.hidden, "mixer", shard="column")
            t.linear(f"{here}.out_proj", dims.hidden, width, "mixer", shard="row")
            t.linear(f"{here}.output_gate", width, dims.hidden, "mixer", shard="column")
            for name, shape in (
                ("slope_rate", (dims.heads, 1, 1)), ("query_decay", (dims.heads, block, 1)),
                ("key_decay", (dims.heads, block, 1)), ("diagonal_decay", (1, dims.heads, block, block)),
            ):  # fmt: skip
                # transformers computes the decay buffers in the model's dtype; published checkpoints lack them.
                t.buffer(f"{here}.{name}", shape, "LightningAttention", None)
            cache.append(CacheLayer(i, "state", None, 0, 0, states=(state,)))
        t.router(f"{at}.mlp.gate", count, dims.hidden)
        t.experts(f"{at}.mlp.experts", count, dims.hidden, inner)
        t.layer_norms(at, dims.hidden)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "MiniMaxForCausalLM", t, dims, tuple(cache), layers=layers, inner=chosen * inner,
        vocab=vocab, rotary=Rotary(dims.head_size, 1), experts=count, experts_per_token=chosen,
    )  # fmt: skip


def lfm2(fields: Fields, model_type: str, *, moe: bool = False) -> Architecture:
    """Return the architecture of LFM2 or LFM2-MoE: gated short convolutions and a few full-attention layers.

    In LFM2-MoE the layers from ``num_dense_layers`` on have routed experts.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    kernel = fields.integer("conv_L_cache", 3, limit="width")
    conv_bias = fields.boolean("conv_bias", False)
    tied = fields.boolean(
        "tie_word_embeddings" if "tie_embedding" not in fields.config else "tie_embedding", True
    )
    full = _lfm2_full(fields, layers)
    inner = fields.integer("intermediate_size", limit="width") if moe else _lfm2_inner(fields)
    fields.ignore(
        "block_dim", "block_norm_eps", "block_use_swiglu", "conv_dim", "conv_dim_out", "num_heads",
        "use_pos_enc",
        "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init",
        "use_expert_bias",
    )  # fmt: skip
    count = fields.integer("num_experts", limit="width") if moe else 0
    chosen = fields.integer("num_experts_per_tok", limit="width") if moe else 0
    expert = fields.integer("moe_intermediate_size", limit="width") if moe else 0
    dense = fields.integer("num_dense_layers", 2, limit="layers", minimum=0) if moe else layers
    state = StateTensor("conv", (kernel - 1, dims.hidden), shard_dim=1)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        if full[i]:
            names = ("q_layernorm", "k_layernorm")
            t.attention(f"{at}.self_attn", dims, out="out_proj", qk_norm="head", norm_names=names)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        else:
            t.short_conv(f"{at}.conv", dims.hidden, kernel, conv_bias)
            cache.append(CacheLayer(i, "state", None, 0, 0, states=(state,)))
        if i < dense:
            t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner, names=("w1", "w3", "w2"))
        else:
            t.router(f"{at}.feed_forward.gate", count, dims.hidden)
            t.experts(f"{at}.feed_forward.experts", count, dims.hidden, expert)
            t.correction_bias(f"{at}.feed_forward.expert_bias", (count,))
        t.norms(at, dims.hidden, "operator_norm", "ffn_norm")
    t.close("model.embedding_norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "model.rotary_emb.")
    name = "Lfm2MoeForCausalLM" if moe else "Lfm2ForCausalLM"
    return common.decoder(
        fields, model_type, name, t, dims, tuple(cache), layers=layers, inner=max(inner, chosen * expert),
        vocab=vocab, rotary=Rotary(dims.head_size, 1), experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _lfm2_full(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has full attention.

    ``layer_types`` states it, else ``full_attn_idxs``; without both fields all layers have full attention.
    """
    listed = fields.listed("layer_types", layers, {"conv": False, "full_attention": True})
    indices = fields.raw("full_attn_idxs")
    if listed is None and isinstance(indices, list):
        attending = common.numbers_in(indices)
        return tuple(i in attending for i in range(layers))
    return listed or (True,) * layers  # without layer_types and full_attn_idxs there are no convolutions


def _lfm2_inner(fields: Fields) -> int:
    """Return the inner size of LFM2's dense MLP.

    By default it is two thirds of the config field block_ff_dim or intermediate_size, times
    block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of (configuration_lfm2.py,
    modeling_lfm2.py).
    """
    name = "block_ff_dim" if "block_ff_dim" in fields.config else "intermediate_size"
    width = fields.integer(name, 12288, limit="width")
    fields.ignore("intermediate_size")
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return width
    multiple = fields.integer("block_multiple_of", 256, limit="width")
    width = fields.share("block_ffn_dim_multiplier", 1.0, int(2 * width / 3))
    return multiple * -(-width // multiple)


FAMILIES = {
    "qwen3_next": Family(
        partial(qwen, class_name="Qwen3NextForCausalLM", fused=True),
        absent={"num_key_value_heads": 2, "head_dim": 256}, hf="recurrent",
        vllm=VLLMTraits(one_mrope_length=True), files=RENAMED,
    ),
    "qwen3_5_text": Family(
        partial(qwen, class_name="Qwen3_5ForCausalLM", moe=False),
        absent={"num_key_value_heads": 4, "head_dim": 256}, hf="recurrent",
        vllm=VLLMTraits(float32_states=True, one_mrope_length=True),
    ),
    "qwen3_5_moe_text": Family(
        partial(qwen, class_name="Qwen3_5MoeForCausalLM"),
        absent={"num_key_value_heads": 2, "head_dim": 256}, hf="recurrent",
        # Text-only checkpoints of a pruned Qwen3.5 name the class of the multimodal model.
        first_class="Qwen3_5MoeForConditionalGeneration",
        vllm=VLLMTraits(float32_states=True, one_mrope_length=True),
    ),
    "kimi_linear": Family(
        kimi, absent={"num_shared_experts": 1}, hf="recurrent", vllm=VLLMTraits(float32_states=True),
        files=RENAMED,
    ),
    "minimax": Family(minimax, absent={"num_key_value_heads": 8}, hf="recurrent", files=RENAMED),
    "lfm2": Family(
        lfm2, absent={"num_key_value_heads": 8}, hf="recurrent", vllm=LORA_ON_VOCABULARY, files=RENAMED,
    ),
    "lfm2_moe": Family(
        partial(lfm2, moe=True), absent={"num_key_value_heads": 8}, hf="recurrent", vllm=LORA_ON_VOCABULARY,
        files=RENAMED,
    ),
}  # fmt: skip
