"""The hash of a block of tokens after its prefix: XXH64 of the tokens, seeded with the previous block's hash.

XXH64 follows the xxHash specification (Y. Collet, doc/xxhash_spec.md, version 0.2.0). It is implemented here
because the compiled loop over a prompt's blocks cannot call a library. The tests compare it with the `xxhash`
package bit for bit. A hash of 64 bits is enough, because it only proposes a block. Tokens, parent and salt are
compared before the block is used.

If all layers of a model have sliding windows, blocks have no parents to compare. A keyed hash is then used
(`tonnage.cache.prefix.keyed`).
"""

from __future__ import annotations

import numpy as np
import xxhash

from tonnage.cache.blocks.state import Int32Array
from tonnage.cache.compiled import compiled, inner

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
U32 = np.uint64(0xFFFFFFFF)
_U64 = np.uint64(64)


def seed_of(salt: bytes, key: int) -> int:
    """Return the seed for the hash of the first block of a prompt, derived from the request's cache salt.

    ``key`` is random per process, so that a client cannot choose tokens whose hashes collide.
    """
    return xxhash.xxh3_64_intdigest(salt, key)


@inner
def rotate(value: np.uint64, bits: int) -> np.uint64:
    """Return the 64-bit integer ``value`` rotated left by ``bits`` bits."""
    count = np.uint64(bits)
    return (value << count) | (value >> (_U64 - count))


@inner
def _round(lane: np.uint64, value: np.uint64) -> np.uint64:
    return rotate(lane + value * _P2, 31) * _P1


@inner
def pair(tokens: Int32Array, at: int) -> np.uint64:
    """Return the int32 tokens at ``at`` and ``at + 1`` as one 64-bit little-endian integer."""
    low, high = np.uint64(tokens[at]) & U32, np.uint64(tokens[at + 1]) & U32
    return low | (high << np.uint64(32))


@compiled
def hash_tokens(tokens: Int32Array, start: int, count: int, seed: np.uint64) -> np.uint64:
    """Return XXH64 of the bytes of ``tokens[start : start + count]`` (int32, little-endian)."""
    at, end = start, start + count
    if count >= 8:
        lane1, lane2, lane3, lane4 = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + 8 <= end:
            lane1 = _round(lane1, pair(tokens, at))
            lane2 = _round(lane2, pair(tokens, at + 2))
            lane3 = _round(lane3, pair(tokens, at + 4))
            lane4 = _round(lane4, pair(tokens, at + 6))
            at += 8
        value = rotate(lane1, 1) + rotate(lane2, 7) + rotate(lane3, 12) + rotate(lane4, 18)
        value = (value ^ _round(np.uint64(0), lane1)) * _P1 + _P4
        value = (value ^ _round(np.uint64(0), lane2)) * _P1 + _P4
        value = (value ^ _round(np.uint64(0), lane3)) * _P1 + _P4
        value = (value ^ _round(np.uint64(0), lane4)) * _P1 + _P4
    else:
        value = seed + _P5
    value = value + np.uint64(count) * np.uint64(4)
    while at + 2 <= end:
        value = rotate(value ^ _round(np.uint64(0), pair(tokens, at)), 27) * _P1 + _P4
        at += 2
    if at < end:
        value = rotate(value ^ ((np.uint64(tokens[at]) & U32) * _P1), 23) * _P2 + _P3
    value = (value ^ (value >> np.uint64(33))) * _P2
    value = (value ^ (value >> np.uint64(29))) * _P3
    return value ^ (value >> np.uint64(32))
