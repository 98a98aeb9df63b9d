"""PrefixIndex: which cached or used blocks hold which tokens. Four verbs: match, insert, lock, evict.

One *node* is one full block of tokens after one given prefix. Its content sits in one block of each group, so
the node is named by its block in the *anchor* group (the first full group): no second kind of id. A node
stores its tokens, its parent node (the salt's root for the first block) and the hash that finds it. The hash
runs along the chain, each block's keyed by its parent's (the first block's by the salt's), over the raw bytes
of the int32 tokens.

**A collision cannot serve a wrong block.** The hash only proposes a node. It is taken when its parent is the
node matched just before (for the first block: the root of the same salt) and its tokens are equal; by
induction from the root the whole prefix is then equal, whatever the hash function does. A node whose hash is
already taken by another one is not inserted, which costs hits and nothing else.

**What a hit needs.** Full groups: every block of the prefix. A sliding group: only the blocks that queries
after the prefix can still read, i.e. its last window; the longest prefix for which all groups have theirs is
the hit.

**No cached child without its parent.** Laws, kept by `KVCacheManager` and checked in `invariants`: (1)
whoever holds a node's full-group block in its table holds those of all its ancestors (duplicates are merged
when they are published, so that the chain is the same one); (2) tables are released tail first. So when a
child becomes unreferenced its parent is still referenced or released right after it: in the LRU list every
child is older than its parent, and evicting the oldest block never orphans anything. Eviction of a full-group
block drops the node with its blocks in all groups; a sliding block goes alone.

A layout without any full group has no anchor: its tables drop the start of the chain, and the prefix cache is
off.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from tonnage.cache.admission import first_needed_block
from tonnage.cache.pool import NULL_BLOCK, BlockPool, Int32Array
from tonnage.planner.layout import KVLayout

# (bytes of one block's int32 tokens, parent's hash) -> unsigned 64-bit hash. The root's is that of the salt.
HashBlock = Callable[[memoryview, int], int]

ROOT = NULL_BLOCK


def xxh3_block(data: memoryview, parent_hash: int) -> int:
    """XXH3-64 seeded with the parent's hash: 64 bits are enough, tokens and parent being compared on a hit."""
    return xxhash.xxh3_64_intdigest(data, parent_hash)


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the chain to go on from: the last node so far, its hash. ``Point()`` is the root."""

    node: int = ROOT
    hash: int = 0


START = Point()
_NO_NODES: Int32Array = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """Nodes found, in chain order (int32), and the point after the last one."""

    nodes: Int32Array
    point: Point


class PrefixIndex:
    """Maps token prefixes to blocks of ``pool``; ``anchor`` is the first full group of ``layout``."""

    def __init__(self, layout: KVLayout, pool: BlockPool, hash_block: HashBlock = xxh3_block) -> None:
        self.pool = pool
        self.block_size = layout.block_size
        self.windows = tuple(g.window if g.kind == "sliding" else None for g in layout.groups)
        self.anchor = next(i for i, window in enumerate(self.windows) if window is None)
        self._hash_block = hash_block
        blocks = pool.num_blocks
        self.tokens: Int32Array = np.zeros((blocks, self.block_size), np.int32)  # by node
        self._blocks = array("i", bytes(4 * blocks * len(self.windows)))  # [group, node] -> block
        self.blocks: Int32Array = np.frombuffer(self._blocks, dtype=np.int32).reshape(-1, blocks)
        self._node_of = array("i", bytes(4 * blocks))  # block -> its node, 0 when not in the index
        self.node_of: Int32Array = np.frombuffer(self._node_of, dtype=np.int32)
        self._parent = array("i", bytes(4 * blocks))  # node -> parent node; -root id for a first block
        self._hash = array("Q", bytes(8 * blocks))  # node -> its hash
        self._by_hash: dict[int, int] = {}
        self._roots: dict[bytes, int] = {}  # salt -> root id, > 0, while a node hangs on it
        self._salts: dict[int, bytes] = {}
        self._children_of_root: dict[int, int] = {}
        self._unused_roots: list[int] = []
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._by_hash)

    def match(self, tokens: Int32Array, salt: bytes, start: Point = START) -> Match:
        """The longest run of nodes that continues ``start`` with ``tokens``; int32 [blocks, block_size].

        Exact: tokens and parents are compared. Looks at the anchor group only; see `usable` for the others.
        """
        parent = start.node if start.node != ROOT else -self._roots.get(salt, 0)
        if parent == 0 or not len(tokens):
            return Match(_NO_NODES, start)
        data, width = _bytes_of(tokens), 4 * self.block_size
        hash_block, by_hash, parent_of = self._hash_block, self._by_hash, self._parent
        found: list[int] = []
        hashes: list[int] = []
        value = self._start_hash(salt, start)
        for offset in range(0, len(data), width):
            value = hash_block(data[offset : offset + width], value)
            node = by_hash.get(value, 0)
            if node == 0 or parent_of[node] != parent:
                break
            found.append(node)
            hashes.append(value)
            parent = node
        if not found:
            return Match(_NO_NODES, start)
        nodes: Int32Array = np.array(found, dtype=np.int32)
        equal = (self.tokens[nodes] == tokens[: len(nodes)]).all(axis=1)
        if not equal.all():
            nodes = nodes[: int(equal.argmin())]
        if not len(nodes):
            return Match(nodes, start)
        return Match(nodes, Point(int(nodes[-1]), hashes[len(nodes) - 1]))

    def usable(self, match: Match) -> Match:
        """The longest part of a match from the root that is a hit in every group (see the module's text)."""
        count = len(match.nodes)
        possible = np.ones(count + 1, np.bool_)
        lengths = np.arange(count + 1)
        for group, window in enumerate(self.windows):
            if window is None:  # the full groups live and die with the node
                continue
            present = self.blocks[group, match.nodes] != NULL_BLOCK
            # gap[k]: 1 + index of the last of the first k nodes without a block here, 0 if there is none
            gap = np.concatenate(([0], np.maximum.accumulate(np.where(present, 0, lengths[1:]))))
            first = np.maximum(0, lengths * self.block_size - window + 1) // self.block_size
            possible &= gap <= first
        length = int(np.flatnonzero(possible)[-1])
        if length == count:
            return match
        if length == 0:
            return Match(match.nodes[:0], START)
        node = int(match.nodes[length - 1])
        return Match(match.nodes[:length], Point(node, self._hash[node]))

    def lock(self, match: Match) -> tuple[Int32Array, ...]:
        """Take a reference to the blocks of a usable match; per group int32 [len(match.nodes)].

        Blocks a sliding window has left are the null block. Unreferenced ones leave the LRU list.
        """
        taken = []
        for group, window in enumerate(self.windows):
            ids: Int32Array = self.blocks[group, match.nodes]
            first = first_needed_block(window, len(match.nodes) * self.block_size, self.block_size)
            ids[:first] = NULL_BLOCK
            self.pool.acquire(ids[first:])
            taken.append(ids)
        return tuple(taken)

    def insert(self, tokens: Int32Array, salt: bytes, start: Point, blocks: Sequence[Int32Array]) -> list[int]:
        """Publish used blocks as nodes after ``start``; returns the hashes of those inserted, in order.

        ``tokens`` int32 [count, block_size], ``blocks`` per group int32 [count] with the null block where
        a sliding window has left. The first must have no node yet (`match` found none). Stops early when
        a hash is taken by another node.
        """
        if not len(tokens):
            return []
        parent = start.node if start.node != ROOT else -self._root(salt)
        data, width = _bytes_of(tokens), 4 * self.block_size
        anchor = blocks[self.anchor].tolist()
        hashes: list[int] = []
        value = self._start_hash(salt, start)
        for index, node in enumerate(anchor):
            value = self._hash_block(data[index * width : (index + 1) * width], value)
            if value in self._by_hash:
                break
            self._by_hash[value] = node
            self._hash[node] = value
            self._parent[node] = parent
            parent = node
            hashes.append(value)
        count = len(hashes)
        if start.node == ROOT:
            self._count_root(salt, 1 if count else 0)
        nodes = blocks[self.anchor][:count]
        self.tokens[nodes] = tokens[:count]
        for group, ids in enumerate(blocks):
            self.blocks[group, nodes] = ids[:count]
            held = ids[:count] != NULL_BLOCK
            self.node_of[ids[:count][held]] = nodes[held]
        return hashes

    def add_block(self, node: int, group: int, block: int) -> None:
        """Give an existing node its block of a sliding group, where it has none."""
        self.blocks[group, node] = block
        self._node_of[block] = node

    def evict(self, count: int) -> None:
        """Turn at least ``count`` cached blocks into free ones, least recently used first."""
        goal = self.pool.free + count
        while self.pool.free < goal:
            self._forget(self.pool.oldest)
            self.evictions += 1

    def parent_of(self, node: int) -> int:
        """Parent node; ROOT for a first block."""
        return max(ROOT, self._parent[node])

    def hash_of(self, node: int) -> int:
        """The hash that finds the node."""
        return self._hash[node]

    def salt_of(self, node: int) -> bytes | None:
        """Salt of a first block; None for any other."""
        return self._salts.get(-self._parent[node])

    def nodes(self) -> dict[int, int]:
        """hash -> node, a copy: for checks."""
        return dict(self._by_hash)

    def roots(self) -> dict[bytes, int]:
        """salt -> first blocks that hang on it: for checks."""
        return {self._salts[root]: count for root, count in self._children_of_root.items()}

    def _forget(self, block: int) -> None:
        node = self._node_of[block]
        if block != node:  # not the anchor's
            group = self.blocks[:, node].tolist().index(block)
            if self.windows[group] is not None:
                self._drop_block(group, node)
                return
        for group in range(len(self.windows)):
            self._drop_block(group, node)
        del self._by_hash[self._hash[node]]
        parent = self._parent[node]
        self._parent[node] = 0
        if parent < 0:
            self._count_root(self._salts[-parent], -1)

    def _drop_block(self, group: int, node: int) -> None:
        entry = group * self.pool.num_blocks + node
        block = self._blocks[entry]
        if block != NULL_BLOCK:
            self._blocks[entry] = NULL_BLOCK
            self._node_of[block] = 0
            self.pool.uncache(block)

    def _start_hash(self, salt: bytes, start: Point) -> int:
        return start.hash if start.node != ROOT else self._hash_block(memoryview(salt), 0)

    def _root(self, salt: bytes) -> int:
        root = self._roots.get(salt)
        if root is None:
            root = self._unused_roots.pop() if self._unused_roots else len(self._roots) + 1
            self._roots[salt], self._salts[root], self._children_of_root[root] = root, salt, 0
        return root

    def _count_root(self, salt: bytes, change: int) -> None:
        root = self._roots[salt]
        self._children_of_root[root] += change
        if self._children_of_root[root] == 0:
            del self._roots[salt], self._salts[root], self._children_of_root[root]
            self._unused_roots.append(root)


def _bytes_of(tokens: npt.NDArray[np.int32]) -> memoryview:
    return np.ascontiguousarray(tokens).data.cast("B")
