"""Pool: a KVLayout and what one sequence of so many tokens takes from it, whichever engine owns it."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.layout import KVLayout


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Demand:
    """Most blocks one sequence ever holds in one group.

    ``fixed`` blocks whatever its length (recurrent state, the cache of an encoder's output), or
    ceil(min(tokens, ``most``) / ``block_size``) + ``extra``. ``most``: tokens kept at once by a sliding or
    chunked group (None: all). ``shards``: ranks that divide the tokens (decode context parallel).
    """

    block_size: int
    most: int | None = None
    extra: int = 0
    fixed: int | None = None
    shards: int = 1

    def blocks(self, tokens: int) -> int:
        if self.fixed is not None:
            return self.fixed
        if self.shards > 1:
            tokens = ceil_div(tokens, self.shards)
        return ceil_div(tokens if self.most is None else min(tokens, self.most), self.block_size) + self.extra


@dataclass(frozen=True, slots=True)
class Pool:
    """``demands`` go with ``layout.groups``. ``block_bytes``: bytes one block costs on the rank, which under
    pipeline parallelism holds only some of the layers (None: ``layout.bytes_per_block``)."""

    layout: KVLayout
    demands: tuple[Demand, ...]
    notes: tuple[str, ...] = ()

    def sequence_blocks(self, tokens: int) -> int:
        """Most blocks one sequence of ``tokens`` tokens ever holds, over all groups."""
        return sum(demand.blocks(tokens) for demand in self.demands)

    def longest(self, blocks: int, limit: int) -> int:
        """Longest sequence, at most ``limit`` tokens, that fits into ``blocks``; 0 when none does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence_blocks(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool holds. ``tokens`` and ``max_concurrency`` for sequences of max_model_len tokens, as the
    engine prints them."""

    num_blocks: int
    usable_blocks: int
    blocks_per_sequence: int
    tokens: int
    max_concurrency: float
