"""Which quantization a plan is for: the checkpoint's own or the flag's, and whether it does anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.scheme import FLAG_VALUES, Quantization


def read_quantization(config: Mapping[str, Any], flag: str | None) -> Quantization:
    """What the checkpoint's ``quantization_config`` says, or the flag for an unquantized checkpoint.

    Raises DeploymentError when flag and checkpoint contradict, UnsupportedArchitecture for a method that
    is not known, ConfigError for broken fields.
    """
    found = config.get("quantization_config")
    text = config.get("text_config")
    if found is None and isinstance(text, dict):
        found = text.get("quantization_config")
    known = flag is None or flag in FLAG_VALUES
    if found is None:
        if not known:
            raise DeploymentError(
                f"{shown(flag)} is not known", field="--quantization", hint="one of " + ", ".join(FLAG_VALUES)
            )
        return Quantization() if flag is None else Quantization(scheme=flag)
    if not isinstance(found, dict):
        raise ConfigError(f"{shown(found)} is not an object", field="quantization_config")
    from tonnage.planner.quantization.stored import read_stored  # a plain checkpoint has nothing to read

    stored = read_stored(found, config)
    if flag is not None and flag not in (stored.scheme, stored.method):
        if not known:
            raise DeploymentError(
                f"{shown(flag)} is not known", field="--quantization", hint="one of " + ", ".join(FLAG_VALUES)
            )
        raise DeploymentError(
            f"{flag} contradicts the checkpoint, which is quantized as {stored.scheme}",
            field="--quantization",
            hint="leave the flag out",
        )
    return stored


def check_quantization(architecture: Architecture, quantization: Quantization, engine: str) -> None:
    """Refuse a scheme that would do nothing to this model, or something that is not planned.

    Raises DeploymentError or UnsupportedArchitecture.
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
                f"{tensor.name} is tied to {tensor.tied_to} and not among the modules left alone",
                field=f"{quantization.origin}.llm_int8_skip_modules",
            )
