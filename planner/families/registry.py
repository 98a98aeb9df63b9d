"""Registry of model families: the ``Family`` of a model_type, and the ``Architecture`` of a config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families.family import NO_FAMILY, Family
from tonnage.planner.families.meta import meta_architecture
from tonnage.planner.families.pooled import base_config, pooled
from tonnage.planner.folder import modules_in
from tonnage.planner.model.architecture import CLASSIFIERS, Architecture
from tonnage.planner.model.fields import Fields, label_count, shown
from tonnage.planner.model.tensor import TensorSpec

# Modules with the most common families, which are searched first for a model_type. Importing all modules takes
# 28 ms of CPU time (Python 3.11, with cached bytecode); importing llama.py, or the module named like the model
# type, takes much less.
_FIRST = (
    "llama", "moe", "linear_attention", "gemma", "mla", "moe_mixed", "qwen_vision", "llava", "gemma_vision",
)  # fmt: skip
# Classes whose published files state no model_type
_BY_CLASS = {
    "LongcatFlashForCausalLM": "longcat_flash", "LongcatFlashNgramForCausalLM": "longcat_flash_ngram",
}  # fmt: skip


def _modules(model_type: str = "") -> Iterator[Any]:
    """Yield the modules that define model families, first those whose name is a prefix of ``model_type``."""
    return modules_in(__package__, _FIRST, model_type)


@lru_cache(256)
def _found(model_type: str) -> Family:
    """Return the ``Family`` of a model type; import modules of families until one of them has it."""
    for module in _modules(model_type):
        if found := getattr(module, "FAMILIES", {}).get(model_type):
            row: Family = found
            return row
    return NO_FAMILY


def family_of(model_type: object) -> Family:
    """Return the ``Family`` of a model type, or an empty ``Family`` when no module has it."""
    return _found(model_type) if isinstance(model_type, str) else NO_FAMILY


def families() -> dict[str, Family]:
    """Return a dict: model_type -> ``Family``, including families without a function that builds a model."""
    return {name: row for module in _modules() for name, row in getattr(module, "FAMILIES", {}).items()}


def known_model_types() -> tuple[str, ...]:
    """Return the model types for which the planner has a function that builds the architecture."""
    return tuple(name for name, row in families().items() if row.build is not None)


def _known(model_type: str) -> str:
    """Return an error's hint for an unknown ``model_type``: similar known types, and how many are known."""
    from difflib import get_close_matches  # lazy import, only for an error message

    known = known_model_types()
    close = get_close_matches(model_type, known, 5, 0.5)
    also = f"close to it: {', '.join(close)}; " if close else ""
    return f"{also}{len(known)} model types are known"


class ArchitectureCache:
    """A cache of the architecture that was built last, with one entry: (config, architecture).

    Advice on a plan needs the architecture of one config about a dozen times, with different flags.
    """

    def __init__(self) -> None:
        self._config = ""
        self._found: Architecture | None = None

    def get(self, config: Mapping[str, Any], build: Callable[[], Architecture]) -> Architecture:
        """Return the cached architecture of ``config``; without one, call ``build`` and cache its result."""
        written = repr(config)
        if self._found is None or self._config != written:
            self._config, self._found = written, build()
        return self._found


_ARCHITECTURES = ArchitectureCache()


def build_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a family's builder function builds from a config.

    Raises:
        UnsupportedArchitecture: the ``model_type`` or a field is unknown.
        ConfigError: values are missing, have the wrong type or contradict each other.
    """
    architecture = _adapted(config)
    if architecture.unread:
        raise UnsupportedArchitecture(
            f"{architecture.model_type} models are not known to have this field, and it may add biases",
            field=architecture.unread[0],
            hint="remove the field from config.json if it is a leftover",
        )
    return architecture


def _adapted(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a family's function builds from ``config``, or the cached one.

    The cache holds the architecture of the most recent config.
    """
    small = {key: value for key, value in config.items() if key != "quantization_config"}
    return _ARCHITECTURES.get(small, lambda: _build(config))


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config, also if some of its fields or its family are unknown to the planner.

    ``Architecture.unread`` lists the unknown fields that can add only biases and norms. For an unknown family,
    the architecture comes from transformers' own modules, if transformers is installed and knows the model_type
    (meta.py).

    Raises:
        UnsupportedArchitecture: neither the planner nor transformers can build the ``model_type``, or an
            unknown field may change a shape or the KV cache.
        ConfigError: values are missing, have the wrong type or contradict each other.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or family_of(model_type).build is not None or base_config(config):
        return _adapted(config)
    return _ARCHITECTURES.get(config, lambda: _from_modules(config, model_type))


def _from_modules(config: Mapping[str, Any], model_type: str) -> Architecture:
    """Return the architecture of a model whose family is unknown to the planner, from transformers' modules."""
    return replace(meta_architecture(config, _unknown(model_type)), declared=_declared(config))


def _unknown(model_type: str) -> UnsupportedArchitecture:
    """Return the error that reports a model type unknown to the planner."""
    why = family_of(model_type).refusal
    said = f"{model_type[:60]!r} is not supported"
    return UnsupportedArchitecture(
        f"{said}: {why}" if why else said, field="model_type", hint=_known(model_type)
    )


def _declared(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names in the config field ``architectures``."""
    names = config.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _build(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config, after a check of its model_type and its class."""
    if (found := base_config(config)) is not None:
        row, base = found
        return pooled(row, config, _build(base))
    model_type = config.get("model_type") or _untyped(config)
    if model_type is None:
        raise ConfigError("missing", field="model_type", hint="is this the config.json of a language model?")
    if not isinstance(model_type, str):
        raise ConfigError(f"{shown(model_type)} is not a string", field="model_type")
    family = family_of(model_type)
    if config.get("is_encoder_decoder") and family.build is not None and not family.reads_class:
        raise UnsupportedArchitecture(
            f"true is not supported: {model_type} is no encoder-decoder", field="is_encoder_decoder"
        )
    architecture = _read(config, model_type, family, "is_encoder_decoder")
    return _check_class(config, model_type, family, replace(architecture, declared=_declared(config)))


def _untyped(config: Mapping[str, Any]) -> str | None:
    """Return the model type of a config.json without ``model_type``, from the class in ``architectures``.

    Source: vLLM, transformers_utils/config.py.
    """
    return next((_BY_CLASS[name] for name in _declared(config) if name in _BY_CLASS), None)


def _read(config: Mapping[str, Any], model_type: str, family: Family, *ignored: str) -> Architecture:
    """Return the architecture that a family's builder function builds from a config.

    The architecture's ``assumed`` lists the sizes missing in config.json, with the defaults used for them. Its
    ``unread`` lists the config fields that the builder did not read, except those in ``ignored``.
    """
    if family.build is None:
        raise _unknown(model_type)
    fields = Fields(config, family.aliases, family.absent, lambda: _sizes(model_type))
    fields.ignore(*family.ignored, *ignored)
    found = family.build(fields, model_type)
    assumed = (f"{name} {value:,} of {model_type}" for name, value in fields.assumed.items())
    unread = fields.check_unread(model_type, family.leftovers or {})
    return replace(found, assumed=(*found.assumed, *assumed), unread=found.unread + unread)


def build_text(config: Mapping[str, Any], model_type: str) -> Architecture:
    """Return the architecture of a multimodal model's text model, without a check of its class name."""
    return _read(config, model_type, family_of(model_type))


@cache
def _sizes(model_type: str) -> Mapping[str, int]:
    """Return a dict: config field -> default, for the sizes in transformers' config class of a model type."""
    defaults = json.loads(Path(__file__).with_name("config_defaults.json").read_text())["defaults"]
    sizes: Mapping[str, int] = defaults.get(model_type, {})
    return sizes


def _classifier(labels: int, hidden: int, suffix: str) -> tuple[TensorSpec, ...]:
    """Return the tensors of a decoder's classification head: a matrix [labels, hidden] and, for tokens, a bias.

    Source: GenericForSequenceClassification in transformers' modeling_layers.py.
    """
    weight = TensorSpec("score.weight", (labels, hidden), "head", "Linear")
    bias = TensorSpec("score.bias", (labels,), "head", "Linear")
    return (weight, bias) if suffix == "ForTokenClassification" else (weight,)


def _check_class(
    config: Mapping[str, Any], model_type: str, family: Family, architecture: Architecture
) -> Architecture:
    """Return the architecture for the class named in ``architectures``.

    Supported are the causal language model, its body without a head (``MistralModel``), and classifiers on the
    body (``MistralForSequenceClassification``), whose head has one row per label. Other classes have other
    tensors and raise an error.
    """
    names = config.get("architectures")
    if names is None or family.reads_class:
        return architecture
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{shown(names)} is not a list of class names", field="architectures")
    body = architecture.class_name
    for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
        body = body.removesuffix(suffix)
    body = body.removesuffix("Model") + "Model"
    if not names or {architecture.class_name, family.first_class, *family.other_classes} & set(names):
        return architecture
    tensors = tuple(t for t in architecture.tensors if t.role != "head")
    if {body, f"{body.removesuffix('Model')}TextModel"} & set(names):
        return replace(architecture, class_name=body, tensors=tensors)
    for suffix in CLASSIFIERS:
        if (name := body.removesuffix("Model") + suffix) in names and architecture.kind == "decoder":
            labels, recipe = label_count(Fields(config)), architecture.recipe
            if recipe is not None:
                recipe = replace(recipe, head=replace(recipe.head, tied=False, softcap=False, labels=labels))
            head = _classifier(labels, architecture.hidden_size, suffix)
            return replace(architecture, class_name=name, tensors=(*tensors, *head), recipe=recipe)
    raise UnsupportedArchitecture(
        f"{shown(names)} is not {architecture.class_name}: only the causal language model of "
        f"{model_type} is supported",
        field="architectures",
    )
