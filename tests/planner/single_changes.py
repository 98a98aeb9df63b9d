"""Compare the planner with transformers for configs with one field removed, emptied or changed.

Run as a program, it checks every family that transformers has:

    python tests/planner/single_changes.py [model_type ...]

A named error is a valid answer. Another shape, another count or another kind of layer is a difference.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture, known_model_types
from tonnage.planner.model.architecture import Architecture

# Fields of every config class that change no shape, and identifiers of tokens.
SAME = {
    "use_cache", "is_decoder", "model_type", "transformers_version", "architectures", "dtype", "return_dict",
    "output_hidden_states", "output_attentions", "is_encoder_decoder", "add_cross_attention", "problem_type",
    "chunk_size_feed_forward", "id2label", "label2id", "initializer_range", "rope_parameters", "rope_scaling",
}  # fmt: skip
# layer_types of transformers -> the planner's cache layer kinds
KINDS = {
    "full_attention": ("full", "mla"), "sliding_attention": ("sliding",), "chunked_attention": ("chunked",),
    "linear_attention": ("state",), "attention": ("full",), "mamba": ("state",), "conv": ("state",),
}  # fmt: skip
# (model_type, field) -> why transformers 5.19 is no reference for it
KNOWN = {
    **{(name, "tie_word_embeddings"): "forced to true by the config class; checkpoints with false have a head"
       for name in ("t5", "mt5", "umt5")},
    ("mistral3", "tie_word_embeddings"): "files leave it out and have a head, which unties it",
}  # fmt: skip


def changes(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield (field path, kind of change, new value) for every field that may change a shape."""
    for key, value in config.items():
        if key in SAME or key.endswith(("token_id", "token_index")) or key.startswith("_"):
            continue
        here = (*path, key)
        if isinstance(value, dict):
            yield from changes(value, here)
            continue
        yield here, "left out", None
        if value is not None:
            yield here, "null", None
        elif "window" in key:
            yield here, "set", 8
        elif key.endswith(("_rank", "_size", "_dim", "inner")):
            yield here, "set", 24
        if isinstance(value, bool):
            yield here, "set", not value
        elif isinstance(value, int):
            yield here, "set", 2 * value
            if value > 2:
                yield here, "set", value + 1
        elif isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            yield here, "set", value[::-1]


def changed(config: dict[str, Any], path: tuple[str, ...], how: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(config)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    if how == "left out":
        inner.pop(path[-1])
    else:
        inner[path[-1]] = value
    return out


def built(class_name: str, config: dict[str, Any]) -> tuple[Any, dict[str, tuple[int, ...]], int] | None:
    """Return transformers' (config, shapes, parameters), or None if it builds nothing from this config."""
    given = {k: v for k, v in copy.deepcopy(config).items() if k not in ("model_type", "architectures")}
    try:
        real = CONFIG_MAPPING[config["model_type"]](**given)
        with torch.device("meta"):
            model = getattr(transformers, class_name)._from_config(real)
    except Exception:  # a family's code may raise anything on contradictory sizes
        return None
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    return real, shapes, sum(p.numel() for p in model.parameters())


def difference(class_name: str, config: dict[str, Any]) -> str | None:
    """Return how the planner differs from transformers for one config, or None.

    None also means that one of the two rejects the config.
    """
    real = built(class_name, config)
    try:
        ours = build_architecture(config)
    except TonnageError:
        return None
    if real is None:
        return None
    planned = {t.name: t.shape for t in ours.tensors if t.is_parameter}
    other = [n for n in {*planned, *real[1]} if planned.get(n) != real[1].get(n)]
    if other:
        first = min(other)
        return f"{len(other)} tensors, {first}: planned {planned.get(first)}, is {real[1].get(first)}"
    if ours.parameters != real[2]:
        return f"planned {ours.parameters:,} parameters, are {real[2]:,}"
    return _other_kinds(real[0], ours)


def _other_kinds(real: Any, ours: Architecture) -> str | None:
    text = real.get_text_config(decoder=True)
    listed = getattr(text, "layer_types", None)
    if ours.kind != "decoder" or not isinstance(listed, list) or len(listed) != ours.layers:
        return None
    kinds = {layer.layer: layer.kind for layer in ours.cache_layers}
    for i, kind in enumerate(listed):
        if kind in KINDS and i in kinds and kinds[i] not in KINDS[kind]:
            return f"layer {i}: planned {kinds[i]}, is {kind}"
    window, planned = (
        getattr(text, "sliding_window", None),
        {c.window for c in ours.cache_layers if c.kind == "sliding"},
    )
    return f"windows planned {planned}, is {window}" if window and planned - {window} else None


def differences(class_name: str, base: dict[str, Any]) -> list[str]:
    """Return the differences for every single change of ``base``, which the planner must accept unchanged."""
    config = json.loads(json.dumps(base, default=str))
    assert built(class_name, config) is not None
    build_architecture(config)
    out = []
    for path, how, value in [((), "", None), *changes(config)]:
        if (config["model_type"], path[-1] if path else "") in KNOWN:
            continue
        found = difference(class_name, changed(config, path, how, value) if path else config)
        if found is not None:
            out.append(
                f"{config['model_type']} {'.'.join(path)} {how} {'' if how == 'left out' else value}: {found}"
            )
    return out


def base_of(model_type: str) -> tuple[str, dict[str, Any]]:
    """Return (class, small config) of a family."""
    path = Path(__file__).with_name("test_families_mutated.py")
    spec = importlib.util.spec_from_file_location("families_mutated", path)
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    config = mutated.config_of_sizes(model_type, 0).to_dict()
    name = mutated.class_name(model_type)
    return name, {**config, "model_type": model_type, "architectures": None}


def main() -> int:
    wanted = sys.argv[1:] or [name for name in known_model_types() if name in CONFIG_MAPPING]
    found = 0
    for model_type in wanted:
        try:
            name, config = base_of(model_type)
            lines = differences(name, config)
        except Exception as error:
            print(f"{model_type}: not compared, {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        found += len(lines)
        print(f"{model_type}: {len(lines)} differences", *lines, sep="\n  ", flush=True)
    return int(found > 0)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main())
