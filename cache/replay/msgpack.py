"""A reader of files of msgpack values, the encoding of vLLM's KV events on the wire.

The package msgpack decodes the values (github.com/msgpack/msgpack-python).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tonnage.cache.errors import CacheError


def is_batch(first: bytes) -> bool:
    """Return whether a file with the first bytes ``first`` begins with a msgpack array of 2 or 3 values.

    Every batch of KV events is such an array.
    """
    return first[:1] in (b"\x92", b"\x93")


def values(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield each msgpack value of the bytes ``data`` with its offset, as (offset, value).

    Raises:
        CacheError: The package msgpack is not installed.
        ValueError: A value is cut off or is not valid msgpack; the message names its offset.
    """
    try:
        import msgpack  # imported here, because only this format of traces needs it
    except ImportError:
        raise CacheError(
            "a trace in msgpack needs the package msgpack, not installed here", field="trace",
            hint="pip install 'tonnage[replay]'",
        ) from None  # fmt: skip
    # `max_buffer_size` also limits the length of each array, map and text. None can be longer than the file.
    unpacker = msgpack.Unpacker(unicode_errors="replace", max_buffer_size=len(data))
    unpacker.feed(data)
    while (start := unpacker.tell()) < len(data):
        try:
            value = unpacker.unpack()
        except msgpack.OutOfData:
            raise ValueError(
                f"the value at byte {start:,} is cut off: the file has {len(data):,} bytes"
            ) from None
        except ValueError as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"the value at byte {start:,} is not valid msgpack: {reason}") from None
        yield start, value
