"""Reader of the GGUF header: metadata and tensor descriptions through a memory map, without the weights.

Format: ggml/docs/gguf.md of llama.cpp, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tonnage.planner.errors import CheckpointError
from tonnage.planner.headers.ggml_types import GGML_TYPES
from tonnage.planner.headers.partial import size_of
from tonnage.planner.headers.safetensors import MAX_TENSORS
from tonnage.planner.model.tensor import HeaderTensor

_STRING, _ARRAY = 8, 9
_SCALARS = {
    **dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))),
    10: "<Q",
    11: "<q",
    12: "<d",
}
# maximum items of a metadata array that is kept; vocabularies are longer, per-layer arrays much shorter
_KEPT_ITEMS = 4096
_MAX_HEADER = 100_000_000  # maximum bytes of a header; vocabulary and merges of 256,000 tokens take 12 MB
_MAX_DIMENSIONS = 4  # ggml's limit on the dimensions of a tensor (GGML_MAX_DIMS)
_MAX_METADATA = 10_000  # maximum number of metadata entries; published files have about 50
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """A metadata array of a GGUF file that is too long to keep; only its length is stored."""

    length: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata and tensor descriptions in the header of a GGUF file.

    Attributes:
        metadata: key -> str, int, float, bool, list or GGUFArray.
        tensors: tensors in file order, with shapes in PyTorch's order (GGUF stores them reversed).
        data_start: byte at which the tensors begin.
        offsets: offset of each tensor from `data_start`, in bytes.
    """

    metadata: dict[str, Any]
    tensors: tuple[HeaderTensor, ...]
    data_start: int = 0
    offsets: tuple[int, ...] = ()


class _Cursor:
    """A reader of the values in a GGUF header, in file order.

    It raises CheckpointError where the header is truncated or invalid.
    """

    def __init__(self, data: mmap.mmap, where: str, longest: int) -> None:
        self.data, self.where, self.at = data, where, 0
        self.longest = longest  # maximum number of items of an array that is kept

    def fail(self, what: str) -> CheckpointError:
        """Return a CheckpointError with the text `what` and the byte position at which reading stopped."""
        return CheckpointError(f"{what} at byte {self.at:,}", field=self.where)

    def skip(self, length: int) -> int:
        """Advance the read position by `length` bytes and return the old position."""
        start = self.at
        if length < 0 or start + length > len(self.data):
            raise self.fail(f"the header is truncated: a value states {length:,} bytes, but fewer follow")
        if start + length > _MAX_HEADER:
            raise self.fail(f"the header is longer than {_MAX_HEADER:,} bytes")
        self.at = start + length
        return start

    def scalar(self, kind: int) -> Any:
        """Read one number or boolean of the GGUF type `kind`."""
        code = _SCALARS[kind]
        return struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))[0]

    def string(self) -> str:
        """Read a GGUF string (length, then UTF-8 bytes)."""
        length = self.scalar(10)
        start = self.skip(length)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read one metadata value of the GGUF type `kind`."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth)
        if kind not in _SCALARS:
            raise self.fail(f"unknown value type {kind}")
        return self.scalar(kind)

    def array(self, depth: int) -> list[Any] | GGUFArray:
        """Read a metadata array; an array longer than `longest` items becomes a GGUFArray."""
        if depth > _MAX_DEPTH:
            raise self.fail(f"a metadata array is nested more than {_MAX_DEPTH} levels deep")
        kind, length = self.scalar(4), self.scalar(10)
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            if length > self.longest:
                self.skip(length * size)
                return GGUFArray(length)
            return [self.scalar(kind) for _ in range(length)]
        # Each item takes at least one byte, so an array cannot have more items than there are bytes left.
        if length > len(self.data) - self.at:
            raise self.fail(
                f"the header is truncated: an array states {length:,} items, but fewer bytes follow"
            )
        if kind == _STRING and length > self.longest:
            self.skip_strings(length)
            return GGUFArray(length)
        items = [self.value(kind, depth + 1) for _ in range(length)]
        return items if length <= self.longest else GGUFArray(length)

    def skip_strings(self, count: int) -> None:
        """Skip an array of `count` strings, such as a vocabulary.

        The method has a loop of its own, because a function call per string is slow.
        """
        unpack, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        end = min(len(data), _MAX_HEADER)
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + unpack(data, at)[0]
        else:
            if at <= end:
                self.at = at
                return
        raise self.fail("the header is truncated inside an array of strings")


def read_gguf(path: Path, longest: int = _KEPT_ITEMS) -> GGUFHeader:
    """Read the metadata and tensor descriptions of a GGUF file.

    Args:
        path: the file.
        longest: maximum number of items of a metadata array that is kept; a longer array becomes a GGUFArray.

    Raises:
        CheckpointError: the file is not GGUF, is truncated or contradicts itself.
    """
    where = path.name
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, where, longest), size_of(path, len(data)))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", field=where) from None
    except ValueError:  # mmap raises ValueError for an empty file
        raise CheckpointError("is empty", field=where) from None


def _read(cursor: _Cursor, size: int) -> GGUFHeader:
    if cursor.data[:4] != b"GGUF":
        raise CheckpointError("does not begin with GGUF", field=cursor.where)
    cursor.skip(4)
    version = cursor.scalar(4)
    if version not in (2, 3):
        raise CheckpointError(f"GGUF version {version} is not supported, only 2 and 3", field=cursor.where)
    tensor_count, metadata_count = cursor.scalar(10), cursor.scalar(10)
    if tensor_count > MAX_TENSORS or metadata_count > _MAX_METADATA:
        raise cursor.fail(
            f"the header claims {tensor_count:,} tensors and {metadata_count:,} metadata entries; at most "
            f"{MAX_TENSORS:,} and {_MAX_METADATA:,} are read; stopped"
        )
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"{key[:80]} is given twice")
        metadata[key] = cursor.value(cursor.scalar(4))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise cursor.fail(f"general.alignment {alignment!r} is not a multiple of 8")
    infos = [_tensor_info(cursor, alignment) for _ in range(tensor_count)]
    start = -(-cursor.at // alignment) * alignment
    _check_spans(infos, size - start, cursor.where)
    offsets = tuple(offset for offset, _ in infos)
    return GGUFHeader(metadata, tuple(tensor for _, tensor in infos), start, offsets)


def _tensor_info(cursor: _Cursor, alignment: int) -> tuple[int, HeaderTensor]:
    name = cursor.string()
    dimensions = cursor.scalar(4)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"{name[:80]} has {dimensions} dimensions instead of 1 to {_MAX_DIMENSIONS}")
    sizes = [cursor.scalar(10) for _ in range(dimensions)]
    kind, offset = cursor.scalar(4), cursor.scalar(10)
    if kind not in GGML_TYPES:
        raise cursor.fail(f"{name[:80]} has the unknown type {kind}")
    type_name, block, block_bytes = GGML_TYPES[kind]
    if sizes[0] % block:
        raise cursor.fail(
            f"{name[:80]}: rows of {sizes[0]} values do not divide into {type_name} blocks of {block} values"
        )
    if offset % alignment:
        raise cursor.fail(f"{name[:80]}: offset {offset:,} is not a multiple of {alignment}")
    nbytes = prod(sizes) // block * block_bytes
    return offset, HeaderTensor(name, type_name, tuple(reversed(sizes)), nbytes)


def _check_spans(infos: list[tuple[int, HeaderTensor]], data_bytes: int, where: str) -> None:
    """Raise CheckpointError if tensors of a GGUF file overlap or extend beyond the file's end."""
    names = {tensor.name for _, tensor in infos}
    if len(names) != len(infos):
        raise CheckpointError("two tensors have the same name", field=where)
    end = 0
    for offset, tensor in sorted(infos, key=lambda info: info[0]):
        if offset < end:
            raise CheckpointError(f"{tensor.name[:80]} overlaps the tensor before it", field=where)
        end = offset + tensor.nbytes
        if end > data_bytes:
            raise CheckpointError(
                f"{tensor.name[:80]} ends at byte {end:,} of the tensor data, but the file has "
                f"{data_bytes:,} bytes of it: truncated download?",
                field=where,
            )
