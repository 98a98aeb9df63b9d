"""The arrays that hold the whole state of the block manager, and nothing else.

Named tuples of numpy arrays: what the compiled loops take, and what the laws in `tonnage.cache.invariants` are
stated about. *blocks* is num_blocks, *groups* the groups of the layout, *rows* max_num_seqs, *slots* request
slots (one for each request with its n sequences; as many as rows).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.types import Limits

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
UInt32Array = npt.NDArray[np.uint32]
UInt8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]

NULL_BLOCK = 0
ROOT = NULL_BLOCK  # parent of a first block

# Classes of cached blocks: those never asked for again yet, and those to be kept longer.
COLD, HOT, CLASSES = 0, 1, 2

# Entries of Pool.counters
FREE, FREE_HEAD, CACHED, USED_FULL, CLOCK, EVICTIONS = range(6)
REMOVED, STORED, NODES, MERGED, CALLS, COUNTERS = range(6, 12)

# Entries of Constants
BLOCK_SIZE, GROUPS, ANCHOR, MAX_STEP, CACHING, LOGGED, CONSTANTS = range(7)


class Pool(NamedTuple):
    """Who holds which block. Free blocks are a stack linked by ``next``; cached ones stand in the list of their
    class, the oldest first, linked both ways; entry ``blocks + c`` is the sentinel of class c."""

    refs: Int32Array  # [blocks] reference count
    next: Int32Array  # [blocks + CLASSES]
    prev: Int32Array  # [blocks + CLASSES]
    time: UInt32Array  # [blocks] clock when the block became cached, modulo 2^32
    owner: Int32Array  # [blocks] 1 + slot of the only request that references a full group's block, or 0
    slowness: FloatArray  # [CLASSES] how much slower a class ages: 1, then growing
    counters: Int64Array  # [COUNTERS]


class Index(NamedTuple):
    """The nodes of the prefix index; a node is named by its block in the anchor group. Nodes of one bucket are
    linked by ``chain``."""

    tokens: Int32Array  # [blocks, block_size] by node
    blocks: Int32Array  # [groups, blocks] by node: its block in each group, the null block where it has none
    node_of: Int32Array  # [blocks] by block: its node, 0 outside the index
    parent: Int32Array  # [blocks] by node
    salt: Int32Array  # [blocks] by node: id of the salt, 0 for the shared ones
    hash: UInt64Array  # [blocks] by node
    kind: UInt8Array  # [blocks] by node: COLD or HOT
    heads: Int32Array  # [buckets] first node, 0: none
    chain: Int32Array  # [blocks] by node: next of the bucket
    salt_nodes: Int32Array  # [salts] nodes of each salt id
    seeds: UInt64Array  # [salts] hash that a chain of the salt starts from
    removed: UInt64Array  # where somebody listens, since the last look: hashes evicted,
    stored: Int32Array  # and nodes inserted, in order


class Rows(NamedTuple):
    """One row per live sequence."""

    tables: Int32Array  # [groups, rows, max_blocks]
    tokens: Int32Array  # [rows, max_model_len]
    hashes: UInt64Array  # [rows, max_blocks] of the full blocks of tokens, the first `hashed` of them
    length: Int64Array  # [rows] tokens known
    computed: Int64Array  # [rows] K/V written for positions below
    slots: Int64Array  # [rows] positions below have been extended to
    room: Int64Array  # [rows] positions the blocks held have room for
    limit: Int64Array  # [rows] prompt + max_tokens
    first: Int64Array  # [groups, rows] first block not dropped
    published: Int64Array  # [rows] full blocks that are nodes of the prefix index
    hashed: Int64Array  # [rows]
    shared_tail: npt.NDArray[np.bool_]  # [rows] copy the last block before the next write
    request: Int32Array  # [rows] slot of its request, -1 for an empty row
    salt: Int32Array  # [rows] salt id
    shared: Int64Array  # [rows] leading blocks that belong to an allowed shared prefix
    kind: UInt8Array  # [rows] class of the blocks it adds
    mark: Int64Array  # [rows] number of the last call that named the row, to find one named twice


class Requests(NamedTuple):
    """What admission reads (see `tonnage.cache.snapshot`), by request slot; zero where nothing runs."""

    held: Int32Array
    private: Int32Array
    promised: Int32Array
    prompt: Int32Array
    live: Int32Array  # sequences with a row
    forks_left: Int32Array


class State(NamedTuple):
    """Everything."""

    pool: Pool
    index: Index  # type: ignore[assignment]  # nobody looks for a value in this tuple
    rows: Rows
    requests: Requests
    windows: Int64Array  # [groups] 0: full attention
    constants: Int64Array  # [CONSTANTS]


def new_state(limits: Limits, num_blocks: int, *, caching: bool, seed: int, logged: bool) -> State:
    """An empty pool. Memory that is never touched is not taken (calloc): tables, tokens and nodes are reserved
    for the worst case."""
    layout = limits.layout
    groups, rows, size = len(layout.groups), limits.max_num_seqs, layout.block_size
    max_blocks = -(-limits.max_model_len // size)
    windows = np.array([(g.window or 0) if g.kind == "sliding" else 0 for g in layout.groups], np.int64)
    nodes = num_blocks if caching else 1

    def ints(*shape: int) -> Int32Array:
        return np.zeros(shape, np.int32)

    def longs(*shape: int) -> Int64Array:
        return np.zeros(shape, np.int64)

    pool = Pool(
        refs=ints(num_blocks),
        next=np.arange(1, num_blocks + CLASSES + 1, dtype=np.int32),
        prev=ints(num_blocks + CLASSES),
        time=np.zeros(num_blocks, np.uint32),
        owner=ints(num_blocks),
        slowness=np.ones(CLASSES),
        counters=longs(COUNTERS),
    )
    pool.next[num_blocks - 1] = NULL_BLOCK
    for kind in range(CLASSES):
        pool.next[num_blocks + kind] = pool.prev[num_blocks + kind] = num_blocks + kind
    pool.counters[FREE] = num_blocks - 1
    pool.counters[FREE_HEAD] = 1
    index = Index(
        tokens=ints(nodes, size),
        blocks=ints(groups, nodes),
        node_of=ints(num_blocks),
        parent=ints(nodes),
        salt=ints(nodes),
        hash=np.zeros(nodes, np.uint64),
        kind=np.zeros(nodes, np.uint8),
        heads=ints(1 << (nodes - 1).bit_length()),  # at most one node a bucket on average
        chain=ints(nodes),
        salt_nodes=ints(nodes + rows),
        seeds=np.zeros(nodes + rows, np.uint64),
        removed=np.zeros(num_blocks if logged else 1, np.uint64),
        stored=ints(num_blocks if logged else 1),
    )
    index.seeds[0] = seed
    table = Rows(
        tables=ints(groups, rows, max_blocks),
        tokens=ints(rows, limits.max_model_len),
        hashes=np.zeros((rows, max_blocks if caching else 1), np.uint64),
        length=longs(rows),
        computed=longs(rows),
        slots=longs(rows),
        room=longs(rows),
        limit=longs(rows),
        first=longs(groups, rows),
        published=longs(rows),
        hashed=longs(rows),
        shared_tail=np.zeros(rows, np.bool_),
        request=np.full(rows, -1, np.int32),
        salt=ints(rows),
        shared=longs(rows),
        kind=np.zeros(rows, np.uint8),
        mark=longs(rows),
    )
    requests = Requests(
        held=ints(rows),
        private=ints(rows),
        promised=ints(rows),
        prompt=ints(rows),
        live=ints(rows),
        forks_left=ints(rows),
    )
    constants = longs(CONSTANTS)
    constants[BLOCK_SIZE], constants[GROUPS] = size, groups
    constants[ANCHOR] = int(np.flatnonzero(windows == 0)[0]) if (windows == 0).any() else 0
    constants[MAX_STEP] = limits.max_num_batched_tokens
    constants[CACHING], constants[LOGGED] = caching, logged
    return State(pool, index, table, requests, windows, constants)
