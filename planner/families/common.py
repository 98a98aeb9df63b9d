"""What the families share: geometry checks, the tensors of linear layers and norms, rotary tables."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.planner.architecture import CacheLayer, Role, Rotary, TensorSpec
from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.fields import Fields, shown

# transformers 5.19, modeling_rope_utils.py: each of these keeps one table of rotary_dim / 2 frequencies.
_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def linear(
    module: str, out: int, into: int, role: Role, layer: int | None, bias: bool, module_class: str = "Linear"
) -> Iterator[TensorSpec]:
    """Weight [out, in] and, if any, bias [out] of a linear layer."""
    yield TensorSpec(f"{module}.weight", (out, into), role, module_class, layer)
    if bias:
        yield TensorSpec(f"{module}.bias", (out,), role, module_class, layer)


def rms_norm(module: str, size: int, layer: int | None) -> TensorSpec:
    return TensorSpec(f"{module}.weight", (size,), "norm", "RMSNorm", layer)


def layer_norm(module: str, size: int, layer: int | None) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{module}.weight", (size,), "norm", "LayerNorm", layer)
    yield TensorSpec(f"{module}.bias", (size,), "norm", "LayerNorm", layer)


def embedding(module: str, rows: int, width: int) -> TensorSpec:
    return TensorSpec(f"{module}.weight", (rows, width), "embedding", "Embedding")


def lm_head(vocab: int, width: int, tied_to: str | None, module: str = "lm_head") -> TensorSpec:
    return TensorSpec(f"{module}.weight", (vocab, width), "head", "Linear", tied_to=tied_to)


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


def geometry(fields: Fields, *, kv_default: int | None = None) -> tuple[int, int, int, int]:
    """(hidden_size, num_attention_heads, num_key_value_heads, head_dim), checked against each other."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    kv_heads = fields.integer("num_key_value_heads", kv_default or heads, limit="heads")
    head_size = fields.optional_integer("head_dim", limit="width")
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
