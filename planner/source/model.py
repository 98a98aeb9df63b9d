"""`ModelSource`: a model's config, and its tensor headers if they are available."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tonnage.planner.headers.index import CheckpointIndex
from tonnage.planner.model.tensor import HeaderTensor


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """A model's config and the headers of its checkpoint.

    Instances are compared by identity.

    Attributes:
        path: the path from which the engine loads: a folder, a file, or the hub id if only the config is local.
        tensors: headers of the checkpoint, or None without a readable checkpoint.
        index: the checkpoint's index, if the headers of its files are not available.
        file_type: GGUF file type (such as Q4_K_M) for which `tensors` were computed from the config; empty if
            they were read from a file.
        notes: notes on where the config comes from, if it is not the model's own config.json. Each plan of the
            model shows them.
    """

    id: str
    path: str
    config: dict[str, Any]
    kind: Literal["folder", "gguf", "hub", "demo"]
    tensors: tuple[HeaderTensor, ...] | None = None
    index: CheckpointIndex | None = None
    notes: tuple[str, ...] = ()
    file_type: str = ""
