"""The arrays that hold the whole state of the block manager, and nothing else.

Named tuples of numpy arrays: what the compiled loops take, and what the laws in
`tonnage.cache.laws.invariants` are stated about. *blocks* is num_blocks, *groups* the paged groups of the
layout, *states* its state groups, *rows* max_num_seqs, *slots* request slots (one for each request with its n
sequences; as many as rows).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.types import Limits
from tonnage.cache.blocks.groups import num_states, paged, reach
from tonnage.cache.blocks.memory import lazy, resident

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
FloatArray = npt.NDArray[np.float64]

NULL_BLOCK = 0
ROOT = NULL_BLOCK  # parent of a first block

# Cached blocks that may be evicted stand in one list for each class: an origin and how often blocks like these
# are reused, see `tonnage.cache.eviction.reuse`.
PROMPTS, POPULAR, ANSWERS, ORIGINS = range(4)
SCORES = 12
CLASSES = ORIGINS * SCORES
# KIND holds the class of a node and, above it, its children.
CLASS_MASK, ONE_CHILD = 63, 64

# Entries of Pool.counters
FREE, FREE_HEAD, CACHED, USED_FULL, CLOCK = range(5)
REMOVED, STORED, NODES, MERGED, CALLS, RULE = range(5, 11)
# LISTS: bit c is set where the list of class c is not empty. HISTORY_*: where the ring is written next; its
# youngest entries, as many as LRU would reach back, and how many of those live. STARTED: requests.
LISTS, HISTORY_AT, HISTORY_SPAN, HISTORY_ALIVE, STARTED = range(11, 16)
# ... and from EVICTIONS on the blocks evicted by cause: for K/V of prompts, of answers, for a copy on write,
# and because everything cached was to be forgotten.
FOR_PREFILL, FOR_DECODE, FOR_COPY, BY_RESET = range(4)
EVICTION_CAUSES = ("prefill", "decode", "copy_on_write", "reset")
EVICTIONS = 16
COUNTERS = EVICTIONS + len(EVICTION_CAUSES)

# Rows of Core.blocks: fields of a block, those from NODE_OF to CHAIN by node; from FIRST_GROUP on the node's
# block in each group.
REFS, NEXT, PREV, TIME, NODE_OF, PARENT, SALT, KIND, CHAIN, FIRST_GROUP = range(10)
OWNER = TIME  # a cached block has a time, a used one an owner
CLOCK_MASK = 0x7FFFFFFF  # times are kept modulo 2^31

# Rows of Core.rows: fields of a sequence; from FIRST on one for each group.
LENGTH, COMPUTED, SLOTS, ROOM, LIMIT, PUBLISHED, HASHED, SHARED_TAIL = range(8)
REQUEST, ROW_SALT, SHARED, TURN, MARK, FIRST = range(8, 14)

# Rows of Core.requests
HELD, PRIVATE, RESERVED, PROMPT, LIVE, FORKS_LEFT, REQUEST_FIELDS = range(7)

# Rows of Core.history and of Core.traits; LINK and the heads are 1 + an entry, 0 for none.
TAG, LINK, BORN, HISTORY_FIELDS = range(4)
STATUS, AGE, ORIGIN, TURN_LEVEL, ANSWER_LEVEL, WEIGHT, FIRST_TURN, HITS, TRAITS = range(9)
AGES, LEVELS = 48, 8
WEIGHT_STEPS = 8  # a weight is a power of 2 to the -1/8

# The sample holds at most as many blocks of a full pool, and the history as many times as many. Pools of fewer
# than 131,072 blocks get by with half: 22 bytes an entry are then 6 bytes a block.
SAMPLED, FEW_SAMPLED, FEWER_BELOW = 4096, 2048, 131_072
REACH = 8

# Entries of Constants
BLOCK_SIZE, GROUPS, ANCHOR, MAX_STEP, CACHING, LOGGED, LEARNING, SAMPLE_SHIFT, STATES, CONSTANTS = range(10)


class Pool(NamedTuple):
    """Who holds which block. Free blocks are a stack linked by ``next``; cached ones that may be evicted stand
    in the list of their class, the oldest first, linked both ways; entry ``blocks + c`` is the sentinel of
    class c. A cached block in no list, because its node has children, has the null block as ``next``."""

    refs: Int32Array  # [blocks] reference count
    next: Int32Array  # [blocks + CLASSES]
    prev: Int32Array  # [blocks + CLASSES]
    time: Int32Array  # [blocks] while cached, the clock when it became so
    owner: Int32Array  # the same memory: while used, 1 + slot of the only request that references it, or 0
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
    kind: Int32Array  # [blocks] by node: its class, and ONE_CHILD for each child
    heads: Int32Array  # [buckets] first node, 0: none
    chain: Int32Array  # [blocks] by node: next of the bucket
    salt_nodes: Int32Array  # [salts] nodes of each salt id
    seeds: UInt64Array  # [salts] hash that a chain of the salt starts from
    removed: UInt64Array  # where somebody listens, since the last look: hashes evicted,
    stored: Int32Array  # and nodes inserted, in order


class Rows(NamedTuple):
    """One row per live sequence."""

    tables: Int32Array  # [groups, rows, max_blocks]
    states: Int32Array  # [states, rows] the block of a recurrent state
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
    shared_tail: Int64Array  # [rows] 1: copy the last block before the next write
    request: Int64Array  # [rows] slot of its request, -1 for an empty row
    salt: Int64Array  # [rows] salt id
    shared: Int64Array  # [rows] leading blocks that belong to an allowed shared prefix
    turn: Int64Array  # [rows] turn of its conversation, from 1, as far as is known
    mark: Int64Array  # [rows] number of the last call that named the row, to find one named twice


class Requests(NamedTuple):
    """What admission reads (see `tonnage.cache.admission.snapshot`), by request slot; 0 where nothing runs."""

    held: Int32Array
    private: Int32Array
    reserved: Int32Array
    prompt: Int32Array
    live: Int32Array  # sequences with a row
    forks_left: Int32Array


class Core(NamedTuple):
    """All arrays, as compiled code takes them: few, so that passing them by value stays cheap."""

    blocks: Int32Array  # [FIRST_GROUP + groups, blocks + CLASSES]
    node_tokens: Int32Array
    node_hash: UInt64Array
    heads: Int32Array
    salt_nodes: Int32Array
    seeds: UInt64Array
    tables: Int32Array
    states: Int32Array
    tokens: Int32Array
    hashes: UInt64Array
    rows: Int64Array  # [FIRST + groups, rows]
    requests: Int32Array  # [REQUEST_FIELDS, slots]
    counters: Int64Array
    windows: Int64Array  # [groups] `tonnage.cache.blocks.groups.reach`
    constants: Int64Array  # [CONSTANTS]
    history: Int32Array  # [HISTORY_FIELDS, entries] the ring of `tonnage.cache.eviction.reuse`
    traits: UInt8Array  # [TRAITS, entries]
    history_heads: Int32Array  # [buckets]
    factors: FloatArray  # [2, LEVELS] of turns, of answers
    hazard: FloatArray  # [ORIGINS, AGES] reuses per block and time
    density: FloatArray  # [CLASSES, AGES] hits per block and time
    scores: FloatArray  # [2] hits of late: the pool's, LRU's
    events: FloatArray  # [ORIGINS, AGES] scratch of a fit
    lived: FloatArray  # [ORIGINS, AGES]
    fitted: FloatArray  # [2, LEVELS]
    until: FloatArray  # [AGES]
    widths: FloatArray  # [AGES] blocks between two ages
    weights: FloatArray  # [256] by TRAITS' WEIGHT
    removed: UInt64Array
    stored: Int32Array
    before: Int64Array  # [rows] scratch: compiled code allocates nothing
    after: Int64Array  # [rows]
    scratch: Int32Array  # [(groups + states) * rows]


class State(NamedTuple):
    """The same memory with a name for each field: for everything that is not compiled."""

    pool: Pool
    index: Index  # type: ignore[assignment]  # nobody looks for a value in this tuple
    rows: Rows
    requests: Requests
    windows: Int64Array
    constants: Int64Array
    core: Core


def new_state(
    limits: Limits,
    num_blocks: int,
    *,
    caching: bool,
    seed: int,
    logged: bool,
    learning: bool,
) -> State:
    """An empty pool. Rows and salts are reserved for the worst case; their memory is taken where it is used."""
    layout = limits.layout
    rows, size = limits.max_num_seqs, layout.block_size
    windows = np.array([reach(group) for group in paged(layout)], np.int64)
    groups, states = len(windows), num_states(layout)
    max_blocks = -(-limits.max_model_len // size)
    nodes = num_blocks if caching else 1

    def ints(*shape: int) -> Int32Array:
        return np.zeros(shape, np.int32)

    def longs(*shape: int) -> Int64Array:
        return np.zeros(shape, np.int64)

    constants = longs(CONSTANTS)
    constants[BLOCK_SIZE], constants[GROUPS], constants[STATES] = size, groups, states
    constants[ANCHOR] = int(np.flatnonzero(windows == 0)[0]) if (windows == 0).any() else 0
    constants[MAX_STEP] = limits.max_num_batched_tokens
    constants[CACHING], constants[LOGGED] = caching, logged
    learning = learning and caching
    most = SAMPLED if num_blocks >= FEWER_BELOW else FEW_SAMPLED
    shift = max(0, (num_blocks // most).bit_length() - 1)
    constants[LEARNING], constants[SAMPLE_SHIFT] = learning, shift
    entries = REACH * ((num_blocks >> shift) + 1) if learning else 1
    core = Core(
        blocks=resident(FIRST_GROUP + groups, num_blocks + CLASSES, dtype=np.int32),
        node_tokens=resident(nodes, size, dtype=np.int32),
        node_hash=resident(nodes, dtype=np.uint64),
        # At most one node a bucket on average.
        heads=resident(1 << (nodes - 1).bit_length(), dtype=np.int32),
        salt_nodes=lazy(nodes + rows, dtype=np.int32),
        seeds=lazy(nodes + rows, dtype=np.uint64),
        tables=lazy(groups, rows, max_blocks, dtype=np.int32),
        states=ints(states, rows),
        tokens=lazy(rows, limits.max_model_len, dtype=np.int32),
        hashes=lazy(rows, max_blocks if caching else 1, dtype=np.uint64),
        rows=longs(FIRST + groups, rows),
        requests=ints(REQUEST_FIELDS, rows),
        counters=longs(COUNTERS),
        windows=windows,
        constants=constants,
        history=resident(HISTORY_FIELDS, entries, dtype=np.int32),
        traits=resident(TRAITS, entries, dtype=np.uint8),
        history_heads=resident(1 << max(0, (entries // 2).bit_length() - 1), dtype=np.int32),
        factors=np.ones((2, LEVELS)),
        hazard=np.full((ORIGINS, AGES), 1e-9),
        density=np.zeros((CLASSES, AGES)),
        scores=np.zeros(2),
        events=np.zeros((ORIGINS, AGES)),
        lived=np.zeros((ORIGINS, AGES)),
        fitted=np.zeros((2, LEVELS)),
        until=np.zeros(AGES),
        widths=np.zeros(AGES),
        weights=2.0 ** (-np.arange(256) / WEIGHT_STEPS),
        removed=np.zeros(num_blocks if logged else 1, np.uint64),
        stored=ints(num_blocks if logged else 1),
        before=longs(rows),
        after=longs(rows),
        scratch=ints((groups + states) * rows),
    )
    blocks = core.blocks
    blocks[NEXT, : num_blocks - 1] = np.arange(1, num_blocks, dtype=np.int32)
    for kind in range(CLASSES):
        blocks[NEXT, num_blocks + kind] = blocks[PREV, num_blocks + kind] = num_blocks + kind
    core.counters[FREE] = num_blocks - 1
    core.counters[FREE_HEAD] = 1
    core.seeds[0] = seed
    core.rows[REQUEST] = -1
    return _named(core, num_blocks)


def _named(core: Core, num_blocks: int) -> State:
    blocks, rows, requests = core.blocks, core.rows, core.requests
    pool = Pool(
        refs=blocks[REFS, :num_blocks],
        next=blocks[NEXT],
        prev=blocks[PREV],
        time=blocks[TIME, :num_blocks],
        owner=blocks[OWNER, :num_blocks],
        counters=core.counters,
    )
    index = Index(
        tokens=core.node_tokens,
        blocks=blocks[FIRST_GROUP:, :num_blocks],
        node_of=blocks[NODE_OF, :num_blocks],
        parent=blocks[PARENT, :num_blocks],
        salt=blocks[SALT, :num_blocks],
        hash=core.node_hash,
        kind=blocks[KIND, :num_blocks],
        heads=core.heads,
        chain=blocks[CHAIN, :num_blocks],
        salt_nodes=core.salt_nodes,
        seeds=core.seeds,
        removed=core.removed,
        stored=core.stored,
    )
    return State(
        pool,
        index,
        Rows(
            tables=core.tables,
            states=core.states,
            tokens=core.tokens,
            hashes=core.hashes,
            length=rows[LENGTH],
            computed=rows[COMPUTED],
            slots=rows[SLOTS],
            room=rows[ROOM],
            limit=rows[LIMIT],
            first=rows[FIRST:],
            published=rows[PUBLISHED],
            hashed=rows[HASHED],
            shared_tail=rows[SHARED_TAIL],
            request=rows[REQUEST],
            salt=rows[ROW_SALT],
            shared=rows[SHARED],
            turn=rows[TURN],
            mark=rows[MARK],
        ),
        Requests(
            held=requests[HELD],
            private=requests[PRIVATE],
            reserved=requests[RESERVED],
            prompt=requests[PROMPT],
            live=requests[LIVE],
            forks_left=requests[FORKS_LEFT],
        ),
        core.windows,
        core.constants,
        core,
    )
