"""Cache salts as small reusable ids; requests with different salts share only prefixes set by `Salts.allow`."""

from __future__ import annotations

import numpy as np

from tonnage.cache.blocks.state import Core, Int32Array, columns
from tonnage.cache.prefix.hashing import seed_of


class Salts:
    """The small integer ids of the cache salts in use.

    Id 0 is the empty salt. It is also the salt of the prefixes that `allow` lets every request share. An id is
    given to another salt only when no prefix-index node and no live sequence has the id. Equal ids therefore
    mean equal salts.
    """

    def __init__(self, core: Core, key: int) -> None:
        self._key = key
        self._core, self._sequences = core, columns(core.rows)
        self._ids: dict[bytes, int] = {b"": 0}
        self._salts: list[bytes] = [b""]
        self._rows: list[int] = [0]  # number of live sequences by salt id
        self._unused: list[int] = []
        self._sweep_at = 64
        self._allowed: list[Int32Array] = []  # prefixes from `allow`, in whole blocks, the longest first

    def allow(self, tokens: Int32Array) -> None:
        """Let requests of every cache salt share the blocks of the prefix ``tokens``."""
        if not any(np.array_equal(tokens, known) for known in self._allowed):
            self._allowed.append(tokens.copy())
            self._allowed.sort(key=len, reverse=True)

    def enter(self, row: int, salt: bytes, tokens: Int32Array) -> None:
        """Set the cache salt of a new sequence's row, and how many of its blocks are shared with all salts."""
        known = self._ids.get(salt)
        if known is None:
            known = self._new_id(salt)
        self._rows[known] += 1
        self._sequences.salt[row] = known
        self._sequences.shared[row] = self._allowed_blocks(tokens) if known else 0

    def share(self, row: int) -> None:
        """Add the forked sequence in ``row`` to the number of live sequences with its cache salt."""
        self._rows[self._sequences.salt[row]] += 1

    def leave(self, row: int) -> None:
        """Subtract the ended sequence in ``row`` from the number of live sequences with its cache salt."""
        self._rows[self._sequences.salt[row]] -= 1

    def salt_of(self, salt_id: int) -> bytes:
        """Return the cache salt that has the id ``salt_id``, which must be in use."""
        return self._salts[salt_id]

    def _allowed_blocks(self, tokens: Int32Array) -> int:
        for prefix in self._allowed:
            if np.array_equal(prefix, tokens[: len(prefix)]):
                return len(prefix) // int(self._core.pool["block_size"][0])
        return 0

    def _new_id(self, salt: bytes) -> int:
        capacity = len(self._core.seeds)  # upper bound of the salts that nodes and live sequences use at once
        if not self._unused and len(self._salts) >= min(self._sweep_at, capacity):
            self._sweep()
            self._sweep_at = 2 * (len(self._salts) - len(self._unused)) + 64
        if self._unused:
            salt_id = self._unused.pop()
        else:
            salt_id = len(self._salts)
            self._salts.append(b"")
            self._rows.append(0)
        self._ids[salt], self._salts[salt_id] = salt_id, salt
        self._core.seeds[salt_id] = seed_of(salt, self._key)
        return salt_id

    def _sweep(self) -> None:
        used = self._core.salt_nodes
        for salt_id in range(1, len(self._salts)):
            salt = self._salts[salt_id]
            if salt and not self._rows[salt_id] and not used[salt_id]:
                del self._ids[salt]
                self._salts[salt_id] = b""
                self._unused.append(salt_id)
