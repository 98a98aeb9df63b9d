"""SGLang's prefix cache with a host tier (HiCache): a radix tree that evicts whole nodes.

A node is the part of a prompt between two branches. It is on the GPU, in host memory, or in both. The rules are
those of SGLang 0.5.9 (mem_cache/hiradix_cache.py) with ``--hicache-write-policy write_through``:

- A request first splits the node in which its prompt branches off. It then loads the nodes that only host
  memory has, all of them or none.
- If the GPU lacks space, the least recently used nodes without a child on the GPU are evicted. Nodes of the
  request's own prefix stay.
- Every new node is copied to host memory. If the copy does not fit, the least recently used nodes that only
  host memory has are evicted. Nodes are evicted until they add up to the length of the copy, even if part of
  that space is free already.
- A node that leaves the GPU without a copy in host memory is removed from the tree.

`benchmarks/hicache_replay.py` drives SGLang's own tree beside this one. Requests run one after the other, and
transfers end before the next request.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from tonnage.cache.errors import CacheConfigError
from tonnage.cache.replay.tiers import chunk_keys, chunk_tokens_of
from tonnage.cache.replay.trace import Trace


class _Node:
    """A part of a prompt between two branches of the tree.

    Attributes:
        keys: Keys of the node's chunks.
        parent: The node before it; None for the root.
        children: The nodes after it, by the key of their first chunk.
        on_gpu: Whether the GPU holds its chunks.
        on_host: Whether host memory holds its chunks.
        used: Time of the last use, as a count of uses in the tree.
        locked: Whether the current request uses the node, so that it stays on the GPU.
    """

    __slots__ = ("children", "keys", "locked", "on_gpu", "on_host", "parent", "used")

    def __init__(self, keys: Sequence[int], parent: _Node | None) -> None:
        self.keys, self.parent = keys, parent
        self.children: dict[int, _Node] = {}
        self.on_gpu = self.on_host = self.locked = False
        self.used = 0

    def is_gpu_leaf(self) -> bool:
        """Return whether the GPU holds the node and none of its children, so that it can be evicted."""
        return self.on_gpu and not any(child.on_gpu for child in self.children.values())

    def is_host_leaf(self) -> bool:
        """Return whether only host memory holds the node, and it has no child left."""
        return not self.on_gpu and self.on_host and not self.children


class _Leaves:
    """A queue of leaf nodes by last use; callers of `pop` skip nodes that are no longer leaves."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Node]] = []

    def push(self, node: _Node) -> None:
        """Add a node to the queue, at the time of its last use."""
        heapq.heappush(self._heap, (node.used, id(node), node))

    def pop(self) -> _Node | None:
        """Remove and return the least recently used node, or None if there is none.

        An entry is dropped if its node was used again after the entry was added.
        """
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            if used == node.used:
                return node
        return None


class RadixTiers:
    """SGLang's radix tree over a GPU pool and a host tier, both counted in chunks.

    Attributes:
        written: Number of chunks copied to host memory.
        evicted: Number of chunks evicted from host memory.
    """

    def __init__(self, gpu_chunks: int, host_chunks: int) -> None:
        if min(gpu_chunks, host_chunks) < 1:
            raise CacheConfigError(
                f"a GPU pool of {gpu_chunks} chunks and a host tier of {host_chunks}: each needs at least 1",
                field="--tiers",
            )
        self.gpu_chunks, self.host_chunks = gpu_chunks, host_chunks
        self.written = self.evicted = 0
        # Number of chunks on the GPU, number of chunks in host memory, and number of uses of nodes.
        self._on_gpu = self._on_host = self._uses = 0
        self._root = _Node((), None)
        self._root.on_gpu = self._root.locked = True
        self._gpu_leaves, self._host_leaves = _Leaves(), _Leaves()

    def serve(self, keys: Sequence[int]) -> int:
        """Serve a prompt; return how many of its first chunks the GPU held or loaded from host memory.

        Args:
            keys: Keys of the prompt's chunks; equal keys mean equal prompts up to the chunk's end. Chunks
                beyond the size of the GPU's pool are ignored.
        """
        keys = keys[: self.gpu_chunks]
        found = list(self._walk(keys))
        on_gpu = next((place for place, node in enumerate(found) if not node.on_gpu), len(found))
        if on_gpu < len(found) and self._load(found, on_gpu):
            on_gpu = len(found)
        own = found[:on_gpu]
        hit = sum(len(node.keys) for node in own)
        self._lock(own, True)
        over = len(keys) - hit - (self.gpu_chunks - self._on_gpu)
        if over > 0:
            self._evict_gpu(over)
        self._insert(keys)
        self._lock(own, False)
        for _ in self._walk(keys):  # makes the nodes of the prompt the most recently used ones
            pass
        return hit

    def _use(self, node: _Node) -> None:
        """Make a node the most recently used one."""
        self._uses += 1
        node.used = self._uses
        self._list(node)

    def _list(self, node: _Node) -> None:
        """Add a node to the queue for eviction from the GPU or from host memory, if it is a leaf there."""
        if node.is_gpu_leaf():
            self._gpu_leaves.push(node)
        elif node.is_host_leaf():
            self._host_leaves.push(node)

    def _lock(self, nodes: Sequence[_Node], locked: bool) -> None:
        """Keep the nodes of the current request on the GPU, or permit their eviction again."""
        for node in nodes:
            node.locked = locked
            if not locked:
                self._list(node)

    def _walk(self, keys: Sequence[int]) -> Iterator[_Node]:
        """Yield the nodes that hold the beginning of a prompt; split the last one if the prompt leaves it."""
        node, start = self._root, 0
        while start < len(keys) and (child := node.children.get(keys[start])) is not None:
            self._use(child)
            same = _common(child.keys, keys, start)
            node = child if same == len(child.keys) else self._split(child, same)
            start += same
            yield node

    def _split(self, node: _Node, length: int) -> _Node:
        """Divide a node after ``length`` chunks; return the new node, which has the first chunks."""
        assert node.parent is not None
        first = _Node(node.keys[:length], node.parent)
        first.on_gpu, first.on_host, first.locked = node.on_gpu, node.on_host, node.locked
        first.children[node.keys[length]] = node
        node.parent.children[node.keys[0]] = first
        node.keys, node.parent = node.keys[length:], first
        self._use(first)
        return first

    def _load(self, found: Sequence[_Node], start: int) -> bool:
        """Load the nodes from ``start`` on from host memory; return False if the GPU has no space for them."""
        needed = sum(len(node.keys) for node in found[start:])
        self._lock(found[:start], True)
        if needed > self.gpu_chunks - self._on_gpu:
            self._evict_gpu(needed)  # SGLang evicts this many chunks even if some space is free
        self._lock(found[:start], False)
        if needed > self.gpu_chunks - self._on_gpu:
            return False
        for node in found[start:]:
            node.on_gpu = True
        self._on_gpu += needed
        return True

    def _insert(self, keys: Sequence[int]) -> None:
        """Put a computed prompt on the GPU, and copy to host memory the nodes that are only on the GPU."""
        node, start = self._root, 0
        for node in self._walk(keys):
            if node.on_gpu:
                self._copy(node)
            else:
                node.on_gpu = True
                self._on_gpu += len(node.keys)
            start += len(node.keys)
        if start < len(keys):
            new = node.children[keys[start]] = _Node(keys[start:], node)
            new.on_gpu = True
            self._on_gpu += len(new.keys)
            self._use(new)
            self._copy(new)

    def _copy(self, node: _Node) -> None:
        """Copy a node to host memory, unless host memory holds it or has no space."""
        count = len(node.keys)
        if node.on_host:
            return
        if count > self.host_chunks - self._on_host:
            self._evict_host(count)
        if count <= self.host_chunks - self._on_host:
            node.on_host = True
            self._on_host += count
            self.written += count

    def _evict_gpu(self, count: int) -> None:
        """Evict the least recently used nodes from the GPU until ``count`` chunks are evicted."""
        while count > 0 and (node := self._gpu_leaves.pop()) is not None:
            if node.locked or not node.is_gpu_leaf():
                continue
            parent = node.parent
            assert parent is not None
            count -= len(node.keys)
            self._on_gpu -= len(node.keys)
            node.on_gpu = False
            if node.on_host:
                self._list(node)
            else:
                del parent.children[node.keys[0]]
            if parent.is_gpu_leaf():
                self._gpu_leaves.push(parent)

    def _evict_host(self, count: int) -> None:
        """Remove the least recently used nodes that only host memory has, until ``count`` chunks are gone."""
        while count > 0 and (node := self._host_leaves.pop()) is not None:
            if not node.is_host_leaf():
                continue
            assert node.parent is not None
            count -= len(node.keys)
            self._on_host -= len(node.keys)
            self.evicted += len(node.keys)
            del node.parent.children[node.keys[0]]
            self._list(node.parent)


def hicache_hit_rate(trace: Trace, gpu_chunks: int, host_chunks: int) -> float:
    """Return the share of a trace's prompt tokens that SGLang's HiCache hits on the GPU or loads from the host.

    Args:
        trace: The requests, with hash ids. They run one after the other, in order of arrival.
        gpu_chunks: Size of the GPU's pool in chunks of the trace's hash ids.
        host_chunks: Size of the host tier in chunks.

    Raises:
        CacheConfigError: The trace has no hash ids, or a size is 0.
    """
    tree, size = RadixTiers(gpu_chunks, host_chunks), chunk_tokens_of(trace)
    known: dict[tuple[int, int], int] = {}
    hits = sum(tree.serve(chunk_keys(request, known)) for request in trace.requests)
    return hits * size / sum(request.prompt_tokens for request in trace.requests)


def _common(keys: Sequence[int], other: Sequence[int], start: int) -> int:
    """Return how many of ``keys`` equal those of ``other`` from ``start`` on, up to the first difference."""
    most = min(len(keys), len(other) - start)
    return next((place for place in range(most) if keys[place] != other[start + place]), most)
