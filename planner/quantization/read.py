"""Reading of a model's quantization from the checkpoint's `quantization_config` or from --quantization.

Each file in formats/ is for one quantization tool. It defines the stored tensors (`Kind`), the values of
--quantization (`FLAGS`), and a reader for each quant_method (`READERS`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, DeploymentError, UnsupportedArchitecture, did_you_mean
from tonnage.planner.folder import modules_in
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.fields import AT
from tonnage.planner.quantization.linear import LinearFormat
from tonnage.planner.quantization.names import CHECKPOINTS, WHILE_LOADING, names_checkpoint, supposed
from tonnage.planner.quantization.scheme import Quantization

# Order in which the help text and a sweep list the formats.
_FIRST = ("bitsandbytes", "gptq", "fp8", "compressed_tensors", "microscaling", "modelopt", "hqq", "torchao")


def _modules() -> Iterator[Any]:
    """Yield the Python modules of quantization/formats, one per quantization tool."""
    return modules_in("tonnage.planner.quantization.formats", _FIRST)


def flag_formats() -> dict[str, LinearFormat]:
    """Return the formats to which engines quantize 16-bit weights on load, by value of --quantization."""
    return {name: made for module in _modules() for name, made in module.FLAGS.items()}


def quantized_to(scheme: str) -> Quantization:
    """Return the quantization of an unquantized model under --quantization `scheme`.

    Raises:
        DeploymentError: for a scheme that is not known.
    """
    known = flag_formats()
    if supposed(scheme) in known:
        scheme = supposed(scheme)
    elif scheme in CHECKPOINTS:
        raise DeploymentError(
            f"{scheme} names the tool of a quantized checkpoint, but this model's weights are not quantized",
            field="--quantization", hint="leave it out, or name a format: " + ", ".join(known),
        )  # fmt: skip
    else:
        close = did_you_mean(scheme, (*known, *CHECKPOINTS, *WHILE_LOADING))
        raise DeploymentError(
            f"{shown(scheme)} is not known",
            field="--quantization",
            hint=(f"{close} " if close else "") + "one of " + ", ".join(known),
        )
    return Quantization(scheme, linear=known[scheme])


def read_quantization(config: Mapping[str, Any], flag: str | None) -> Quantization:
    """Return the checkpoint's quantization, or the quantization that `flag` (--quantization) requests.

    Raises:
        DeploymentError: flag and checkpoint contradict each other.
        UnsupportedArchitecture: the quantization method is not known.
        ConfigError: a field has a wrong type or value.
    """
    found = config.get("quantization_config")
    text = config.get("text_config")
    if found is None and isinstance(text, dict):
        found = text.get("quantization_config")
    if found is None:
        return Quantization() if flag is None else quantized_to(flag)
    if not isinstance(found, dict):
        raise ConfigError(f"{shown(found)} is not an object", field="quantization_config")
    stored = _stored(found, config)
    if flag is None or flag in (stored.scheme, stored.method):
        return stored
    if not names_checkpoint(flag, stored.method, stored.scheme):
        if flag not in CHECKPOINTS:
            quantized_to(flag)
        raise DeploymentError(
            f"{flag} contradicts the checkpoint, which is quantized as {stored.scheme}",
            field="--quantization",
            hint="leave the flag out",
        )
    return stored


def _stored(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization that the object `quantization_config` describes.

    Raises:
        UnsupportedArchitecture: for a method that is not known.
        ConfigError: for fields with wrong types or values.
    """
    method = found.get("quant_method")
    if method is None and (found.get("load_in_8bit") or found.get("load_in_4bit")):
        method = "bitsandbytes"
    if method is None and "quant_algo" in found:
        method = "modelopt"
    if isinstance(method, str) and method == "fp8" and found.get("quantized_layers"):
        method = "fp8-mixed"
    readers = {name: reader for module in _modules() for name, reader in module.READERS.items()}
    reader = readers.get(method) if isinstance(method, str) else None
    if reader is None:
        raise UnsupportedArchitecture(
            f"{shown(method)} is not supported yet",
            field=f"{AT}.quant_method",
            hint="known: " + ", ".join(readers),
        )
    made: Quantization = reader(found, config)
    return made


def check_quantization(architecture: Architecture, quantization: Quantization, engine: str) -> None:
    """Check that the quantization scheme replaces modules of this model, and none with a tied weight.

    Raises:
        DeploymentError: the scheme replaces no module.
        UnsupportedArchitecture: the scheme would replace a tied tensor.
    """
    if quantization.scheme == "none":
        return
    converted = [tensor for tensor in architecture.tensors if quantization.converts(tensor)]
    if not converted:
        raise DeploymentError(
            f"{quantization.scheme} replaces no module of {architecture.class_name}: "
            "its linear layers are not of the class nn.Linear",
            field=quantization.origin,
        )
    for tensor in converted:
        if tensor.tied_to is not None:
            raise UnsupportedArchitecture(
                f"{tensor.name} is tied to {tensor.tied_to}, but not among the modules that stay unquantized",
                field=f"{quantization.origin}.llm_int8_skip_modules",
            )
