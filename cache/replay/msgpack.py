"""A reader of msgpack (github.com/msgpack/msgpack, spec.md): the encoding of KV events on the wire.

A file is a sequence of msgpack values. Extension types are refused, because KV events have none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

# First byte of a number -> (struct format of the number, its size in bytes)
_NUMBERS = {
    0xCA: (">f", 4), 0xCB: (">d", 8), 0xCC: (">B", 1), 0xCD: (">H", 2), 0xCE: (">I", 4), 0xCF: (">Q", 8),
    0xD0: (">b", 1), 0xD1: (">h", 2), 0xD2: (">i", 4), 0xD3: (">q", 8),
}  # fmt: skip
# First byte of a value -> size in bytes of the length field that follows it
_BYTES, _TEXTS = {0xC4: 1, 0xC5: 2, 0xC6: 4}, {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_DEEPEST = 16  # upper bound of nested levels of arrays and maps; KV events have six


def is_batch(first: bytes) -> bool:
    """Return whether a file with the first bytes ``first`` begins with a msgpack array of 2 or 3 values.

    Every batch of KV events is such an array.
    """
    return first[:1] in (b"\x92", b"\x93")


def values(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield each msgpack value of the bytes ``data`` with its offset, as (offset, value).

    Raises:
        ValueError: A value is cut off or has a type that is not understood; the message names the place.
    """
    at = 0
    while at < len(data):
        start = at
        try:
            value, at = _value(data, at, 0)
        except (struct.error, IndexError):
            raise ValueError(
                f"the value at byte {start:,} is cut off: the file has {len(data):,} bytes"
            ) from None
        yield start, value


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Decode the msgpack value at offset ``at``; return it and the offset behind it."""
    if depth > _DEEPEST:
        raise ValueError(f"byte {at:,}: arrays and maps are nested in more than {_DEEPEST} levels")
    kind, at = data[at], at + 1
    if kind < 0x80:
        return kind, at
    if kind >= 0xE0:
        return kind - 0x100, at
    if kind < 0x90:
        return _map(data, at, kind & 0x0F, depth)
    if kind < 0xA0:
        return _array(data, at, kind & 0x0F, depth)
    if kind < 0xC0:
        return _text(data, at, kind & 0x1F)
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at
    if kind in _NUMBERS:
        form, size = _NUMBERS[kind]
        return struct.unpack_from(form, data, at)[0], at + size
    for sizes, read in ((_TEXTS, _text), (_BYTES, _cut)):
        if kind in sizes:
            return read(data, at + sizes[kind], _length(data, at, sizes[kind]))
    for sizes, collect in ((_ARRAYS, _array), (_MAPS, _map)):
        if kind in sizes:
            return collect(data, at + sizes[kind], _length(data, at, sizes[kind]), depth)
    raise ValueError(f"byte {at - 1:,}: the msgpack type {kind:#x} is not one of KV events")


def _length(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_cut(data, at, size)[0], "big")


def _cut(data: bytes, at: int, count: int) -> tuple[bytes, int]:
    if at + count > len(data):
        raise IndexError
    return data[at : at + count], at + count


def _text(data: bytes, at: int, count: int) -> tuple[str, int]:
    text, at = _cut(data, at, count)
    return text.decode("utf-8", "replace"), at


def _array(data: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        value, at = _value(data, at, depth + 1)
        found.append(value)
    return found, at


def _map(data: bytes, at: int, count: int, depth: int) -> tuple[dict[str, Any], int]:
    found = {}
    for _ in range(count):
        place = at
        key, at = _value(data, at, depth + 1)
        if not isinstance(key, str):
            raise ValueError(f"byte {place:,}: the key of a map is no text")
        found[key], at = _value(data, at, depth + 1)
    return found, at
