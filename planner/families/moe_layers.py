"""Rules that determine which layers of a mixture-of-experts decoder have routed experts."""

from __future__ import annotations

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.model.fields import Fields, shown


def every_layer(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer, for a model whose layers all have routed experts."""
    return (True,) * layers


def behind_dense(fields: Fields, layers: int, dense: int = 0) -> tuple[bool, ...]:
    """Return for each layer whether it has routed experts, by the config field ``first_k_dense_replace``.

    The field states how many layers at the start have a dense MLP instead. Its default is ``dense``.
    """
    first = fields.integer("first_k_dense_replace", dense, limit="layers", minimum=0)
    return tuple(i >= first for i in range(layers))


def sparse_layers(fields: Fields, layers: int, dense: int = 0) -> tuple[bool, ...]:
    """Return for each layer whether it has routed experts, by the config field ``mlp_layer_types``.

    Without this field, all layers but the first ``first_k_dense_replace`` (by default ``dense``) have them.
    """
    behind = behind_dense(fields, layers, dense)
    return fields.listed("mlp_layer_types", layers, {"dense": False, "sparse": True}) or behind


def interval_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has routed experts, by ERNIE's config fields.

    The fields state the first and the last layer with experts, and the interval between such layers.
    """
    start = fields.integer("moe_layer_start_index", 1, limit="layers", minimum=0)
    end = fields.integer("moe_layer_end_index", -1, limit="layers", minimum=-1)
    step = fields.integer("moe_layer_interval", 1, limit="layers")
    last = layers - 1 if end == -1 else end
    return tuple((i + 1) % step == 0 and start <= i <= last for i in range(layers))


def stepped_layers(fields: Fields, layers: int, dense: tuple[int, ...] = ()) -> tuple[bool, ...]:
    """Return for each layer whether it has routed experts, by the config field ``decoder_sparse_step``.

    Every ``decoder_sparse_step``-th layer has routed experts, except the layers in ``mlp_only_layers``;
    ``dense`` is the default of ``mlp_only_layers``.
    """
    step = fields.integer("decoder_sparse_step", 1, limit="layers")
    listed = fields.raw("mlp_only_layers")
    listed = list(dense) if listed is None else listed or []
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise ConfigError(f"{shown(listed)} is not a list of layer indices", field="mlp_only_layers")
    plain = common.numbers_in(listed)
    return tuple(i not in plain and (i + 1) % step == 0 for i in range(layers))


def all_listed(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer, for a family whose layers must all have routed experts.

    Raises an error if the config field ``mlp_layer_types`` lists a dense layer.
    """
    if not all(fields.listed("mlp_layer_types", layers, {"dense": False, "sparse": True}) or (True,)):
        raise UnsupportedArchitecture("dense is not supported; only sparse is", field="mlp_layer_types")
    return (True,) * layers
