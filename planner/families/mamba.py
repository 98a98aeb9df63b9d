"""State-space models and their hybrids: Mamba 1 and 2, Falcon-Mamba, Bamba, Falcon-H1, Granite hybrid, Jamba,
Zamba 1 and 2, Nemotron-H. Shapes after transformers 5.19 / 5.23, models/<family>/.

A Mamba layer keeps, per sequence, the last kernel - 1 inputs of its convolution and its recurrent state
(vLLM 0.32.0, model_executor/layers/mamba/mamba_utils.py states the same shapes).
"""

from __future__ import annotations

from collections.abc import Callable

from tonnage.planner.architecture import Architecture, CacheLayer, Rotary, StateTensor
from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.common import Heads, Tensors
from tonnage.planner.fields import Fields, shown
from tonnage.planner.records import dataclass

_TIME_STEP = (
    "time_step_floor", "time_step_init_scheme", "time_step_limit", "time_step_max", "time_step_min",
    "time_step_scale", "rescale_prenorm_residual", "residual_in_fp32", "use_mambapy", "use_associative_scan",
    "use_mamba_kernels", "chunk_size", "mamba_chunk_size", "num_logits_to_keep", "expand", "mamba_expand",
    "z_loss_coefficient", "mixer_rms_eps", "mamba_hidden_act", "hidden_mamba_act", "mlp_hidden_act",
    "use_mem_eff_path", "position_embedding_type",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Geometry of one Mamba-2 mixer."""

    hidden: int
    heads: int
    head_size: int
    groups: int
    state: int
    kernel: int
    inner: int
    proj_bias: bool
    conv_bias: bool
    norm: bool = True
    dtype: str | None = None

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def add(self, t: Tensors, at: str) -> None:
        for name in ("dt_bias", "A_log", "D"):
            t.add(f"{at}.{name}", (self.heads,), "mixer", "Mamba2Mixer", shard=0)
        t.add(f"{at}.conv1d.weight", (self.channels, 1, self.kernel), "mixer", "Conv1d", shard=0)
        if self.conv_bias:
            t.add(f"{at}.conv1d.bias", (self.channels,), "mixer", "Conv1d", shard=0)
        rows = self.inner + self.channels + self.heads
        t.linear(f"{at}.in_proj", rows, self.hidden, "mixer", bias=self.proj_bias, shard="column")
        if self.norm:
            t.norm(f"{at}.norm", self.inner)
        t.linear(f"{at}.out_proj", self.hidden, self.inner, "mixer", bias=self.proj_bias, shard="row")

    def states(self) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (self.kernel - 1, self.channels), shard_dim=1),
            StateTensor("ssm", (self.heads, self.head_size, self.state), self.dtype),
        )

    def cache(self, layer: int) -> CacheLayer:
        return CacheLayer(layer, "state", None, 0, 0, states=self.states())


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Geometry of one Mamba-1 mixer. ``norms``: Jamba's norms on dt, B and C."""

    hidden: int
    inner: int
    rank: int
    state: int
    kernel: int
    proj_bias: bool
    conv_bias: bool
    norms: bool = False

    def add(self, t: Tensors, at: str) -> None:
        t.add(f"{at}.A_log", (self.inner, self.state), "mixer", "MambaMixer", shard=0)
        t.add(f"{at}.D", (self.inner,), "mixer", "MambaMixer", shard=0)
        t.add(f"{at}.conv1d.weight", (self.inner, 1, self.kernel), "mixer", "Conv1d", shard=0)
        if self.conv_bias:
            t.add(f"{at}.conv1d.bias", (self.inner,), "mixer", "Conv1d", shard=0)
        t.linear(f"{at}.in_proj", 2 * self.inner, self.hidden, "mixer", bias=self.proj_bias, shard="column")
        t.linear(f"{at}.x_proj", self.rank + 2 * self.state, self.inner, "mixer", shard="row")
        t.linear(f"{at}.dt_proj", self.inner, self.rank, "mixer", bias=True, shard="column")
        t.linear(f"{at}.out_proj", self.hidden, self.inner, "mixer", bias=self.proj_bias, shard="row")
        if self.norms:
            t.norm(f"{at}.dt_layernorm", self.rank)
            t.norm(f"{at}.b_layernorm", self.state)
            t.norm(f"{at}.c_layernorm", self.state)

    def cache(self, layer: int) -> CacheLayer:
        states = (
            StateTensor("conv", (self.kernel - 1, self.inner), shard_dim=1),
            StateTensor("ssm", (self.inner, self.state)),
        )
        return CacheLayer(layer, "state", None, 0, 0, states=states)


def build(fields: Fields, model_type: str) -> Architecture:
    fields.ignore(*_TIME_STEP)
    return _BUILDERS[model_type](fields, model_type)


def pure(fields: Fields, model_type: str) -> Architecture:
    """No attention at all: the length is unlimited, memory per sequence is constant."""
    hidden = fields.integer("hidden_size", limit="width")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    bias, conv_bias = fields.boolean("use_bias", False), fields.boolean("use_conv_bias", True)
    kernel = fields.integer("conv_kernel", 4, limit="width")
    inner_factor = fields.integer("expand", 2, limit="width")
    tied = fields.boolean("tie_word_embeddings", model_type != "mamba2")
    mixer: Mamba1 | Mamba2
    if model_type == "mamba2":
        heads = fields.integer("num_heads", 128, limit="heads")
        size = fields.integer("head_dim", 64, limit="width")
        groups = fields.integer("n_groups", 8, limit="heads")
        inner = inner_factor * hidden
        if inner != heads * size:
            raise ConfigError(f"{heads} x {size} is not expand x hidden_size = {inner}", field="num_heads")
        state = fields.integer("state_size", 128, limit="width")
        mixer = Mamba2(hidden, heads, size, groups, state, kernel, inner, bias, conv_bias)
        fields.ignore("time_step_rank")
    else:
        inner = fields.integer("intermediate_size", inner_factor * hidden, limit="width")
        rank = fields.raw("time_step_rank")
        rank = -(-hidden // 16) if rank in (None, "auto") else fields.integer("time_step_rank", limit="width")
        mixer = Mamba1(
            hidden, inner, rank, fields.integer("state_size", 16, limit="width"), kernel, bias, conv_bias
        )
    t = Tensors()
    t.vocabulary("backbone.embeddings", vocab, hidden)
    for i in range(layers):
        t.layer = i
        t.norm(f"backbone.layers.{i}.norm", hidden)
        at = f"backbone.layers.{i}.mixer"
        mixer.add(t, at)
        if model_type == "falcon_mamba":
            for name, width in (("dt", inner), ("b", mixer.state), ("c", mixer.state)):
                t.buffer(f"{at}.{name}_layernorm.weight", (width,), "WeightlessRMSNorm", None)
    t.layer = None
    t.norm("backbone.norm_f", hidden)
    t.head("lm_head", vocab, hidden, "backbone.embeddings.weight" if tied else None)
    names = {"mamba": "Mamba", "mamba2": "Mamba2", "falcon_mamba": "FalconMamba"}
    return common.decoder(
        fields, model_type, f"{names[model_type]}ForCausalLM", t, Heads(hidden, 1, 1, 1),
        tuple(mixer.cache(i) for i in range(layers)), layers=layers, inner=inner, vocab=vocab,
        max_model_len=_UNLIMITED, position_field="none: a state has no length", gated=False,
    )  # fmt: skip


# No field limits the length; vLLM 0.32.0 takes 2048 when it finds none, but a state of any length fits.
_UNLIMITED = 1 << 31


def _mamba2_of(fields: Fields, hidden: int, **names: str) -> Mamba2:
    """The fields of Bamba, Falcon-H1 and Granite hybrid: mamba_*."""
    inner = fields.integer("mamba_expand", 2, limit="width") * hidden
    stated = fields.optional_integer("mamba_d_ssm", limit="width") if names.get("ssm") else None
    inner = stated or inner
    heads = fields.integer("mamba_n_heads", 128, limit="heads")
    size = fields.raw("mamba_d_head")
    head_size = inner // heads if size in (None, "auto") else fields.integer("mamba_d_head", limit="width")
    if heads * head_size != inner:
        raise ConfigError(f"{heads} x {head_size} is not {inner}", field="mamba_n_heads")
    fields.ignore("mamba_norm_before_gate")
    return Mamba2(
        hidden, heads, head_size, fields.integer("mamba_n_groups", 1, limit="heads"),
        fields.integer("mamba_d_state", 256, limit="width"), fields.integer("mamba_d_conv", 4, limit="width"),
        inner, fields.boolean("mamba_proj_bias", False), fields.boolean("mamba_conv_bias", True),
        fields.boolean("mamba_rms_norm", False) if names.get("ssm") else True,
    )  # fmt: skip


def bamba(fields: Fields, model_type: str) -> Architecture:
    """Bamba and Granite hybrid: each layer is a Mamba-2 or an attention layer, with an MLP or experts."""
    granite = model_type == "granitemoehybrid"
    dims = common.heads_of(fields, kv_default=None if granite else 8)
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", False)
    mlp_bias = not granite and fields.boolean("mlp_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    mixer = _mamba2_of(fields, dims.hidden)
    attends = _attends(fields, layers)
    count = (fields.optional_integer("num_local_experts", 8, limit="width", minimum=0) or 0) if granite else 0
    chosen = (
        (fields.optional_integer("num_experts_per_tok", 2, limit="width", minimum=0) or 0) if granite else 0
    )
    shared = fields.integer("shared_intermediate_size", 1024, limit="width") if granite else 0
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i in range(layers):
        t.layer = i
        at = f"model.layers.{i}"
        if attends[i]:
            t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        else:
            mixer.add(t, f"{at}.mamba")
            cache.append(mixer.cache(i))
        t.norm(f"{at}.input_layernorm", dims.hidden)
        if not granite:
            t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner, bias=mlp_bias)
            t.norm(f"{at}.pre_ff_layernorm", dims.hidden)
            continue
        t.norm(f"{at}.post_attention_layernorm", dims.hidden)
        if count:
            t.router(f"{at}.block_sparse_moe.router", count, dims.hidden)
            t.experts(f"{at}.block_sparse_moe.experts", count, dims.hidden, inner)
        names = ("input_linear", "output_linear")
        t.plain_mlp(f"{at}.shared_mlp", dims.hidden, shared, names=names, fused_gate=True)
    t.layer = None
    t.norm("model.norm" if granite else "model.final_layernorm", dims.hidden)
    t.head("lm_head", vocab, dims.hidden, "model.embed_tokens.weight" if tied else None)
    rotary = Rotary(int(dims.head_size * common.rotary_share(fields, 1.0 if granite else 0.5)), 1)
    if not granite or fields.raw("position_embedding_type") == "rope":
        t.rotary(rotary.dim, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "GraniteMoeHybridForCausalLM" if granite else "BambaForCausalLM", t, dims,
        tuple(cache), layers=layers, inner=chosen * inner + shared if granite else inner, vocab=vocab,
        rotary=rotary, experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _attends(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers are attention: ``layer_types`` (or ``layers_block_type``), else ``attn_layer_indices``."""
    listed = fields.raw("layer_types")
    if listed is None:
        listed = fields.raw("layers_block_type")
    indices = fields.raw("attn_layer_indices")
    if listed is None:
        if indices is not None and not isinstance(indices, list):
            raise ConfigError(f"{shown(indices)} is not a list of layers", field="attn_layer_indices")
        return tuple(i in (indices or ()) for i in range(layers))
    names = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}
    if not isinstance(listed, list) or len(listed) != layers or not all(kind in names for kind in listed):
        raise ConfigError(
            f"{shown(listed)} does not name {layers} layers mamba or attention", field="layer_types"
        )
    return tuple(names[kind] for kind in listed)


def falcon_h1(fields: Fields, model_type: str) -> Architecture:
    """Mamba-2 and attention side by side in every layer: both a state and K and V."""
    dims = common.heads_of(fields, kv_default=8)
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", False)
    mlp_bias = fields.boolean("mlp_bias", False)
    fields.ignore("projectors_bias")
    tied = fields.boolean("tie_word_embeddings", False)
    mixer = _mamba2_of(fields, dims.hidden, ssm="mamba_d_ssm")
    fields.ignore(
        "lm_head_multiplier", "mlp_multipliers", "key_multiplier", "attention_out_multiplier",
        "attention_in_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i in range(layers):
        t.layer = i
        at = f"model.layers.{i}"
        t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner, bias=mlp_bias)
        mixer.add(t, f"{at}.mamba")
        rows = mixer.inner + mixer.channels + mixer.heads
        t.buffer(f"{at}.mamba.mup_vector", (1, 1, rows), "FalconH1Mixer", None)
        t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias)
        t.norm(f"{at}.input_layernorm", dims.hidden)
        t.norm(f"{at}.pre_ff_layernorm", dims.hidden)
        cache += [CacheLayer(i, "full", None, dims.kv_heads, dims.head_size), mixer.cache(i)]
    t.layer = None
    t.norm("model.final_layernorm", dims.hidden)
    t.head("lm_head", vocab, dims.hidden, "model.embed_tokens.weight" if tied else None)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "FalconH1ForCausalLM", t, dims, tuple(cache), layers=layers, inner=inner,
        vocab=vocab, rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def jamba(fields: Fields, model_type: str) -> Architecture:
    """Attention and experts at fixed periods; no rotary embedding."""
    dims = common.heads_of(fields, kv_default=8)
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    inner = fields.integer("intermediate_size", limit="width")
    count = fields.integer("num_experts", 16, limit="width")
    chosen = fields.integer("num_experts_per_tok", 2, limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    attends, routes = (
        _periodic(fields, name, layers, default) for name, default in (("attn", (8, 4)), ("expert", (2, 1)))
    )
    rank = fields.raw("mamba_dt_rank")
    mixer = Mamba1(
        dims.hidden, fields.integer("mamba_expand", 2, limit="width") * dims.hidden,
        -(-dims.hidden // 16) if rank in (None, "auto") else fields.integer("mamba_dt_rank", limit="width"),
        fields.integer("mamba_d_state", 16, limit="width"), fields.integer("mamba_d_conv", 4, limit="width"),
        fields.boolean("mamba_proj_bias", False), fields.boolean("mamba_conv_bias", True), norms=True,
    )  # fmt: skip
    fields.ignore("sliding_window", "mamba_inner_layernorms")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i in range(layers):
        t.layer = i
        at = f"model.layers.{i}"
        if attends[i]:
            t.attention(f"{at}.self_attn", dims)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        else:
            mixer.add(t, f"{at}.mamba")
            cache.append(mixer.cache(i))
        if routes[i] and count > 1:
            t.router(f"{at}.feed_forward.router", count, dims.hidden)
            t.experts(f"{at}.feed_forward.experts", count, dims.hidden, inner)
        else:
            t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner)
        t.norm(f"{at}.input_layernorm", dims.hidden)
        t.norm(f"{at}.pre_ff_layernorm", dims.hidden)
    t.layer = None
    t.norm("model.final_layernorm", dims.hidden)
    t.head("lm_head", vocab, dims.hidden, "model.embed_tokens.weight" if tied else None)
    return common.decoder(
        fields, model_type, "JambaForCausalLM", t, dims, tuple(cache), layers=layers, inner=chosen * inner,
        vocab=vocab, experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _periodic(fields: Fields, name: str, layers: int, default: tuple[int, int]) -> tuple[bool, ...]:
    period = fields.integer(f"{name}_layer_period", default[0], limit="layers")
    offset = fields.integer(f"{name}_layer_offset", default[1], limit="layers", minimum=0)
    return tuple(i % period == offset for i in range(layers))


def nemotron_h(fields: Fields, model_type: str) -> Architecture:
    """One mixer per layer: Mamba-2 (M), attention (*), a plain MLP (-) or experts (E), without gates."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    kv_heads = fields.integer("num_key_value_heads", 8, limit="heads")
    common.divisible(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    name = "attention_head_dim" if "head_dim" not in fields.config else "head_dim"
    dims = Heads(hidden, heads, kv_heads, fields.integer(name, 128, limit="width"))
    fields.ignore("attention_head_dim")
    kinds = _nemotron_kinds(fields)
    layers, vocab = len(kinds), fields.integer("vocab_size", limit="vocab")
    mamba_heads = fields.integer("mamba_num_heads", 128, limit="heads")
    size = fields.integer("mamba_head_dim", 64, limit="width")
    dtype = fields.raw("mamba_ssm_cache_dtype")
    if dtype not in (None, "auto", "float32", "float16", "bfloat16"):
        raise ConfigError(f"{shown(dtype)} is not float32, float16 or bfloat16", field="mamba_ssm_cache_dtype")
    bias = fields.boolean("use_bias", False)
    mixer = Mamba2(
        hidden, mamba_heads, size, fields.integer("n_groups", 8, limit="heads"),
        fields.integer("ssm_state_size", 128, limit="width"), fields.integer("conv_kernel", 4, limit="width"),
        mamba_heads * size, bias, fields.boolean("use_conv_bias", True),
        dtype=None if dtype == "auto" else dtype,
    )  # fmt: skip
    mlp_bias = fields.boolean("mlp_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    inner = fields.integer("intermediate_size", 21504, limit="width")
    count = fields.integer("n_routed_experts", 8, limit="width") if "E" in kinds else 0
    chosen = fields.integer("num_experts_per_tok", 2, limit="width") if count else 0
    expert = fields.integer("moe_intermediate_size", 7688, limit="width") if count else 0
    latent = (fields.optional_integer("moe_latent_size", limit="width") if count else None) or hidden
    number = (fields.optional_integer("n_shared_experts", 1, limit="width", minimum=0) or 0) if count else 0
    shared = fields.integer("moe_shared_expert_intermediate_size", 7688, limit="width") if number else 0
    fields.ignore(
        "attention_bias", "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type",
        "mtp_hybrid_override_pattern", "mamba_proj_bias", "sliding_window", "time_step_rank",
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size",
        "n_shared_experts",
        "moe_shared_expert_intermediate_size", "mtp_num_hidden_layers",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("model.embeddings", vocab, hidden)
    cache = []
    for i, kind in enumerate(kinds):
        t.layer = i
        at = f"model.layers.{i}.mixer"
        t.norm(f"model.layers.{i}.norm", hidden)
        if kind == "M":
            mixer.add(t, at)
            cache.append(mixer.cache(i))
        elif kind == "*":
            t.attention(at, dims)  # no biases, whatever attention_bias says (modeling_nemotron_h.py)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        elif kind == "-":
            t.plain_mlp(at, hidden, inner, bias=mlp_bias)
        else:
            names = ("up_proj", "down_proj")
            t.experts(f"{at}.experts", count, latent, expert, gated=False, names=names)
            t.router(f"{at}.gate", count, hidden)
            t.correction_bias(f"{at}.gate.e_score_correction_bias", (count,))
            if shared:
                t.plain_mlp(f"{at}.shared_experts", hidden, shared, bias=mlp_bias)
            if latent != hidden:
                t.linear(f"{at}.fc1_latent_proj", latent, hidden, "mlp", bias=mlp_bias)
                t.linear(f"{at}.fc2_latent_proj", hidden, latent, "mlp", bias=mlp_bias)
    t.layer = None
    t.norm("model.norm_f", hidden)
    t.head("lm_head", vocab, hidden, "model.embeddings.weight" if tied else None)
    return common.decoder(
        fields, model_type, "NemotronHForCausalLM", t, dims, tuple(cache), layers=layers,
        inner=max(inner if "-" in kinds else 0, chosen * expert + shared, mixer.inner), vocab=vocab,
        gated=False, experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _nemotron_kinds(fields: Fields) -> str:
    """One letter per layer, from ``hybrid_override_pattern`` or ``layers_block_type``."""
    pattern = fields.raw("hybrid_override_pattern")
    if pattern is None:
        letters = {
            "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-",
            "moe": "E",
        }  # fmt: skip
        listed = fields.raw("layers_block_type")
        if not isinstance(listed, list) or not listed or not all(kind in letters for kind in listed):
            raise ConfigError(f"{shown(listed)} does not name the layers", field="layers_block_type")
        pattern = "".join(letters[kind] for kind in listed)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*-E"):
        raise ConfigError(f"{shown(pattern)} is not made of M, *, - and E", field="hybrid_override_pattern")
    stated = fields.optional_integer("num_hidden_layers", limit="layers")
    if stated not in (None, len(pattern)):
        raise ConfigError(f"{stated} contradicts a pattern of {len(pattern)} layers", field="num_hidden_layers")
    return pattern


def zamba(fields: Fields, model_type: str) -> Architecture:
    """Mamba-1 heads everywhere; one attention block of twice the width whose weights all its places share."""
    hidden = fields.integer("hidden_size", limit="width")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    inner = fields.integer("intermediate_size", 14848, limit="width")
    heads = fields.integer("num_attention_heads", 16, limit="heads")
    kv_heads = fields.integer("num_key_value_heads", 16, limit="heads")
    width = fields.integer("attention_hidden_size", 2 * hidden, limit="width")
    size = fields.integer("attention_head_dim", 2 * hidden // heads, limit="width")
    mamba_heads = fields.integer("n_mamba_heads", 2, limit="heads")
    state = fields.integer("mamba_d_state", 16, limit="width")
    kernel = fields.integer("mamba_d_conv", 4, limit="width")
    mixed = fields.integer("mamba_expand", 2, limit="width") * hidden
    rank = fields.raw("mamba_dt_rank")
    rank = -(-hidden // 16) if rank in (None, "auto") else fields.integer("mamba_dt_rank", limit="width")
    common.divisible(mixed, mamba_heads, "hidden_size", "n_mamba_heads")
    tied = fields.boolean("tie_word_embeddings", True)
    bias = fields.boolean("mamba_proj_bias", False)
    conv_bias = fields.boolean("mamba_conv_bias", True)
    kinds = _zamba_kinds(fields, layers)
    fields.ignore("attn_layer_period", "attn_layer_offset")
    per_head = mixed // mamba_heads
    dims = Heads(width, heads, kv_heads, size)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    cache = []
    first: str | None = None
    for i, kind in enumerate(kinds):
        t.layer = i
        at = f"model.layers.{i}"
        if kind == "hybrid":
            begin = len(t.specs)
            shared = f"{at}.shared_transf"
            kv = kv_heads * size
            for name, rows in (("q_proj", heads * size), ("k_proj", kv), ("v_proj", kv)):
                t.linear(f"{shared}.self_attn.{name}", rows, width, shard="column")
            t.linear(f"{shared}.self_attn.o_proj", hidden, heads * size, shard="row")
            t.gated_mlp(f"{shared}.feed_forward", hidden, inner)
            t.norm(f"{shared}.input_layernorm", width)
            t.norm(f"{shared}.pre_ff_layernorm", hidden)
            first = _tie(t, begin, shared, first)
            t.linear(f"{at}.linear", hidden, hidden, "mixer")
            cache.append(CacheLayer(i, "full", None, kv_heads, size))
        here = f"{at}.mamba_decoder" if kind == "hybrid" else at
        m = f"{here}.mamba"
        for name, shape in (
            ("x_proj_weight", (mamba_heads, rank + 2 * state, per_head)),
            ("dt_proj_weight", (mamba_heads, per_head, rank)),
            ("dt_proj_bias", (mamba_heads, per_head)), ("A_log", (mamba_heads, per_head, state)),
            ("D", (mamba_heads, per_head)),
        ):  # fmt: skip
            t.add(f"{m}.{name}", shape, "mixer", "ZambaMambaMixer", shard=0)
        t.add(f"{m}.conv1d.weight", (mixed, 1, kernel), "mixer", "Conv1d", shard=0)
        if conv_bias:
            t.add(f"{m}.conv1d.bias", (mixed,), "mixer", "Conv1d", shard=0)
        t.linear(f"{m}.in_proj", 2 * mixed, hidden, "mixer", bias=bias, shard="column")
        t.linear(f"{m}.out_proj", hidden, mixed, "mixer", bias=bias, shard="row")
        t.norm(f"{here}.input_layernorm", hidden)
        states = (
            StateTensor("conv", (kernel - 1, mixed), shard_dim=1),
            StateTensor("ssm", (mamba_heads, per_head, state)),
        )
        cache.append(CacheLayer(i, "state", None, 0, 0, states=states))
    t.layer = None
    t.norm("model.final_layernorm", hidden)
    t.head("lm_head", vocab, hidden, "model.embed_tokens.weight" if tied else None)
    return common.decoder(
        fields, model_type, "ZambaForCausalLM", t, Heads(hidden, heads, kv_heads, size), tuple(cache),
        layers=layers, inner=max(inner, dims.hidden), vocab=vocab,
    )  # fmt: skip


def _zamba_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    listed = fields.raw("layers_block_type")
    if listed is None:
        raise ConfigError("missing", field="layers_block_type", hint="which layers are hybrid")
    names = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}
    if not isinstance(listed, list) or len(listed) != layers or not all(kind in names for kind in listed):
        raise ConfigError(f"{shown(listed)} does not name {layers} layers", field="layers_block_type")
    return tuple(names[kind] for kind in listed)


def _tie(t: Tensors, begin: int, here: str, first: str | None) -> str:
    """Tie what was added since ``begin`` below ``here`` to the same tensors below ``first``."""
    from tonnage.planner.records import replace

    if first is None:
        return here
    for k in range(begin, len(t.specs)):
        name = t.specs[k].name
        t.specs[k] = replace(t.specs[k], tied_to=first + name[len(here) :])
    return first


def zamba2(fields: Fields, model_type: str) -> Architecture:
    """Mamba-2 and ``num_mem_blocks`` shared attention blocks; each place has its own low-rank adapters."""
    hidden = fields.integer("hidden_size", limit="width")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
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
        mixed, bias, fields.boolean("use_conv_bias", True),
    )  # fmt: skip
    if fields.boolean("use_shared_attention_adapter", False):
        raise UnsupportedArchitecture(
            "adapters on shared attention are not planned", field="use_shared_attention_adapter"
        )
    kinds = _zamba_kinds(fields, layers)
    fields.ignore("mamba_headdim", "kv_channels", "num_query_groups", "hybrid_layer_ids", "use_long_context")
    rope = fields.boolean("use_mem_rope", False)
    hybrids = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    firsts: dict[int, str] = {}
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    cache = []
    for i, kind in enumerate(kinds):
        t.layer = i
        at = f"model.layers.{i}"
        if kind == "hybrid":
            block = hybrids.index(i) % blocks
            begin = len(t.specs)
            shared = f"{at}.shared_transformer"
            kv = kv_heads * size
            for name, rows in (("q_proj", heads * size), ("k_proj", kv), ("v_proj", kv)):
                t.linear(f"{shared}.self_attn.{name}", rows, width, shard="column")
            t.linear(f"{shared}.self_attn.o_proj", hidden, heads * size, shard="row")
            ff = f"{shared}.feed_forward"
            t.linear(f"{ff}.gate_up_proj", 2 * inner, hidden, "mlp", bias=bias, shard="column")
            t.linear(f"{ff}.down_proj", hidden, inner, "mlp", bias=bias, shard="row")
            for k in range(len(hybrids)):
                if k % blocks == block:
                    t.linear(f"{ff}.gate_up_proj_adapter_list.{k}.0", rank, hidden, "mlp")
                    t.linear(f"{ff}.gate_up_proj_adapter_list.{k}.1", 2 * inner, rank, "mlp")
            t.norm(f"{shared}.input_layernorm", width)
            t.norm(f"{shared}.pre_ff_layernorm", hidden)
            firsts[block] = _tie(t, begin, shared, firsts.get(block))
            t.linear(f"{at}.linear", hidden, hidden, "mixer")
            cache.append(CacheLayer(i, "full", None, kv_heads, size))
        here = f"{at}.mamba_decoder" if kind == "hybrid" else at
        mixer.add(t, f"{here}.mamba")
        t.norm(f"{here}.input_layernorm", hidden)
        cache.append(mixer.cache(i))
    t.layer = None
    t.norm("model.final_layernorm", hidden)
    t.head("lm_head", vocab, hidden, "model.embed_tokens.weight" if tied else None)
    if rope:
        t.rotary(size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "Zamba2ForCausalLM", t, Heads(hidden, heads, kv_heads, size), tuple(cache),
        layers=layers, inner=inner, vocab=vocab,
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[Fields, str], Architecture]] = {
    "mamba": pure,
    "mamba2": pure,
    "falcon_mamba": pure,
    "bamba": bamba,
    "granitemoehybrid": bamba,
    "falcon_h1": falcon_h1,
    "jamba": jamba,
    "nemotron_h": nemotron_h,
    "zamba": zamba,
    "zamba2": zamba2,
}
