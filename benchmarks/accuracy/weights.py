"""Section ``weights``: parameters and checkpoint bytes from config.json alone, compared to the byte."""

from __future__ import annotations

from typing import Any

from accuracy.common import Inputs, Section, read_tsv
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.dtypes import config_dtype
from tonnage.planner.planning.checkpoint import checkpoint_size
from tonnage.planner.quantization.read import read_quantization

NAME = "weights"


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the section, or None without configs and a truth."""
    if inputs.configs is None or (inputs.truth is None and inputs.checkpoints is None):
        return None
    section = Section()
    if inputs.truth is not None:
        for row in read_tsv(inputs.truth, "model", "params_unique"):
            _parameters(inputs, section, row)
    if inputs.checkpoints is not None:
        for row in read_tsv(inputs.checkpoints, "model", "total_size_bytes"):
            _checkpoint(inputs, section, row)
    section.extra["via"] = "adapter"
    return section


def _parameters(inputs: Inputs, section: Section, row: dict[str, str]) -> None:

    config = inputs.config(row["model"])
    if config is None:
        return
    try:
        architecture = build_architecture(config)
    except TonnageError as error:
        section.refuse(row["model"], error)
        return
    section.add(row["model"], architecture.parameters, int(row["params_unique"]))


def _checkpoint(inputs: Inputs, section: Section, row: dict[str, str]) -> None:

    config = inputs.config(row["model"])
    if config is None:
        return
    try:
        architecture = build_architecture(config)
        quantization = read_quantization(config, None)
        dtype = _dtype(row, config)
        size = checkpoint_size(architecture, quantization, config, dtype)
    except TonnageError as error:
        section.refuse(f"{row['model']} checkpoint", error)
        return
    truth, name = int(row["total_size_bytes"]), f"{row['model']} checkpoint"
    # NF4: the checkpoint stores each module's offset as decimal digits, which no config states. The interval is
    # 5 bytes per module.
    inside = size.low < size.high and size.low <= truth <= size.high
    section.add(
        name,
        size.low if size.low == size.high else (size.low + size.high) // 2,
        truth,
        "in its interval" if inside else "",
    )
    if inside:
        section.covered = (section.covered or 0) + 1


def _dtype(row: dict[str, str], config: dict[str, Any]) -> str:
    """Return the dtype of the row, else of the config, else bfloat16."""
    if row["torch_dtype"] not in ("None", ""):
        return row["torch_dtype"]
    return config_dtype(config.get("dtype", config.get("torch_dtype"))) or "bfloat16"
