"""The functions of the package `xxhash` that the block manager uses, for an environment without it.

The block manager hashes salts and the text of its own modules. Any keyed hash of 64 bits serves, because
tokens, parent and salt of a block are compared before the block is used.
"""

from __future__ import annotations

import hashlib
from typing import Any


def xxh3_64_intdigest(data: bytes | memoryview, seed: int = 0) -> int:
    """Return a hash of 64 bits of ``data``, keyed by ``seed``."""
    key = (seed % 2**64).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")


xxh64_intdigest = xxh3_64_intdigest


def xxh3_64(data: bytes = b"") -> Any:
    """Return a hash object with ``update`` and ``hexdigest`` of 16 digits."""
    return hashlib.blake2b(data, digest_size=8)
