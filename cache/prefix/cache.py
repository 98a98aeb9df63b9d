"""The prefix cache as the block manager uses it: prefix hits, cache salts and resets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tonnage.cache.blocks.state import BY_RESET, Core, Int32Array, Int64Array, columns
from tonnage.cache.errors import InvalidRequest
from tonnage.cache.prefix import hits
from tonnage.cache.prefix.index import evict
from tonnage.cache.prefix.salts import Salts
from tonnage.cache.results import Admitted

# Type of a function that hashes the full blocks of sequences. Its arguments are the block manager's arrays and
# the indices of the sequences' rows, int64 [rows].
HashRows = Callable[[Core, Int64Array], None]


class PrefixCache:
    """The prefix cache of a block manager, with counts of the prompt tokens that were cached.

    If prefix caching is off, no prompt has a hit.

    Attributes:
        enabled: Whether prefix caching is on.
        salts: The cache salts of the live sequences and of the prefix index's nodes.
        query_tokens: Prompt tokens of admitted requests.
        hit_tokens: Tokens of ``query_tokens`` that were cached.
        shared_hit_tokens: Tokens of ``hit_tokens`` that requests with any salt may read.
        lock_hit: Compiled function that locks the prefix hit of an admitted request (`hits.lock_hit`).
    """

    def __init__(self, core: Core, key: int, hash_rows: HashRows | None) -> None:
        self._core, self._rows, self._counts = core, columns(core.rows), columns(core.pool)
        self.enabled = bool(self._counts.caching[0])
        self._block_size = int(self._counts.block_size[0])
        self.lock_hit = hits.lock_hit
        self._hash_rows = hash_rows
        self.salts = Salts(core, key)
        self.query_tokens = self.hit_tokens = self.shared_hit_tokens = 0

    def find(self, row: int, tokens: Int32Array, salt: bytes) -> int:
        """Find the longest usable prefix hit of a prompt and return its number of blocks.

        The cached blocks are recorded in the unused ``row``; `take` or `drop` must be called next. At least the
        last token is left to compute, because its logits are needed.
        """
        if not np.may_share_memory(tokens, self._core.tokens[row]):
            self._core.tokens[row, : len(tokens)] = tokens
        self._rows.length[row] = len(tokens)
        if not self.enabled:
            return 0
        self.salts.enter(row, salt, tokens)
        self.hash(np.array([row]))
        return hits.find_hit(self._core, row)

    def hash(self, rows: Int64Array) -> None:
        """Hash the full blocks of sequences by the hash function that the constructor got.

        Without one the call does nothing, and the compiled lookup hashes the blocks later.
        """
        if self._hash_rows is not None and self.enabled:
            self._hash_rows(self._core, rows)

    def take(self, row: int, blocks: int) -> Admitted:
        """Add a reference to each cached block that `find` recorded in an admitted request's row.

        The call counts the tokens of the prefix hit, too.
        """
        self.lock_hit(self._core, row, blocks)
        length, salt, shared = (int(of[row]) for of in (self._rows.length, self._rows.salt, self._rows.shared))
        hit, shared_hit = blocks * self._block_size, min(blocks, shared if salt else blocks) * self._block_size
        self.query_tokens += length
        self.hit_tokens += hit
        self.shared_hit_tokens += shared_hit
        found = int(self._rows.found[row]) if self._counts.aligned[0] else 0
        return Admitted(row, hit, shared_hit, found * self._block_size if found > blocks else 0)

    def drop(self, row: int, blocks: int) -> None:
        """Clear the cached blocks that `find` recorded in a row, so that the row is unused again."""
        if self.enabled:
            self.salts.leave(row)
        hits.drop_hit(self._core, row, blocks)

    def allow(self, tokens: Int32Array) -> None:
        """Let requests of every cache salt share the full blocks of the prefix ``tokens``.

        Raises InvalidRequest if the prefix is shorter than a block.
        """
        whole = len(tokens) // self._block_size * self._block_size
        if whole == 0:
            raise InvalidRequest(
                f"a prefix of {len(tokens)} tokens has no full block of {self._block_size}", field="token_ids"
            )
        self.salts.allow(tokens[:whole])

    def forget(self) -> None:
        """Evict all cached blocks. The call is allowed only while no sequence holds a block."""
        cached = int(self._counts.cached[0])
        if cached:
            evict(self._core, cached, BY_RESET)
