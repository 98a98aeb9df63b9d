"""What the families share: geometry checks, the tensors of linear layers and norms, rotary tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads, Recipe
from tonnage.planner.model.tensor import Role, TensorSpec
from tonnage.planner.records import replace

# transformers 5.19, modeling_rope_utils.py: each of these keeps one table of rotary_dim / 2 frequencies.
Shard = Literal["column", "row"] | None

# Far more than any published model has: DeepSeek-V4-Pro, with 2,201, has the most, and as many in each of the
# 1,000 layers that planner/model/fields.py allows would be 36,000. Beyond it, numbers multiply (adapters of
# every layer in every layer); each TensorSpec is an object of 300 bytes and costs a plan 10 us.
MAX_TENSORS = 60_000

_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "mrope")


class Tensors:
    """Collects the tensors of a model in order. ``layer`` is the model layer of what is added next;
    ``role`` replaces every role while it is set (towers and encoders); ``linear_class`` owns linear layers."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.layer: int | None = None
        self.role: Role | None = None
        self.linear_class = "Linear"

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        role: Role,
        module_class: str,
        *,
        shard: int | None = None,
        kv: tuple[int, int] = (0, 0),
        dtype: str | None = None,
        tied_to: str | None = None,
        matrices: int = 1,
        transposed: bool = False,
        stored: str | None = None,
    ) -> None:
        """One tensor. ``kv``: (rows of KV heads, number of KV heads) along the divided dimension."""
        if len(self.specs) >= MAX_TENSORS:
            raise UnsupportedArchitecture(
                f"the sizes give a model of more than {MAX_TENSORS:,} tensors", field=name
            )
        if self.role is not None and role != "buffer":
            role = self.role
        self.specs.append(
            TensorSpec(
                name,
                shape,
                role,
                module_class,
                self.layer,
                tied_to,
                dtype,
                shard,
                *kv,
                matrices,
                transposed,
                stored,
            )
        )

    def linear(
        self,
        module: str,
        out: int,
        into: int,
        role: Role = "attention",
        *,
        bias: bool = False,
        shard: Shard = None,
        kv: tuple[int, int] = (0, 0),
        module_class: str | None = None,
        dtype: str | None = None,
        stored: str | None = None,
    ) -> None:
        """Weight [out, in] and, if any, bias [out]. ``column`` divides the outputs, ``row`` the inputs."""
        if out < 1 or into < 1:  # a quotient of two sizes, rounded down
            raise ConfigError(f"the sizes give it the shape [{out}, {into}]", field=f"{module}.weight")
        dim = {"column": 0, "row": 1, None: None}[shard]
        module_class = module_class or self.linear_class
        shape, across = (out, into), dim
        if module_class == "Conv1D":  # GPT-2's: turned, which quantizers undo
            shape, across = (into, out), None if dim is None else 1 - dim
        self.add(f"{module}.weight", shape, role, module_class, shard=across, kv=kv, dtype=dtype, stored=stored)
        if bias:
            self.add(f"{module}.bias", (out,), role, module_class, shard=0 if dim == 0 else None, kv=kv)

    def norm(self, module: str, size: int, kind: str = "rms") -> None:
        """``rms``: a weight; ``layer``: weight and bias; ``layer-weight``: a LayerNorm without bias;
        ``none``: nothing to learn."""
        if kind == "none":
            return
        module_class = "RMSNorm" if kind == "rms" else "LayerNorm"
        self.add(f"{module}.weight", (size,), "norm", module_class)
        if kind == "layer":
            self.add(f"{module}.bias", (size,), "norm", module_class)

    def embedding(
        self, module: str, rows: int, width: int, tied_to: str | None = None, shard: int | None = None
    ) -> None:
        """A table; ``shard`` 0 for the vocabulary (divided by rows), None for positions."""
        self.add(f"{module}.weight", (rows, width), "embedding", "Embedding", tied_to=tied_to, shard=shard)

    def vocabulary(self, module: str, rows: int, width: int, tied_to: str | None = None) -> None:
        self.embedding(module, rows, width, tied_to, 0)

    def head(self, module: str, vocab: int, width: int, tied_to: str | None, bias: bool = False) -> None:
        self.add(f"{module}.weight", (vocab, width), "head", "Linear", tied_to=tied_to, shard=0)
        if bias:
            self.add(f"{module}.bias", (vocab,), "head", "Linear", shard=0)

    def layers(self, count: int, prefix: str) -> Iterator[tuple[int, str]]:
        """(index, ``prefix``.index) of each layer, which what is added meanwhile belongs to."""
        for self.layer in range(count):
            yield self.layer, f"{prefix}.{self.layer}"
        self.layer = None

    def layer_norms(self, at: str, size: int) -> None:
        """The two RMSNorms most layers have."""
        self.norm(f"{at}.input_layernorm", size)
        self.norm(f"{at}.post_attention_layernorm", size)

    def close(self, norm: str, embedding: str, vocab: int, width: int, tied: bool) -> None:
        """What follows the layers: the final norm, and the head, which may be tied to ``embedding``."""
        self.layer = None
        self.norm(norm, width)
        self.head("lm_head", vocab, width, f"{embedding}.weight" if tied else None)

    def buffer(
        self, name: str, shape: tuple[int, ...], module_class: str, dtype: str | None, stored: str | None = None
    ) -> None:
        self.add(name, shape, "buffer", module_class, dtype=dtype, stored=stored)

    def attention(
        self,
        at: str,
        dims: Heads,
        *,
        bias: bool = False,
        out_bias: bool = False,
        out: str = "o_proj",
        qk_norm: str = "none",
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
    ) -> None:
        """Separate q, k, v and output projections under ``at``. ``qk_norm``: ``head`` (a weight of one
        head), ``full`` (of all heads) or ``none``."""
        kv_rows, value_rows = dims.kv_heads * dims.head_size, dims.kv_heads * dims.value_size
        for name, rows, kv in (
            ("q_proj", dims.heads * dims.head_size, (0, 0)),
            ("k_proj", kv_rows, (kv_rows, dims.kv_heads)),
            ("v_proj", value_rows, (value_rows, dims.kv_heads)),
        ):
            self.linear(f"{at}.{name}", rows, dims.hidden, bias=bias, shard="column", kv=kv)
        self.linear(f"{at}.{out}", dims.hidden, dims.heads * dims.value_size, bias=out_bias, shard="row")
        if qk_norm != "none":
            full = qk_norm == "full"
            q_norm, k_norm = norm_names
            self.norm(f"{at}.{q_norm}", dims.heads * dims.head_size if full else dims.head_size)
            self.norm(f"{at}.{k_norm}", kv_rows if full else dims.head_size)

    def fused_attention(
        self, at: str, dims: Heads, *, qkv: str, out: str, bias: bool = False, out_bias: bool = False
    ) -> None:
        """One projection for q, k and v."""
        kv_rows = dims.kv_heads * (dims.head_size + dims.value_size)
        rows = dims.heads * dims.head_size + kv_rows
        kv = (kv_rows, dims.kv_heads)
        self.linear(f"{at}.{qkv}", rows, dims.hidden, bias=bias, shard="column", kv=kv)
        self.linear(f"{at}.{out}", dims.hidden, dims.heads * dims.value_size, bias=out_bias, shard="row")

    def gated_mlp(
        self,
        at: str,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        role: Role = "mlp",
    ) -> None:
        gate, up, down = names
        self.linear(f"{at}.{gate}", inner, hidden, role, bias=bias, shard="column")
        self.linear(f"{at}.{up}", inner, hidden, role, bias=bias, shard="column")
        self.linear(f"{at}.{down}", hidden, inner, role, bias=bias, shard="row")

    def plain_mlp(
        self,
        at: str,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        names: tuple[str, str] = ("up_proj", "down_proj"),
        fused_gate: bool = False,
    ) -> None:
        """Up and down; ``fused_gate``: the first matrix holds gate and up."""
        up, down = names
        self.linear(f"{at}.{up}", inner * (2 if fused_gate else 1), hidden, "mlp", bias=bias, shard="column")
        self.linear(f"{at}.{down}", hidden, inner, "mlp", bias=bias, shard="row")

    def experts(
        self,
        at: str,
        count: int,
        hidden: int,
        inner: int,
        *,
        gated: bool = True,
        transposed: bool = False,
        bias: bool = False,
        names: tuple[str, str] = ("gate_up_proj", "down_proj"),
        module_class: str = "Experts",
    ) -> None:
        """All routed experts of a layer as two tensors [experts, out, in] (or [experts, in, out])."""
        up, down = names
        matrices = 2 if gated else 1
        rows = matrices * inner
        up_shape = (count, hidden, rows) if transposed else (count, rows, hidden)
        down_shape = (count, inner, hidden) if transposed else (count, hidden, inner)
        extra: dict[str, Any] = {"transposed": transposed}
        self.add(
            f"{at}.{up}",
            up_shape,
            "expert",
            module_class,
            shard=2 if transposed else 1,
            matrices=matrices,
            **extra,
        )
        if bias:
            self.add(f"{at}.{up}_bias", (count, rows), "expert", module_class, shard=1)
        self.add(f"{at}.{down}", down_shape, "expert", module_class, shard=1 if transposed else 2, **extra)
        if bias:
            self.add(f"{at}.{down}_bias", (count, hidden), "expert", module_class)

    def router(
        self,
        module: str,
        count: int,
        hidden: int,
        *,
        linear: bool = False,
        bias: bool = False,
        dtype: str | None = None,
        stored: str | None = None,
    ) -> None:
        """The routing weights [experts, hidden]; ``linear``: an nn.Linear, which bitsandbytes replaces."""
        kind = "Linear" if linear else "Router"
        self.linear(module, count, hidden, "router", bias=bias, module_class=kind, dtype=dtype, stored=stored)

    def correction_bias(self, name: str, shape: tuple[int, ...], dtype: str | None = "float32") -> None:
        """e_score_correction_bias, a buffer of the models' own classes. Published in fp32 (DeepSeek-V3's and
        MiniMax-M2's headers); transformers 5.19 keeps it so where a family's _keep_in_fp32_modules_strict or
        its constructor says so, else it is loaded in the model's dtype (``dtype`` None)."""
        self.buffer(name, shape, "Router", dtype, "float32")

    def rotary(self, dim: int, *prefixes: str) -> None:
        self.specs.extend(rotary_buffers(Rotary(dim, 1), prefixes))


def rotary_buffers(rotary: Rotary, prefixes: tuple[str, ...]) -> Iterator[TensorSpec]:
    """``inv_freq`` and its copy ``original_inv_freq``, fp32 (transformers 5.19, *RotaryEmbedding)."""
    for prefix in prefixes:
        for name in ("inv_freq", "original_inv_freq"):
            # ceil: arange(0, dim, 2)
            shape = ((rotary.dim + 1) // 2,)
            yield TensorSpec(f"{prefix}{name}", shape, "buffer", "RotaryEmbedding", dtype="float32")


def divisible(numerator: int, denominator: int, field: str, of: str) -> None:
    if numerator % denominator:
        raise ConfigError(f"{numerator} is not a multiple of {of} = {denominator}", field=field)


def geometry(
    fields: Fields, *, kv_default: int | None = None, head_default: int | None = None
) -> tuple[int, int, int, int]:
    """(hidden_size, num_attention_heads, num_key_value_heads, head_dim), checked against each other."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    kv_heads = fields.integer("num_key_value_heads", kv_default or heads, limit="heads")
    head_size = fields.optional_integer("head_dim", limit="width")
    if head_size is None and head_default is not None:
        head_size = head_default
    if head_size is None:
        divisible(hidden, heads, fields.name("hidden_size"), fields.name("num_attention_heads"))
        head_size = hidden // heads
    divisible(heads, kv_heads, fields.name("num_attention_heads"), fields.name("num_key_value_heads"))
    return hidden, heads, kv_heads, head_size


def rope_kind(parameters: object, field: str) -> tuple[str, float]:
    """(rope type, factor by which positions may exceed max_position_embeddings) of ``rope_parameters`` or
    ``rope_scaling``; refuses a type that may hold other tables.

    Of the known types only linear and dynamic scale a length that is not scaled already (vLLM 0.32.0,
    config/model.py _get_and_verify_max_len).
    """
    if parameters is None:
        return "default", 1.0
    if not isinstance(parameters, dict):
        raise ConfigError(f"{shown(parameters)} is not an object", field=field)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise UnsupportedArchitecture(
            f"{shown(kind)} is not one of {', '.join(_ROPE_KINDS)}", field=f"{field}.rope_type"
        )
    if kind not in ("linear", "dynamic"):
        return str(kind), 1.0
    factor = parameters.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 1024:
        raise ConfigError(f"{shown(factor)} is not a number from 1 to 1024", field=f"{field}.factor")
    return str(kind), float(factor)


def read_rope(fields: Fields) -> tuple[str, float]:
    """:func:`rope_kind` of a model with one table; ``rope_parameters`` is what transformers 5 writes."""
    fields.ignore("rope_theta")
    new, old = fields.raw("rope_parameters"), fields.raw("rope_scaling")
    if new is not None:
        return rope_kind(new, "rope_parameters")
    return rope_kind(old, "rope_scaling")


def window_of(fields: Fields, name: str = "sliding_window") -> int | None:
    return fields.optional_integer(name, limit="positions")


def cache_layers(
    kinds: tuple[str, ...], window: int | None, kv_heads: int, head_size: int
) -> tuple[CacheLayer, ...]:
    """Per-layer kinds (full_attention | sliding_attention) -> CacheLayers."""
    out = []
    for index, kind in enumerate(kinds):
        if kind == "full_attention":
            out.append(CacheLayer(index, "full", None, kv_heads, head_size))
        elif window is None:
            raise ConfigError(
                f"layer {index} is sliding_attention but there is no window", field="sliding_window"
            )
        else:
            out.append(CacheLayer(index, "sliding", window, kv_heads, head_size))
    return tuple(out)


def heads_of(fields: Fields, *, kv_default: int | None = None, head_default: int | None = None) -> Heads:
    """:func:`geometry` as :class:`Heads`. The defaults hold where the file does not have the field."""
    return Heads(*geometry(fields, kv_default=kv_default, head_default=head_default))


def full_layers(layers: int, dims: Heads) -> tuple[CacheLayer, ...]:
    return cache_layers(("full_attention",) * layers, None, dims.kv_heads, dims.head_size)


def decoder(
    fields: Fields,
    model_type: str,
    class_name: str,
    t: Tensors,
    dims: Heads,
    cache: tuple[CacheLayer, ...],
    *,
    layers: int,
    inner: int,
    vocab: int,
    max_model_len: int | None = None,
    position_field: str = "max_position_embeddings",
    rotary: Rotary | None = None,
    gated: bool = True,
    experts: int = 0,
    experts_per_token: int = 0,
    kind: Literal["decoder", "encoder-decoder", "encoder"] = "decoder",
    recipe: Recipe | None = None,
) -> Architecture:
    """The Architecture of what was collected. ``max_model_len`` None: max_position_embeddings, scaled as
    its rope parameters say."""
    if max_model_len is None:
        _, factor = read_rope(fields)
        max_model_len = int(fields.integer("max_position_embeddings", limit="positions") * factor)
    if rotary is not None and _has_sections(fields):
        rotary = replace(rotary, mrope=True)
    return Architecture(
        model_type=model_type,
        class_name=class_name,
        layers=layers,
        hidden_size=dims.hidden,
        intermediate_size=inner,
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_size=dims.head_size,
        vocab_size=vocab,
        max_model_len=max_model_len,
        tensors=tuple(t.specs),
        cache_layers=cache,
        rotary=rotary,
        position_field=position_field,
        gated_mlp=gated,
        experts=experts,
        experts_per_token=experts_per_token,
        kind=kind,
        recipe=recipe,
    )


def _has_sections(fields: Fields) -> bool:
    found = (fields.config.get(name) for name in ("rope_parameters", "rope_scaling"))
    return any(isinstance(value, dict) and "mrope_section" in value for value in found)


def rotary_share(fields: Fields, default: float = 1.0) -> float:
    """``partial_rotary_factor``: the share of each head that is rotated."""
    share = fields.number("partial_rotary_factor", default)
    parameters = fields.raw("rope_parameters")
    if isinstance(parameters, dict):
        share = parameters.get("partial_rotary_factor", share)
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise ConfigError(f"{shown(share)} is not a number", field="rope_parameters.partial_rotary_factor")
    if not 0 < share <= 1:
        raise ConfigError(f"{shown(share)} is not in (0, 1]", field="partial_rotary_factor")
    return float(share)


def number(fields: Fields, field: str, default: float) -> float:
    """A switch of training that no weight depends on (a dropout): what is not a number is not read."""
    value = fields.config.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e308:
        return default
    return float(value)


def numbers_in(listed: Any) -> frozenset[int]:
    """The integers of a list: a file may give millions, and each layer asks whether it is among them."""
    return frozenset(item for item in listed or () if type(item) is int)


def act_of(fields: Fields, default: str, *names: str) -> str:
    """The activation function: the first of the fields ``names`` (hidden_act) that the file has."""
    found = (fields.config.get(name) for name in names or ("hidden_act",))
    return next((str(act) for act in found if act), default)


def bias_of(fields: Fields, rule: bool | tuple[str, bool]) -> bool:
    """Always, never, or what the config field (name, default) says."""
    return rule if isinstance(rule, bool) else fields.boolean(rule[0], rule[1])


def sparse_layers(fields: Fields, layers: int, dense: int = 0) -> tuple[bool, ...]:
    """Which layers route: ``mlp_layer_types``, else those behind the first ``first_k_dense_replace``."""
    first = fields.integer("first_k_dense_replace", dense, limit="layers", minimum=0)
    listed = fields.listed("mlp_layer_types", layers, {"dense": False, "sparse": True})
    return tuple(i >= first for i in range(layers)) if listed is None else listed


def never_tied(fields: Fields) -> bool:
    """False; refuses a tied head where transformers' class knows none."""
    if fields.boolean("tie_word_embeddings", False):
        raise UnsupportedArchitecture("this model's class ties nothing", field="tie_word_embeddings")
    return False


def every_layer_routes(fields: Fields) -> None:
    """Refuse a ``moe_layer_freq`` that would leave layers out."""
    if fields.raw("moe_layer_freq") not in (None, 1):
        raise UnsupportedArchitecture("is not 1", field="moe_layer_freq")


def kinds_of(fields: Fields, rule: str, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Which layers slide and the window. ``none``: none; ``optional``: all when ``sliding_window`` is set;
    ``qwen``: those from max_window_layers on when use_sliding_window (configuration_qwen2.py);
    ``layer_types``: as listed."""
    full = ("full_attention",) * layers
    if rule == "none":
        return full, None
    window = fields.optional_integer("sliding_window", limit="positions", minimum=0)
    if rule == "optional":
        return (("sliding_attention",) * layers, window) if window else (full, None)
    kinds = fields.layer_types(layers)
    if rule == "layer_types":
        return kinds or full, window
    used = fields.boolean("use_sliding_window", False)
    first = fields.integer("max_window_layers", 28, limit="layers", minimum=0)
    if "sliding_window" not in fields.config:
        window = 4096
    if not used:
        window = None
    if kinds is None:
        kinds = tuple("sliding_attention" if window and i >= first else "full_attention" for i in range(layers))
    return kinds, window
