"""The files beside config.json that affect a model's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tonnage.planner.errors import ConfigError

_QUANTIZATION = "hf_quant_config.json"  # quantization config written by NVIDIA ModelOpt
_IMAGE_PROCESSOR = ("preprocessor_config", "video_preprocessor_config")


def add_config_files(config: dict[str, Any], read: Callable[[str], dict[str, Any] | None]) -> None:
    """Add to a model's config what other files state: ModelOpt's quantization, and limits of image sizes.

    Args:
        config: Content of config.json, which is changed in place.
        read: Function that returns the content of one of the model's JSON files by its name, or None if the
            model has no such file.

    Raises:
        ConfigError: hf_quant_config.json has no object `quantization`.
    """
    if config.get("quantization_config") is None and (beside := read(_QUANTIZATION)) is not None:
        found = beside.get("quantization")
        if not isinstance(found, dict):
            raise ConfigError("the field `quantization` is missing or not an object", field=_QUANTIZATION)
        config["quantization_config"] = {"quant_method": "modelopt", **found}
    for name in _IMAGE_PROCESSOR:
        if "vision_config" in config and (beside := read(f"{name}.json")) is not None:
            config[name] = beside
