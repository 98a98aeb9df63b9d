"""LoRA adapters loaded at start, given by ``--lora-modules name=path``, a flag with vLLM's syntax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tonnage.planner.errors import DeploymentError

_FIELD = "lora_modules"


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """A LoRA adapter in PEFT's format; requests select it by ``name`` in their ``model`` field."""

    name: str
    path: Path


def lora_modules(given: Sequence[str], model_name: str, max_lora_rank: int) -> tuple[LoRAModule, ...]:
    """Return the LoRA adapters that ``given``, the values of --lora-modules (``name=path``), describe.

    Raises:
        DeploymentError: a name is used twice, a folder has no adapter, or a rank exceeds ``max_lora_rank``.
    """
    modules = [_module(text, max_lora_rank) for text in given]
    names = [model_name, *(module.name for module in modules)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise DeploymentError(
            f"the model name {min(twice)!r} is used twice", field=_FIELD, hint="rename the adapter"
        )
    return tuple(modules)


def _module(text: str, max_lora_rank: int) -> LoRAModule:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise DeploymentError(f"{text!r} does not have the form name=path", field=_FIELD)
    path = Path(folder).absolute()
    # The file adapter_model.bin is not accepted, because it is a pickle.
    if not (path / "adapter_model.safetensors").is_file():
        raise DeploymentError(
            f"{path} has no adapter_model.safetensors", field=_FIELD, hint="save it with PEFT"
        )
    try:
        config = json.loads((path / "adapter_config.json").read_bytes())
        rank = config["r"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        rank = None
    if not isinstance(rank, int):
        raise DeploymentError(
            f"{path} has no adapter_config.json with a rank r", field=_FIELD, hint="save it with PEFT"
        )
    if rank > max_lora_rank:
        raise DeploymentError(
            f"adapter {name} has rank {rank}; the adapter slots have rank {max_lora_rank}",
            field=_FIELD,
            hint=f"use --max-lora-rank {rank}",
        )
    return LoRAModule(name, path)
