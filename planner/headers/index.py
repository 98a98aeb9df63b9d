"""Reader of a checkpoint in a folder: `model.safetensors`, the shards of an index, or an index alone.

An index (huggingface_hub 1.x, serialization/_torch.py) maps the name of every tensor to its file. Its metadata
may have `total_size`, the bytes of all tensors. It has no shapes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.planner.errors import CheckpointError
from tonnage.planner.headers.safetensors import read_header
from tonnage.planner.model.tensor import HeaderTensor

INDEX = "model.safetensors.index.json"
# Limits of an index. The largest published model has 207,000 tensors in 62 shards (Kimi-K2-Thinking: 60 layers
# of 384 experts, each with three matrices of three tensors). An index needs about 120 bytes per tensor.
MAX_TENSORS_OF_MODEL = 524_288
MAX_INDEX_BYTES = 64_000_000
_MAX_SHARDS = 10_000


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The index (model.safetensors.index.json) of a sharded checkpoint.

    Attributes:
        files: name of each tensor -> name of its shard.
        total_bytes: bytes of all tensors, or None if the index does not state them.
    """

    files: dict[str, str]
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The readable part of a safetensors checkpoint: the headers of all its files, or only its index.

    Attributes:
        tensors: tensors from the headers, or None if no header is available.
        index: the index, if no header is available.
    """

    tensors: tuple[HeaderTensor, ...] | None = None
    index: CheckpointIndex | None = None


def read_folder(folder: Path) -> Checkpoint:
    """Read a folder's safetensors headers, or only the index if no shard is in the folder.

    Raises:
        CheckpointError: some shards are missing, a header is broken, or index and shards disagree.
    """
    single, index = folder / "model.safetensors", folder / INDEX
    if single.exists():
        return Checkpoint(read_header(single))
    if not index.exists():
        return Checkpoint()
    found = parse_index(_read(index))
    shards = shards_of(found)
    missing = [shard for shard in shards if not (folder / shard).exists()]
    if len(missing) == len(shards):
        return Checkpoint(index=found)
    if missing:
        raise CheckpointError(f"{missing[0][:80]} is missing", field=INDEX, hint="finish the download")
    return Checkpoint(merge_shards({shard: read_header(folder / shard) for shard in shards}, found))


def _read(index: Path) -> bytes:
    try:
        if not index.is_file():  # Reading a pipe may block, and a device file may have no end.
            raise CheckpointError("is not a regular file", field=INDEX)
        with index.open("rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", field=INDEX) from None
    if len(text) > MAX_INDEX_BYTES:
        raise CheckpointError(f"is too large for an index: {MAX_INDEX_BYTES:,} bytes at most", field=INDEX)
    return text


def parse_index(text: bytes) -> CheckpointIndex:
    """Parse the JSON of a safetensors index and return the index.

    Raises:
        CheckpointError: the text is no index, or has no map from tensors to files.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError("is not JSON", field=INDEX) from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("has no weight_map that maps tensor names to file names", field=INDEX)
    if len(weight_map) > MAX_TENSORS_OF_MODEL:
        raise CheckpointError(
            f"names {len(weight_map):,} tensors; {MAX_TENSORS_OF_MODEL:,} are read at most", field=INDEX
        )
    return CheckpointIndex(weight_map, _total(content.get("metadata")))


def _total(metadata: Any) -> int | None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # some versions of transformers write total_size as a float
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    return total if type(total) is int and total > 0 else None


def shards_of(index: CheckpointIndex) -> list[str]:
    """Return the sorted names of the shards in a safetensors index.

    Raises:
        CheckpointError: a shard's name has a path, or there are too many shards.
    """
    shards = sorted(set(index.files.values()))
    if len(shards) > _MAX_SHARDS:
        raise CheckpointError(f"names {len(shards):,} shards; {_MAX_SHARDS:,} are read at most", field=INDEX)
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{shard[:80]!r} points outside the folder", field=INDEX)
    return shards


def merge_shards(
    headers: dict[str, tuple[HeaderTensor, ...]], index: CheckpointIndex
) -> tuple[HeaderTensor, ...]:
    """Return the header entries of all shards' tensors, checked against the checkpoint's index.

    Raises:
        CheckpointError: index and shards disagree.
    """
    out: dict[str, HeaderTensor] = {}
    for shard, tensors in headers.items():
        for tensor in tensors:
            if index.files.get(tensor.name) != shard:
                raise CheckpointError(f"{tensor.name[:80]} of {shard} is not in the index", field=INDEX)
            out[tensor.name] = tensor
    missing = sorted(set(index.files) - set(out))
    if missing:
        raise CheckpointError(f"{missing[0][:80]} is in no shard ({len(missing)} missing)", field=INDEX)
    return tuple(out.values())
