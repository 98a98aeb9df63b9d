"""Python hash functions of blocks for tests, in place of the compiled hash."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from tonnage.cache.blocks.state import Core, Int64Array
from tonnage.cache.manager import KVCacheManager

# A hash function takes the bytes of one block's int32 tokens and the hash of the parent or of the salt. It
# returns an unsigned 64-bit hash.
HashBlock = Callable[[memoryview, int], int]


def xxh64_block(data: memoryview, parent_hash: int) -> int:
    """Return XXH64 of a block by the `xxhash` package, to compare the compiled `hash_tokens` with it."""
    return xxhash.xxh64_intdigest(data, parent_hash)


def set_hash(manager: KVCacheManager, hash_block: HashBlock) -> None:
    """Make a new manager hash its blocks by ``hash_block``."""
    size = manager.block_size

    def hash_rows(core: Core, batch: Int64Array) -> None:
        for row in batch:
            tokens, hashes, record = core.tokens[row], core.hashes[row], core.rows[row]
            shared, own = int(record["shared"]), int(core.seeds[record["salt"]])
            for at in range(int(record["hashed"]), int(record["length"]) // size):
                parent = int(hashes[at - 1]) if at else (int(core.seeds[0]) if shared else own)
                if at and at == shared:
                    parent ^= own
                hashes[at] = hash_block(tokens[at * size : (at + 1) * size].data.cast("B"), parent)
                record["hashed"] = at + 1

    manager.prefix._hash_rows = hash_rows
