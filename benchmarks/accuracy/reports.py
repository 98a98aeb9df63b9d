"""What the sections on start-up reports share: flags and model of a row, one vote per source."""

from __future__ import annotations

import math
from typing import Any

from accuracy.common import Inputs

GIB = 1 << 30

# What a report's ``quantization`` means where its config (a sibling of the same shape) does not say so itself.
# Group 128 is the default of AutoAWQ and llm-compressor's W4A16 preset.
_SCHEMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                      "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}),
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
)  # fmt: skip


def model_config(inputs: Inputs, row: dict[str, Any]) -> dict[str, Any] | None:
    """config.json of the row's model: a sibling's gives the shapes, the row gives the quantization."""
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
    """Whether the weights' format is stated exactly enough to plan their bytes."""
    if (row["config_basis"] or "").startswith("same id"):
        return True
    said = (row["quantization"] or "").lower()
    return not said or said.startswith(tuple(word for word, _ in _SCHEMES))


def label(index: int, row: dict[str, Any]) -> str:
    return f"#{index} {row['engine']} {row['engine_version']} {row['model']}"


def printed_interval(value: float, digits: int) -> tuple[float, float]:
    """Values that print as ``value`` with so many decimals."""
    half = 0.5 * 10.0**-digits
    return value - half, value + half


def decimals(value: float) -> int:
    text = repr(value)
    return len(text.partition(".")[2]) if "." in text else 0


def gib_interval(value: float) -> tuple[int, int]:
    """Bytes that a log prints as ``value`` GiB; Python prints 7.0 for 7.00, so two decimals at least."""
    low, high = printed_interval(value, max(2, decimals(value)))
    return math.floor(low * GIB), math.ceil(high * GIB)
