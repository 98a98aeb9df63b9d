"""Zamba 1 and 2: Mamba layers, and attention blocks whose weights several layers share.

Shapes follow transformers 5.19, models/zamba/ and models/zamba2/; Zamba 2's mixer is in mamba.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.mamba import TIME_STEP, Mamba2, auto, chunk_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, StateTensor
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import Heads


def zamba(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Zamba model from its checked config.

    Every layer has a Mamba-1 mixer with heads. All hybrid layers use the same attention block, whose input is
    twice as wide as the hidden size.
    """
    hidden = fields.integer("hidden_size", limit="width")
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", 14848, limit="width")
    heads = fields.integer("num_attention_heads", 16, limit="heads")
    kv_heads = fields.integer("num_key_value_heads", 16, limit="heads")
    width = fields.integer("attention_hidden_size", 2 * hidden, limit="width")
    size = fields.integer("attention_head_dim", 2 * hidden // heads, limit="width")
    mamba_heads = fields.integer("n_mamba_heads", 2, limit="heads")
    state = fields.integer("mamba_d_state", 16, limit="width")
    kernel = fields.integer("mamba_d_conv", 4, limit="width")
    mixed = fields.integer("mamba_expand", 2, limit="width") * hidden
    rank = auto(fields, "mamba_dt_rank", -(-hidden // 16))
    common.divisible(mixed, mamba_heads, "hidden_size", "n_mamba_heads")
    tied = fields.boolean("tie_word_embeddings", True)
    bias = fields.boolean("mamba_proj_bias", False)
    conv_bias = fields.boolean("mamba_conv_bias", True)
    hybrid = _hybrids(fields, layers)
    fields.ignore("attn_layer_period", "attn_layer_offset")
    per_head = mixed // mamba_heads
    dims = Heads(hidden, heads, kv_heads, size)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    cache = []
    first: str | None = None
    for i, at in t.layers(layers, "model.layers"):
        if hybrid[i]:
            begin = len(t.specs)
            shared = f"{at}.shared_transf"
            _shared_attention(t, shared, dims, width)
            t.gated_mlp(f"{shared}.feed_forward", hidden, inner)
            t.norm(f"{shared}.input_layernorm", width)
            t.norm(f"{shared}.pre_ff_layernorm", hidden)
            first = _tie(t, begin, shared, first)
            t.linear(f"{at}.linear", hidden, hidden, "mixer")
            cache.append(CacheLayer(i, "full", None, kv_heads, size))
        here = f"{at}.mamba_decoder" if hybrid[i] else at
        m = f"{here}.mamba"
        for name, shape in (
            ("x_proj_weight", (mamba_heads, rank + 2 * state, per_head)),
            ("dt_proj_weight", (mamba_heads, per_head, rank)),
            ("dt_proj_bias", (mamba_heads, per_head)), ("A_log", (mamba_heads, per_head, state)),
            ("D", (mamba_heads, per_head)),
        ):  # fmt: skip
            t.add(f"{m}.{name}", shape, "mixer", "ZambaMambaMixer", shard=0)
        t.conv1d(f"{m}.conv1d", mixed, kernel, bias=conv_bias)
        t.linear(f"{m}.in_proj", 2 * mixed, hidden, "mixer", bias=bias, shard="column")
        t.linear(f"{m}.out_proj", hidden, mixed, "mixer", bias=bias, shard="row")
        t.norm(f"{here}.input_layernorm", hidden)
        states = (
            StateTensor("conv", (kernel - 1, mixed), shard_dim=1),
            StateTensor("ssm", (mamba_heads, per_head, state)),
        )
        cache.append(CacheLayer(i, "state", None, 0, 0, states=states))
    t.close("model.final_layernorm", "model.embed_tokens", vocab, hidden, tied)
    return common.decoder(
        fields, model_type, "ZambaForCausalLM", t, dims, tuple(cache), layers=layers, inner=max(inner, width),
        vocab=vocab,
    )  # fmt: skip


def _hybrids(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is hybrid (has attention too), by ``layers_block_type``."""
    words = {"mamba": False, "linear_attention": False, "hybrid": True}
    listed = fields.listed("layers_block_type", layers, words)
    if listed is None:
        raise ConfigError("missing", field="layers_block_type", hint="which layers are hybrid")
    return listed


def _shared_attention(t: Tensors, at: str, dims: Heads, width: int) -> None:
    """Add the projections of an attention block that several layers share; its input has ``width`` values."""
    q, kv = dims.heads * dims.head_size, dims.kv_heads * dims.head_size
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        t.linear(f"{at}.self_attn.{name}", rows, width, shard="column")
    t.linear(f"{at}.self_attn.o_proj", dims.hidden, q, shard="row")


def _tie(t: Tensors, begin: int, here: str, first: str | None) -> str:
    """Tie the tensors below module ``here`` to those of the earlier module ``first``.

    Returns the name of the module that owns the weights.

    Only tensors from index ``begin`` on are tied. If ``first`` is None, no earlier module has the weights, and
    ``here`` owns them.
    """
    if first is None:
        return here
    for k in range(begin, len(t.specs)):
        name = t.specs[k].name
        t.specs[k] = replace(t.specs[k], tied_to=first + name[len(here) :])
    return first


def zamba2(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Zamba 2 model from its checked config.

    There are ``num_mem_blocks`` attention blocks, and several layers use the same block. Each of these layers
    has its own low-rank adapters on the block.
    """
    hidden = fields.integer("hidden_size", limit="width")
    layers, vocab = common.layers_and_vocab(fields)
    heads = fields.integer("num_attention_heads", 32, limit="heads")
    kv_heads = fields.integer("num_key_value_heads", heads, limit="heads")
    size = fields.integer("attention_head_dim", 2 * hidden // heads, limit="width")
    width = fields.integer("attention_hidden_size", 2 * hidden, limit="width")
    inner = fields.integer("intermediate_size", 4 * hidden, limit="width")
    blocks = fields.integer("num_mem_blocks", 1, limit="layers")
    rank = fields.integer("adapter_rank", 128, limit="width")
    bias = fields.boolean("add_bias_linear", False)
    tied = fields.boolean("tie_word_embeddings", True)
    mixed = fields.integer("mamba_expand", 2, limit="width") * hidden
    mamba_heads = fields.integer("n_mamba_heads", 8, limit="heads")
    mixer = Mamba2(
        hidden, mamba_heads, mixed // mamba_heads, fields.integer("mamba_ngroups", 1, limit="heads"),
        fields.integer("mamba_d_state", 64, limit="width"), fields.integer("mamba_d_conv", 4, limit="width"),
        mixed, bias, fields.boolean("use_conv_bias", True), chunk=chunk_of(fields),
    )  # fmt: skip
    unknown = "adapters on shared attention are unknown to the planner"
    common.refuse(fields, "use_shared_attention_adapter", why=unknown)
    hybrid = _hybrids(fields, layers)
    fields.ignore("mamba_headdim", "kv_channels", "num_query_groups", "hybrid_layer_ids", "use_long_context")
    rope = fields.boolean("use_mem_rope", False)
    dims = Heads(hidden, heads, kv_heads, size)
    hybrids = [i for i in range(layers) if hybrid[i]]
    firsts: dict[int, str] = {}
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        if hybrid[i]:
            block = hybrids.index(i) % blocks
            begin = len(t.specs)
            shared = f"{at}.shared_transformer"
            _shared_attention(t, shared, dims, width)
            ff = f"{shared}.feed_forward"
            t.plain_mlp(ff, hidden, inner, bias=bias, names=("gate_up_proj", "down_proj"), fused_gate=True)
            for k in range(len(hybrids)):
                if k % blocks == block:
                    t.linear(f"{ff}.gate_up_proj_adapter_list.{k}.0", rank, hidden, "mlp")
                    t.linear(f"{ff}.gate_up_proj_adapter_list.{k}.1", 2 * inner, rank, "mlp")
            t.norm(f"{shared}.input_layernorm", width)
            t.norm(f"{shared}.pre_ff_layernorm", hidden)
            firsts[block] = _tie(t, begin, shared, firsts.get(block))
            t.linear(f"{at}.linear", hidden, hidden, "mixer")
            cache.append(CacheLayer(i, "full", None, kv_heads, size))
        here = f"{at}.mamba_decoder" if hybrid[i] else at
        mixer.add(t, f"{here}.mamba")
        t.norm(f"{here}.input_layernorm", hidden)
        cache.append(mixer.cache(i))
    t.close("model.final_layernorm", "model.embed_tokens", vocab, hidden, tied)
    if rope:
        t.rotary(size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "Zamba2ForCausalLM", t, dims, tuple(cache), layers=layers, inner=inner, vocab=vocab
    )


_family = partial(Family, ignored=TIME_STEP)
FAMILIES = {
    "zamba": _family(zamba, hf="recurrent", files=RENAMED),
    "zamba2": _family(zamba2, hf="recurrent", files=RENAMED),
}
