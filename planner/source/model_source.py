"""ModelSource: a model that was found, by its config and its headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tonnage.planner.errors import ConfigError
from tonnage.planner.families.registry import family_of
from tonnage.planner.headers.tensor import HeaderTensor
from tonnage.planner.model.fields import load_config
from tonnage.planner.records import dataclass


@dataclass(frozen=True, slots=True)
class ModelSource:
    """``path``: what the engine loads from (a folder, a file, or the hub id when only its config is here).

    ``tensors``: the checkpoint's headers, or None when there is no checkpoint to read.
    """

    id: str
    path: str
    config: dict[str, Any]
    kind: Literal["folder", "gguf", "hub", "demo"]
    tensors: tuple[HeaderTensor, ...] | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the ``hf_quant_config.json`` that ModelOpt writes beside it where the config itself
    does not say how the weights are stored, and an encoder's longest text from sentence_bert_config.json."""
    config = load_config(folder / "config.json")
    beside = folder / "hf_quant_config.json"
    if config.get("quantization_config") is None and beside.is_file():
        found = load_config(beside).get("quantization")
        if not isinstance(found, dict):
            raise ConfigError("has no quantization object", field=beside.name)
        config["quantization_config"] = {"quant_method": "modelopt", **found}
    if "max_seq_length" not in config and family_of(config.get("model_type")).files.sentence_length:
        for beside in sorted(folder.glob("sentence_*_config.json")):
            config["max_seq_length"] = load_config(beside).get("max_seq_length")
            break
    return config
