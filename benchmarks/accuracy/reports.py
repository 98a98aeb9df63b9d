"""Parts shared by the sections on start-up reports: model config, labels, and intervals of printed values."""

from __future__ import annotations

import math
from typing import Any

from accuracy.common import Inputs

GIB = 1 << 30

# Meaning of a report's ``quantization``, if its config (of a sibling with the same shapes) does not state it.
# Group size 128 is the default of AutoAWQ and of llm-compressor's W4A16 preset; the last scheme is the latter's
# FP8_DYNAMIC preset. Its recipes for mixtures of experts leave the router out.
_SCHEMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                      "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}),
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
    ("compressed-tensors (w4a16, group 128)", {"quant_method": "compressed-tensors", "format": "pack-quantized",
                      "ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {"group_0": {
                          "targets": ["Linear"],
                          "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                                      "group_size": 128, "dynamic": False},
                          "input_activations": None}}}),
    ("compressed-tensors (fp8 dynamic)", {"quant_method": "compressed-tensors", "format": "float-quantized",
                      "ignore": ["lm_head"], "config_groups": {"group_0": {
                          "targets": ["Linear"],
                          "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
                          "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                                                "dynamic": True}}}}),
)  # fmt: skip


def model_config(inputs: Inputs, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return config.json of the row's model; a sibling gives the shapes, and the row the quantization."""
    name = row["config"]
    config = inputs.config(name) if name else None
    if config is None:
        return None
    if (row["config_basis"] or "").startswith("same id"):
        return config
    config = {key: value for key, value in config.items() if key not in ("quantization_config", "dtype")}
    config.setdefault("torch_dtype", "bfloat16")
    said = (row["quantization"] or "").lower()
    for word, scheme in _SCHEMES:
        if said.startswith(word):
            return {**config, "quantization_config": scheme}
    return config


def quantization_known(row: dict[str, Any]) -> bool:
    """Return whether the report states the weights' format exactly enough to plan their bytes."""
    if (row["config_basis"] or "").startswith("same id"):
        return True
    said = (row["quantization"] or "").lower()
    return not said or said.startswith(tuple(word for word, _ in _SCHEMES))


def label(index: int, row: dict[str, Any]) -> str:
    """Return the name of a row in the output."""
    return f"#{index} {row['engine']} {row['engine_version']} {row['model']}"


def printed_interval(value: float, digits: int) -> tuple[float, float]:
    """Return the interval of values that print as ``value`` with ``digits`` decimals."""
    half = 0.5 * 10.0**-digits
    return value - half, value + half


def decimals(value: float) -> int:
    """Return the number of decimals of ``value``."""
    text = repr(value)
    return len(text.partition(".")[2]) if "." in text else 0


def gib_interval(value: float) -> tuple[int, int]:
    """Return the interval of bytes that a log prints as ``value`` GiB.

    At least two decimals are assumed, because Python prints 7.0 for 7.00.
    """
    low, high = printed_interval(value, max(2, decimals(value)))
    return math.floor(low * GIB), math.ceil(high * GIB)
