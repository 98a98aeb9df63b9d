"""Keys of KV blocks, the same in every process: SHA-256 over the salt and all tokens of the prefix.

The prefix cache in memory uses hashes with a random key for each process and compares tokens as well
(`tonnage.cache.prefix.hashing`). A KV tier outlives the process and stores no tokens, so its keys are
cryptographic hashes, as vLLM's block hashes are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


class ContentKeys:
    """The keys of one sequence's full KV blocks, each computed when it is first requested.

    Args:
        salt: cache salt of the sequence; sequences with different salts have only keys of `shared` blocks in
            common.
        shared: number of leading blocks that sequences of every salt share, such as a public system prompt.
        block_size: tokens of a block.
    """

    def __init__(self, salt: bytes, shared: int, block_size: int) -> None:
        self._salt, self._shared, self._block_size = salt, shared, block_size
        self._keys: list[bytes] = []

    def copy(self) -> ContentKeys:
        """Return a copy of the block keys, for a sequence that was forked from this one."""
        made = ContentKeys(self._salt, self._shared, self._block_size)
        made._keys = self._keys.copy()
        return made

    def first(self, blocks: int, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the sequence's first ``blocks`` KV blocks.

        Args:
            blocks: number of blocks, all full.
            tokens: the tokens of the sequence; only tokens without a key yet are read.
        """
        keys, size = self._keys, self._block_size
        for at in range(len(keys), blocks):
            parent = keys[-1] if keys else _root(b"")
            if self._salt and at == self._shared:
                parent = hashlib.sha256(parent + _root(self._salt)).digest()
            block = np.array(tokens[at * size : (at + 1) * size], "<i4").tobytes()
            keys.append(hashlib.sha256(parent + block).digest())
        return keys[:blocks]


def _root(salt: bytes) -> bytes:
    """Return the digest of a cache salt, with a fixed prefix so that it differs from any block's digest."""
    return hashlib.sha256(b"tonnage salt " + salt).digest()
