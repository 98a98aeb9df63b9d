"""SipHash-2-4, the keyed hash of blocks of models whose layers all have sliding windows.

J.-P. Aumasson and D. J. Bernstein, "SipHash: a fast short-input PRF", 2012. The prefix index of such a model
does not store the parent of a block (`tonnage.cache.prefix.index`), so equal hashes of two prefixes would mix
up their blocks. A client can compute prefixes with equal XXH64 hashes. For SipHash it would need the process's
random key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from tonnage.cache.blocks.state import Core, Int32Array, Int64Array
from tonnage.cache.compiled import compiled, inner
from tonnage.cache.prefix.hashing import U32, pair, rotate
from tonnage.cache.prefix.index import seed_at


@inner
def _sip_round(
    v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    v0, v2 = v0 + v1, v2 + v3
    v1, v3 = rotate(v1, 13) ^ v0, rotate(v3, 16) ^ v2
    v0, v2 = rotate(v0, 32) + v3, v2 + v1
    v1, v3 = rotate(v1, 17) ^ v2, rotate(v3, 21) ^ v0
    return v0, v1, rotate(v2, 32), v3


@compiled
def hash_keyed(
    tokens: Int32Array,
    start: int,
    count: int,
    seed: np.uint64,
    key0: np.uint64,
    key1: np.uint64,
    rounds: int,
    final_rounds: int,
) -> np.uint64:
    """Return SipHash of ``seed`` and the bytes of ``tokens[start : start + count]`` (int32, little-endian).

    ``seed`` is the hash of the parent block or of the salt. ``key0`` and ``key1`` are the halves of the key.
    ``rounds`` and ``final_rounds`` are 2 and 4 in SipHash-2-4.
    """
    v0, v1 = key0 ^ np.uint64(0x736F6D6570736575), key1 ^ np.uint64(0x646F72616E646F6D)
    v2, v3 = key0 ^ np.uint64(0x6C7967656E657261), key1 ^ np.uint64(0x7465646279746573)
    pairs = count // 2
    for at in range(-1, pairs + 1):
        if at < 0:
            word = seed
        elif at < pairs:
            word = pair(tokens, start + 2 * at)
        else:
            # The last word holds the last token if the number of tokens is odd. Its highest byte is the length
            # in bytes modulo 256.
            word = np.uint64((8 + 4 * count) & 0xFF) << np.uint64(56)
            if count % 2:
                word |= np.uint64(tokens[start + count - 1]) & U32
        v3 ^= word
        for _ in range(rounds):
            v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0 ^= word
    v2 ^= np.uint64(0xFF)
    for _ in range(final_rounds):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


def sip_key(key: int) -> tuple[int, int]:
    """Return the two 64-bit halves of a SipHash key, derived from the process's 64-bit key."""
    digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


@compiled
def _hash_rows(core: Core, batch: Int64Array, key0: np.uint64, key1: np.uint64) -> None:
    size = core.pool[0].block_size
    for i in range(batch.size):
        at_row = batch[i]
        row = core.rows[at_row]
        for at in range(row.hashed, row.length // size):
            seed = seed_at(core, at_row, at)
            core.hashes[at_row, at] = hash_keyed(core.tokens[at_row], at * size, size, seed, key0, key1, 2, 4)
        row.hashed = max(row.hashed, row.length // size)


def keyed_hash(key: int) -> Callable[[Core, Int64Array], None]:
    """Return a function that hashes sequences' full blocks of tokens by SipHash, keyed from a 64-bit key."""
    key0, key1 = map(np.uint64, sip_key(key))
    return lambda core, batch: _hash_rows(core, batch, key0, key1)
