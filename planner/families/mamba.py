"""State-space models: the mixers Mamba-1 and Mamba-2, and the families Mamba 1, Mamba 2 and Falcon-Mamba.

Shapes follow transformers 5.19 / 5.23, models/<family>/. Models that mix Mamba and attention are in
mamba_hybrid.py and zamba.py.

Per sequence, a Mamba layer keeps the last ``kernel - 1`` inputs of its convolution, and a recurrent state. Both
have the same shapes in vLLM 0.32.0 (model_executor/layers/mamba/mamba_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.family import Family
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, StateTensor
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import Heads

TIME_STEP = (
    "time_step_floor", "time_step_init_scheme", "time_step_limit", "time_step_max", "time_step_min",
    "time_step_scale", "rescale_prenorm_residual", "residual_in_fp32", "use_mambapy", "use_associative_scan",
    "use_mamba_kernels", "chunk_size", "mamba_chunk_size", "num_logits_to_keep", "expand", "mamba_expand",
    "z_loss_coefficient", "mixer_rms_eps", "mamba_hidden_act", "hidden_mamba_act", "mlp_hidden_act",
    "use_mem_eff_path", "position_embedding_type",
)  # fmt: skip


def auto(fields: Fields, name: str, default: int) -> int:
    """Return the width in the config field ``name``, or ``default`` if the field is "auto" or missing."""
    return default if fields.raw(name) in (None, "auto") else fields.integer(name, limit="width")


def chunk_of(fields: Fields, name: str = "chunk_size", default: int = 256) -> int:
    """Return the chunk size, in tokens, with which a Mamba-2 kernel processes a prompt."""
    return fields.optional_integer(name, default, limit="positions") or default


@dataclass(frozen=True, slots=True)
class Mamba2:
    """The sizes of one Mamba-2 mixer."""

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
    out_bias: bool | None = None  # bias of the output projection; None means the value of proj_bias
    chunk: int = 256

    @property
    def channels(self) -> int:
        """Return the number of channels of the Mamba-2 mixer's convolution."""
        return self.inner + 2 * self.groups * self.state

    def add(self, t: Tensors, at: str) -> None:
        """Add the Mamba-2 mixer's tensors below module ``at``."""
        for name in ("dt_bias", "A_log", "D"):
            t.add(f"{at}.{name}", (self.heads,), "mixer", "Mamba2Mixer", shard=0)
        t.conv1d(f"{at}.conv1d", self.channels, self.kernel, bias=self.conv_bias)
        rows = self.inner + self.channels + self.heads
        t.linear(f"{at}.in_proj", rows, self.hidden, "mixer", bias=self.proj_bias, shard="column")
        if self.norm:
            t.norm(f"{at}.norm", self.inner)
        out_bias = self.proj_bias if self.out_bias is None else self.out_bias
        t.linear(f"{at}.out_proj", self.hidden, self.inner, "mixer", bias=out_bias, shard="row")

    def cache(self, layer: int) -> CacheLayer:
        """Return layer ``layer``'s cache entry: convolution and recurrent state of its Mamba-2 mixer."""
        states = (
            StateTensor("conv", (self.kernel - 1, self.channels), shard_dim=1),
            StateTensor("ssm", (self.heads, self.head_size, self.state), self.dtype, chunk=self.chunk),
        )
        return CacheLayer(layer, "state", None, 0, 0, states=states)


@dataclass(frozen=True, slots=True)
class Mamba1:
    """The sizes of one Mamba-1 mixer; ``norms`` is whether dt, B and C have norms, as in Jamba."""

    hidden: int
    inner: int
    rank: int
    state: int
    kernel: int
    proj_bias: bool
    conv_bias: bool
    norms: bool = False

    def add(self, t: Tensors, at: str) -> None:
        """Add the Mamba-1 mixer's tensors below module ``at``."""
        t.add(f"{at}.A_log", (self.inner, self.state), "mixer", "MambaMixer", shard=0)
        t.add(f"{at}.D", (self.inner,), "mixer", "MambaMixer", shard=0)
        t.conv1d(f"{at}.conv1d", self.inner, self.kernel, bias=self.conv_bias)
        t.linear(f"{at}.in_proj", 2 * self.inner, self.hidden, "mixer", bias=self.proj_bias, shard="column")
        t.linear(f"{at}.x_proj", self.rank + 2 * self.state, self.inner, "mixer", shard="row")
        t.linear(f"{at}.dt_proj", self.inner, self.rank, "mixer", bias=True, shard="column")
        t.linear(f"{at}.out_proj", self.hidden, self.inner, "mixer", bias=self.proj_bias, shard="row")
        if self.norms:
            t.norm(f"{at}.dt_layernorm", self.rank)
            t.norms(at, self.state, "b_layernorm", "c_layernorm")

    def cache(self, layer: int) -> CacheLayer:
        """Return layer ``layer``'s cache entry: convolution and recurrent state of its Mamba-1 mixer."""
        states = (
            StateTensor("conv", (self.kernel - 1, self.inner), shard_dim=1),
            StateTensor("ssm", (self.inner, self.state)),
        )
        return CacheLayer(layer, "state", None, 0, 0, states=states)


def _mamba1(fields: Fields, hidden: int) -> Mamba1:
    """Return the Mamba-1 mixer that the fields of Mamba and Falcon-Mamba describe."""
    inner = fields.integer("expand", 2, limit="width") * hidden
    return Mamba1(
        hidden, fields.integer("intermediate_size", inner, limit="width"),
        auto(fields, "time_step_rank", -(-hidden // 16)), fields.integer("state_size", 16, limit="width"),
        fields.integer("conv_kernel", 4, limit="width"), fields.boolean("use_bias", False),
        fields.boolean("use_conv_bias", True),
    )  # fmt: skip


def _mamba2(fields: Fields, hidden: int) -> Mamba2:
    """Return the Mamba-2 mixer that the fields of Mamba 2 describe."""
    inner = fields.integer("expand", 2, limit="width") * hidden
    heads = fields.integer("num_heads", 128, limit="heads")
    size = fields.integer("head_dim", 64, limit="width")
    if inner != heads * size:
        raise ConfigError(f"{heads} x head_dim {size} is not expand x hidden_size = {inner}", field="num_heads")
    fields.ignore("time_step_rank")
    return Mamba2(
        hidden, heads, size, fields.integer("n_groups", 8, limit="heads"),
        fields.integer("state_size", 128, limit="width"), fields.integer("conv_kernel", 4, limit="width"),
        inner, fields.boolean("use_bias", False), fields.boolean("use_conv_bias", True), chunk=chunk_of(fields),
    )  # fmt: skip


def build(
    fields: Fields, model_type: str, *, class_name: str, mixer_of: Callable[[Fields, int], Mamba1 | Mamba2],
    tied: bool = True, normed: bool = False,
) -> Architecture:  # fmt: skip
    """Return the architecture of a model whose layers are all Mamba layers.

    Without attention, the sequence length has no limit and the memory per sequence is constant.

    Args:
        fields: the config.
        model_type: type of the model.
        class_name: the causal language model's class in transformers.
        mixer_of: function (config, hidden size) -> the mixer that every layer has.
        tied: default of tie_word_embeddings.
        normed: whether dt, B and C have norms without learned weights.
    """
    hidden = fields.integer("hidden_size", limit="width")
    layers, vocab = common.layers_and_vocab(fields)
    mixer = mixer_of(fields, hidden)
    tied = fields.boolean("tie_word_embeddings", tied)
    t = Tensors()
    t.vocabulary("backbone.embeddings", vocab, hidden)
    for _, at in t.layers(layers, "backbone.layers"):
        t.norm(f"{at}.norm", hidden)
        mixer.add(t, f"{at}.mixer")
        if normed:
            for name, width in (("dt", mixer.inner), ("b", mixer.state), ("c", mixer.state)):
                t.buffer(f"{at}.mixer.{name}_layernorm.weight", (width,), "WeightlessRMSNorm", None)
    t.close("backbone.norm_f", "backbone.embeddings", vocab, hidden, tied)
    return common.decoder(
        fields, model_type, class_name, t, Heads(hidden, 1, 1, 1),
        tuple(mixer.cache(i) for i in range(layers)), layers=layers, inner=mixer.inner, vocab=vocab,
        max_model_len=_UNLIMITED, position_field="none: a state has no length", gated=False,
    )  # fmt: skip


# No config field limits the sequence length. vLLM 0.32.0 then assumes 2048, but the size of the state does not
# depend on the length.
_UNLIMITED = 1 << 31


_family = partial(Family, ignored=TIME_STEP, hf="recurrent")
FAMILIES = {
    "mamba": _family(partial(build, class_name="MambaForCausalLM", mixer_of=_mamba1)),
    "mamba2": _family(partial(build, class_name="Mamba2ForCausalLM", mixer_of=_mamba2, tied=False)),
    "falcon_mamba": _family(partial(build, class_name="FalconMambaForCausalLM", mixer_of=_mamba1, normed=True)),
}
