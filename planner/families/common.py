"""Functions that many model families share: they read config fields, or return an Architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families.tensors import Tensors, tensors_of
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads, Recipe

# Rope types with a single table of rotary_dim / 2 frequencies (transformers 5.19, modeling_rope_utils.py)
_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "mrope")
# Names of a layer's four norms, in the order they run: before and after attention, before and after the MLP
FOUR_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def divisible(numerator: int, denominator: int, field: str, of: str) -> None:
    """Check that a config value, ``numerator``, is a multiple of another, ``denominator``.

    Raises:
        ConfigError: the quotient is no integer. The error is about the config field ``field``; its message
            also names ``of``, the denominator's field.
    """
    if numerator % denominator:
        raise ConfigError(f"{numerator} is not a multiple of {of} = {denominator}", field=field)


def heads_of(fields: Fields, *, kv_default: int | None = None, head_default: int | None = None) -> Heads:
    """Return the head geometry of a config (hidden size, heads, KV heads, head size) after checks.

    Args:
        fields: the config.
        kv_default: num_key_value_heads for a config without this field; by default num_attention_heads.
        head_default: head_dim for a config without this field; by default hidden_size / num_attention_heads.
    """
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    kv_heads = fields.integer("num_key_value_heads", kv_default or heads, limit="heads")
    head_size = fields.optional_integer("head_dim", head_default, limit="width")
    if head_size is None:
        divisible(hidden, heads, fields.name("hidden_size"), fields.name("num_attention_heads"))
        head_size = hidden // heads
    divisible(heads, kv_heads, fields.name("num_attention_heads"), fields.name("num_key_value_heads"))
    return Heads(hidden, heads, kv_heads, head_size)


def widths(fields: Fields, *names: str) -> tuple[int, ...]:
    """Return the numbers in the required config fields ``names``, such as MLP sizes or counts of experts."""
    return tuple(fields.integer(name, limit="width") for name in names)


def layers_and_vocab(fields: Fields) -> tuple[int, int]:
    """Return (number of layers, vocabulary size), from num_hidden_layers and vocab_size."""
    return fields.integer("num_hidden_layers", limit="layers"), fields.integer("vocab_size", limit="vocab")


def sizes(fields: Fields) -> tuple[Heads, int, int]:
    """Return (head geometry, layers, vocabulary size) of a model with one KV head per query head."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    divisible(hidden, heads, fields.name("hidden_size"), fields.name("num_attention_heads"))
    return Heads(hidden, heads, heads, hidden // heads), *layers_and_vocab(fields)


def rope_kind(parameters: object, field: str) -> tuple[str, float]:
    """Return (rope type, scale of the context length) stated by ``rope_parameters`` or ``rope_scaling``.

    With the types linear and dynamic, max_position_embeddings is the length before scaling. With all other
    types it is the scaled length, so the returned scale is 1 (_get_and_verify_max_len in config/model.py of
    vLLM 0.32.0).

    Raises:
        UnsupportedArchitecture: the type is unknown, so the shapes of its rotary tables are unknown.
        ConfigError: the parameters are no object, or their factor is no number from 1 to 1024.
    """
    if parameters is None:
        return "default", 1.0
    if not isinstance(parameters, dict):
        raise ConfigError(f"{shown(parameters)} is not an object", field=field)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # the first Phi-3 files call longrope "su"
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
    """Return (rope type, scale of the context length) of a model with one rotary table.

    Files written by transformers 5 have ``rope_parameters``; older files have ``rope_scaling``.
    """
    fields.ignore("rope_theta")
    new, old = fields.raw("rope_parameters"), fields.raw("rope_scaling")
    if new is not None:
        return rope_kind(new, "rope_parameters")
    return rope_kind(old, "rope_scaling")


def window_of(fields: Fields, default: int | None = None) -> int | None:
    """Return the sliding window in tokens, or None, from the config field ``sliding_window``.

    ``default`` is the window for a config without this field; null in the config means no window.
    """
    window = fields.optional_integer("sliding_window", limit="positions")
    return window if "sliding_window" in fields.config else default


def cache_layers(kinds: tuple[str, ...], window: int | None, dims: Heads) -> tuple[CacheLayer, ...]:
    """Return the KV cache of each layer.

    ``kinds`` has the attention of each layer: full_attention or sliding_attention.

    Raises:
        ConfigError: a layer has sliding attention but ``window`` is None.
    """
    return tuple(cache_layer(i, kind, window, dims) for i, kind in enumerate(kinds))


def cache_layer(index: int, kind: str, window: int | None, dims: Heads) -> CacheLayer:
    """Return the KV cache entry of layer ``index``; ``kind`` is full_attention or sliding_attention.

    Raises:
        ConfigError: the layer has sliding attention but ``window`` is None.
    """
    if kind == "full_attention":
        return CacheLayer(index, "full", None, dims.kv_heads, dims.head_size)
    if window is None:
        raise ConfigError(
            f"layer {index} is sliding_attention, but the config states no window", field="sliding_window"
        )
    return CacheLayer(index, "sliding", window, dims.kv_heads, dims.head_size)


def decoder(
    fields: Fields,
    model_type: str,
    class_name: str,
    t: Tensors,
    dims: Heads,
    cache: tuple[CacheLayer, ...] | None = None,
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
    """Return the Architecture of a decoder from its collected tensors, cache layers and sizes.

    If ``cache`` is None, every layer has full attention. If ``max_model_len`` is None, it is
    max_position_embeddings times the scale in the rope parameters.
    """
    if cache is None:
        cache = cache_layers(("full_attention",) * layers, None, dims)
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


def described(
    fields: Fields, model_type: str, class_name: str, recipe: Recipe, dims: Heads, inner: int,
    cache: tuple[CacheLayer, ...] | None = None, **more: Any,
) -> Architecture:  # fmt: skip
    """Return the Architecture of the decoder that ``recipe`` describes.

    ``inner`` is the MLP's inner size, and ``more`` are further arguments of ``decoder``.
    """
    return decoder(
        fields, model_type, class_name, tensors_of(recipe), dims, cache, layers=len(recipe.layers), inner=inner,
        vocab=recipe.embedding.rows, recipe=recipe, **more,
    )  # fmt: skip


def _has_sections(fields: Fields) -> bool:
    """Return whether a model's rotary positions have several axes, such as time, height and width.

    The config then has ``mrope_section``.
    """
    found = (fields.config.get(name) for name in ("rope_parameters", "rope_scaling"))
    return any(isinstance(value, dict) and "mrope_section" in value for value in found)


def rotary_share(fields: Fields, default: float = 1.0, field: str = "partial_rotary_factor") -> float:
    """Return the fraction of each head that is rotated (0 to 1), from the rope parameters or ``field``."""
    share = fields.number(field, default)
    parameters = fields.raw("rope_parameters")
    if isinstance(parameters, dict):
        share = parameters.get("partial_rotary_factor", share)
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise ConfigError(f"{shown(share)} is not a number", field="rope_parameters.partial_rotary_factor")
    if not 0 < share <= 1:
        raise ConfigError(f"{shown(share)} is not in (0, 1]", field=field)
    return float(share)


def number(fields: Fields, field: str, default: float) -> float:
    """Return a number, such as a dropout rate, from the config field ``field``.

    Returns ``default`` if the number is missing or invalid. The number must not affect tensor shapes.
    """
    value = fields.config.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e308:
        return default
    return float(value)


def dtype_of(fields: Fields, field: str) -> str | None:
    """Return the dtype in a config field (float32, bfloat16 or float16), or None without this field."""
    dtype: str | None = fields.raw(field)
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError(f"{shown(dtype)} is not float32, bfloat16 or float16", field=field)
    return dtype


def alternating_kinds(layers: int, every: int) -> tuple[str, ...]:
    """Return each layer's attention kind: full in every ``every``-th layer, sliding in the others."""
    return tuple("sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers))


def numbers_in(listed: Any) -> frozenset[int]:
    """Return the integers in a config's list as a set, for fast look-ups of layer indices."""
    return frozenset(item for item in listed or () if type(item) is int)


def layer_indices(fields: Fields, field: str, layers: int, default: list[int]) -> frozenset[int]:
    """Return the set of layer indices that a config field lists; ``default`` without this field."""
    listed = fields.raw(field)
    if listed is None:
        listed = default
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < layers for i in listed):
        raise ConfigError(f"{shown(listed)} is not a list of layer indices", field=field)
    return frozenset(listed)


def act_of(fields: Fields, default: str, *names: str) -> str:
    """Return the name of the MLP's activation function, or ``default`` if config.json does not state it.

    The name is the value of the first set config field among ``names`` (by default hidden_act).
    """
    found = (fields.config.get(name) for name in names or ("hidden_act",))
    return next((str(act) for act in found if act), default)


def bias_of(fields: Fields, rule: bool | tuple[str, bool]) -> bool:
    """Return whether a module has a bias, by a family's ``rule`` for this module.

    ``rule`` is True (always), False (never), or (config field that states it, default of the field).
    """
    return rule if isinstance(rule, bool) else fields.boolean(rule[0], rule[1])


def refuse(fields: Fields, *names: str, why: str = "the planner cannot build a model with it") -> None:
    """Raise an error if one of the config fields ``names`` is set to anything but false, 0, null or empty.

    ``why`` is the reason, for the error message.
    """
    for name in names:
        if value := fields.raw(name):
            stated = "true" if value is True else shown(value)
            raise UnsupportedArchitecture(f"{stated} is not supported: {why}", field=name)


def only(fields: Fields, **values: object) -> None:
    """Raise an error if a config field has another value than the only one that the planner supports.

    ``values`` maps config field -> supported value. A missing or null field is valid.
    """
    for name, value in values.items():
        if fields.raw(name) not in (None, value):
            raise UnsupportedArchitecture(
                f"{shown(fields.raw(name))} is not supported; only {shown(value)} is", field=name
            )


def never_tied(fields: Fields) -> bool:
    """Return False as the value of tie_word_embeddings; raise an error if the config sets it to true.

    Families whose class in transformers cannot tie the head to the embedding use this function.
    """
    refuse(fields, "tie_word_embeddings", why="transformers' class cannot tie the head")
    return False


def kinds_of(fields: Fields, rule: str, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Return (attention kind of each layer, sliding window in tokens or None) by a rule.

    The values of ``rule`` are:

    - ``none``: every layer has full attention.
    - ``optional``: every layer has a sliding window when ``sliding_window`` is set.
    - ``layer_types``: the config field ``layer_types`` states the kind of each layer.
    - ``qwen``: layers from max_window_layers on have a sliding window when use_sliding_window is set
      (configuration_qwen2.py).
    """
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
