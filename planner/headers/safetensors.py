"""Reader of the safetensors header: 8 bytes with the length, followed by JSON. The tensor data is not read.

Format and limits: safetensors 0.6, README and safetensors/src/tensor.rs (MAX_HEADER_SIZE 100,000,000; offsets
are contiguous from 0 without holes or overlaps; the data ends where the file ends).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from tonnage.planner.errors import CheckpointError
from tonnage.planner.headers.partial import size_of
from tonnage.planner.model.dtypes import SAFETENSORS_BITS
from tonnage.planner.model.tensor import HeaderTensor
from tonnage.planner.units import ceil_div

# Maximum bytes of a header. The format allows 100,000,000 bytes, but parsed JSON may take 24 times the size of
# its text (a list of empty lists), and parsing may take half a minute. A list of empty lists of 16 MB takes 410
# MiB. The header of DeepSeek-V3 as one file (58 layers of 256 experts with three matrices, each a weight and a
# scale: 90,000 tensors) would have 11 MB.
MAX_HEADER_BYTES = 16_000_000
MAX_TENSORS = 131_072
_MAX_DIMENSIONS = 64  # maximum dimensions of torch's TensorIterator (2.13); only a malicious file has more


def read_header(path: Path) -> tuple[HeaderTensor, ...]:
    """Return the header entries (name, dtype, shape) of a safetensors file's tensors, in file order.

    Raises:
        CheckpointError: the header is truncated or contradicts itself or the file.
    """
    where = path.name
    try:
        if not path.is_file():  # Only a regular file is read, because reading a pipe may block.
            raise CheckpointError("is not a regular file", field=where)
        size = size_of(path, path.stat().st_size)
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{size} bytes are too short for a safetensors header", field=where)
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"claims a header of {length:,} bytes; {MAX_HEADER_BYTES:,} are read at most", field=where
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"claims a header of {length:,} bytes but the file has {size:,}: truncated download?",
                    field=where,
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", field=where) from None
    return parse_header(text, size - 8 - length, where)


def parse_header(text: bytes, data_bytes: int, where: str) -> tuple[HeaderTensor, ...]:
    """Return the entries (name, dtype, shape) of the tensors in the JSON of a safetensors header.

    Args:
        text: the header's JSON.
        data_bytes: bytes of tensor data that follow the header.
        where: name of the file, for error messages.

    Raises:
        CheckpointError: the header contradicts itself or the file.
    """
    # check the number of tensors before parsing, because parsed JSON takes much memory
    if (count := text.count(b'"data_offsets"')) > MAX_TENSORS:
        raise CheckpointError(f"describes {count:,} tensors; {MAX_TENSORS:,} are read at most", field=where)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError("the header is not JSON", field=where) from None
    if not isinstance(header, dict):
        raise CheckpointError("the header is not a JSON object", field=where)
    header.pop("__metadata__", None)
    spans: list[tuple[int, int, HeaderTensor]] = []
    for name, entry in header.items():
        spans.append(_entry(name, entry, where))
    spans.sort(key=lambda span: span[:2])
    position = 0
    for begin, end, tensor in spans:
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise CheckpointError(f"{tensor.name}: offset {begin:,} {what}", field=where)
        position = end
    if position != data_bytes:
        raise CheckpointError(
            f"the header describes {position:,} bytes of tensors, but the file holds {data_bytes:,}: "
            "truncated download?",
            field=where,
        )
    return tuple(tensor for _, _, tensor in spans)


def _entry(name: str, entry: Any, where: str) -> tuple[int, int, HeaderTensor]:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{name[:80]}: {what}", field=where)

    if not isinstance(entry, dict):
        raise wrong("the tensor's entry in the header is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_BITS:
        raise wrong(f"dtype {str(dtype)[:40]!r} is not known")
    if (
        not _is_sizes(shape)
        or len(shape) > _MAX_DIMENSIONS
        or not _is_sizes(offsets)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
    ):
        raise wrong("shape is not a list of sizes, or data_offsets are not two integers in order")
    bits = prod(shape) * SAFETENSORS_BITS[dtype]
    nbytes = offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        raise wrong(f"{dtype}{shape} takes {ceil_div(bits, 8):,} bytes, but its data_offsets span {nbytes:,}")
    return offsets[0], offsets[1], HeaderTensor(name, dtype, tuple(shape), nbytes)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
