"""model_type -> Family, from the modules of this folder, and config -> Architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families.family import NO_FAMILY, Family
from tonnage.planner.folder import modules_in
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.records import replace

# Looked through first, the most asked for before the others: to import all modules takes 5 ms of CPU time, to
# find Llama's or one whose module has its name no more than that module (Python 3.11, bytecode written).
_FIRST = ("llama", "moe", "linear", "gemma", "mla", "moe_mixed", "multimodal")


def _modules(model_type: str = "") -> Iterator[Any]:
    return modules_in(__package__, _FIRST, model_type)


@lru_cache(256)
def _found(model_type: str) -> Family:
    for module in _modules(model_type):
        if found := getattr(module, "FAMILIES", {}).get(model_type):
            row: Family = found
            return row
    return NO_FAMILY


def family_of(model_type: object) -> Family:
    """The family's row, or one that says nothing; modules are imported until one has it."""
    return _found(model_type) if isinstance(model_type, str) else NO_FAMILY


def families() -> dict[str, Family]:
    """All of them by model_type, also those without an adapter."""
    return {name: row for module in _modules() for name, row in getattr(module, "FAMILIES", {}).items()}


def known_model_types() -> tuple[str, ...]:
    """Those with an adapter."""
    return tuple(name for name, row in families().items() if row.build is not None)


def _known(model_type: str) -> str:
    from difflib import get_close_matches

    known = known_model_types()
    close = get_close_matches(model_type, known, 5, 0.5)
    also = f"close to it: {', '.join(close)}; " if close else ""
    return f"{also}{len(known)} model types are known"


_last: tuple[str, Architecture] | None = None  # advice plans one model under a dozen flags


def build_architecture(config: Mapping[str, Any]) -> Architecture:
    """The adapter's Architecture where every field is understood. Raises UnsupportedArchitecture for an
    unknown ``model_type`` or field, ConfigError for values that are missing, of the wrong type or contradict
    each other."""
    architecture = _adapted(config)
    if architecture.unread:
        raise UnsupportedArchitecture(
            f"{architecture.model_type} models are not known to have this field, and it may add biases",
            field=architecture.unread[0],
            hint="remove the field from config.json if it is a leftover",
        )
    return architecture


def _adapted(config: Mapping[str, Any]) -> Architecture:
    """``_build``, remembering the last answer."""
    global _last
    small = {key: value for key, value in config.items() if key != "quantization_config"}
    written = repr(small)
    if _last is None or _last[0] != written:
        _last = (written, _build(config))
    return _last[1]


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The adapter's answer, also with ``unread`` switches, or, for a model_type without one, what
    transformers' own modules hold where it is installed and knows the family (meta.py). Raises what both do."""
    global _last
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or family_of(model_type).build is not None:
        return _adapted(config)
    written = repr(config)
    if _last is None or _last[0] != written:
        from tonnage.planner.families.meta import meta_architecture

        _last = (written, meta_architecture(config, _unknown(model_type)))
    return _last[1]


def _unknown(model_type: str) -> UnsupportedArchitecture:
    from tonnage.planner.families.without_adapter import NOT_UNDERSTOOD

    why = NOT_UNDERSTOOD.get(model_type)
    said = f"{model_type[:60]!r} is not supported"
    return UnsupportedArchitecture(
        said if why is None else f"{said}: {why}", field="model_type", hint=_known(model_type)
    )


def _build(config: Mapping[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError("missing", field="model_type", hint="is this the config.json of a language model?")
    if not isinstance(model_type, str):
        raise ConfigError(f"{shown(model_type)} is not a string", field="model_type")
    family = family_of(model_type)
    if config.get("is_encoder_decoder") and family.build is not None and not family.reads_class:
        raise UnsupportedArchitecture("true is not known for this family", field="is_encoder_decoder")
    fields = Fields(config, family.aliases, family.absent)
    architecture = _read(fields, model_type, family)
    fields.ignore("is_encoder_decoder")
    return _check_class(config, model_type, family, _checked(fields, model_type, family, architecture))


def _read(fields: Fields, model_type: str, family: Family) -> Architecture:
    if family.build is None:
        raise _unknown(model_type)
    fields.ignore(*family.ignored)
    return family.build(fields, model_type)


def build_text(config: Mapping[str, Any], model_type: str) -> Architecture:
    """The text model of a multimodal config, whatever class its own ``architectures`` names."""
    family = family_of(model_type)
    fields = Fields(config, family.aliases, family.absent)
    return _checked(fields, model_type, family, _read(fields, model_type, family))


def _checked(fields: Fields, model_type: str, family: Family, architecture: Architecture) -> Architecture:
    unread = fields.check_unread(model_type, family.leftovers or {})
    return replace(architecture, unread=architecture.unread + unread) if unread else architecture


def _check_class(
    config: Mapping[str, Any], model_type: str, family: Family, architecture: Architecture
) -> Architecture:
    """``architectures`` must name the causal language model or its body (``MistralModel``: no head);
    other classes have other tensors."""
    names = config.get("architectures")
    if names is None or family.reads_class:
        return architecture
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{shown(names)} is not a list of class names", field="architectures")
    body = architecture.class_name
    for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
        body = body.removesuffix(suffix)
    body = body.removesuffix("Model") + "Model"
    if not names or {architecture.class_name, family.first_class} & set(names):
        return architecture
    if body in names:
        tensors = tuple(t for t in architecture.tensors if t.role != "head")
        return replace(architecture, class_name=body, tensors=tensors)
    raise UnsupportedArchitecture(
        f"{shown(names)} is not {architecture.class_name}: only the causal language model of "
        f"{model_type} is planned",
        field="architectures",
    )
