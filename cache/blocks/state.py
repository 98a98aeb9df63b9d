"""The whole state of the block manager, each field declared once: `Core`, a named tuple of numpy arrays.

Compiled code takes the `Core` itself and reads it by name: ``core.refs[block]``, ``core.rows[row].length``.
Python code reads records by column: ``manager.rows.length[row]``.

**Arrays or records, measured** (numba 0.65, numpy 2.3, one core of an AMD EPYC, 262,144 blocks, CPU time).
Fields of a block are separate arrays: moving a block out of its list and its bucket and back takes 6 to 8 ns,
and 22 to 44 ns with one record per block. Small tables (sequences, requests, counters, the eviction model) are
records: a decode's checks take 2.5 ns per sequence with records and 2.1 with arrays, but an array of records is
only one argument of a call. Passing the arrays from Python takes 2.3 us for 33 arrays, 3.7 for 60, and 1.7 for
14 arrays and 5 arrays of records. A scalar record alone takes 1.5 us, which is why `pool` and `model` are
arrays of length one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from tonnage.cache.blocks.groups import ALIGNED, GROUP, anchor_of, group_records, windows_only
from tonnage.cache.blocks.memory import lazy, resident
from tonnage.cache.eviction.model import CLASSES, ENTRY, MODEL, OrderArrays, history_buckets, new_model
from tonnage.cache.results import EVICTION_CAUSES
from tonnage.planner.model.layout import KVLayout
from tonnage.planner.units import ceil_div

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]

NULL_BLOCK = 0
ROOT = NULL_BLOCK  # parent of the first node of a prefix in the prefix index

# `Core.kind` holds the class of a node in its low 6 bits and the number of its children above them.
CLASS_MASK, ONE_CHILD = 63, 64
CLOCK_MASK = 0x7FFFFFFF  # the count of released blocks (the clock) is stored modulo 2^31

# indices into EVICTION_CAUSES, the reasons of an eviction
FOR_PREFILL, FOR_DECODE, FOR_COPY, BY_RESET = range(4)

COPY_TAIL = 1  # flag of a row: the next write must first copy the last block, which is shared
DROP_SOURCE = 2  # flag of a row: the next step releases the block that the recurrent state was copied from

i4, i8, u8 = np.int32, np.int64, np.uint64

POOL = np.dtype(
    [
        ("num_blocks", i8),  # number of blocks of the pool, with the null block
        ("block_size", i8),  # tokens per block
        ("num_groups", i8),
        ("windowed", i8),  # number of groups with a window or with cached states
        ("aligned", i8),  # number of groups whose recurrent states are cached
        # blocks between two kept recurrent states; 0: states are kept only where prompts end or diverge
        ("state_every", i8),
        # the group whose blocks name the nodes of the prefix index (`groups.anchor_of`)
        ("anchor", i8),
        ("windows_only", i8),  # 1: every group has a sliding window, so nodes have no parents
        ("max_step", i8),  # upper bound of positions that one sequence computes in a step
        ("caching", i8),  # 1: the prefix cache is on, 0: off
        ("logged", i8),  # 1: KV events are recorded for a subscriber
        ("free", i8),  # number of blocks without content
        ("free_head", i8),  # block on top of the free stack
        ("cached", i8),  # number of unreferenced blocks with content
        ("used_full", i8),  # number of blocks that tables of full-attention groups reference
        ("clock", i8),  # number of blocks that became cached since the start
        ("lists", i8),  # bit c is set if the eviction list of class c is not empty
        ("nodes", i8),  # number of nodes of the prefix index
        ("merged", i8),  # number of duplicate blocks released, whose tokens another sequence had published
        ("calls", i8),  # number of calls of `steps.step`
        ("removed", i8),  # number of entries in `Core.removed`
        ("stored", i8),  # number of entries in `Core.stored`
        ("evicted", i8, (len(EVICTION_CAUSES),)),  # number of evicted blocks by cause (EVICTION_CAUSES)
    ]
)
ROW = np.dtype(
    [
        ("length", i8),  # number of known tokens of the sequence, prompt and output
        ("computed", i8),  # number of positions whose K/V is written
        ("slots", i8),  # number of positions that have a writable slot
        ("room", i8),  # number of positions that fit into the held blocks
        ("limit", i8),  # upper bound of the length: prompt + max_tokens
        ("published", i8),  # number of full blocks that are nodes of the prefix index
        ("hashed", i8),  # number of valid entries in the row of `Core.hashes`
        ("found", i8),  # number of full prompt blocks that full-attention groups had cached at admission
        ("shared_tail", i8),  # 0, or a sum of the bits COPY_TAIL and DROP_SOURCE
        ("request", i8),  # slot (array index) of the request, -1 for an unused row
        ("salt", i8),  # id of the sequence's cache salt
        ("shared", i8),  # number of leading blocks shared by all salts (`BlockManager.allow_prefix`)
        ("turn", i8),  # turn of the conversation, from 1; 0: not known
        ("mark", i8),  # number of the last call that named the row, to detect a row named twice
        ("written", i8),  # value that the current call will give to the row's `computed`
        ("end", i8),  # value that the current call will give to the row's `slots`
    ]
)
# The fields count blocks and tokens of one request for admission (`tonnage.cache.admission.snapshot`). They are
# 0 in an unused slot.
REQUEST = np.dtype(
    [
        ("held", i4),  # number of distinct blocks that the request holds in full-attention groups
        ("private", i4),  # number of `held` blocks that no other request references (a lower bound)
        ("reserved", i4),  # upper bound of the blocks that the request may hold in full-attention groups
        ("prompt", i4),  # number of prompt tokens of the request
        ("live", i4),  # number of live sequences of the request, each with a row in the tables
        ("forks_left", i4),
    ]
)


@dataclass(frozen=True, slots=True)
class _Array:
    """The declaration of an array of `Core`: dtype, names of the axes, and how its memory is allocated."""

    dtype: Any
    shape: tuple[str | int, ...]
    lazy: bool = False
    column: bool = False


def _array(dtype: Any, *shape: str | int, lazy: bool = False) -> Any:
    return _Array(dtype, shape, lazy)


def _column(axis: str) -> Any:
    """Declare an int32 [axis] field that lies next to the other columns in one array.

    Separate arrays would put the entries of one block at the same offset of many memory pages. These offsets
    belong to one set of the CPU cache, in which the entries would evict each other.
    """
    return _Array(i4, (axis,), column=True)


class Core(NamedTuple):
    """All arrays of the block manager, in the form that compiled code takes; `new_core` sizes the axes.

    Free blocks form a stack linked by ``next``. Cached blocks that may be evicted are in the eviction list of
    their class, oldest first, linked by ``next`` and ``prev``. Entry ``num_blocks + c`` of both arrays is the
    sentinel of class c. A cached block whose node has children is in no list, and its ``next`` is the null
    block. A node of the prefix index is named by its block in one group (`groups.anchor_of`). Nodes of one
    hash bucket are linked by ``chain``.
    """

    pool: Records = _array(POOL, 1)
    groups: Records = _array(GROUP, "groups")
    rows: Records = _array(ROW, "rows")  # one record per sequence
    requests: Records = _array(REQUEST, "rows")  # one record per request

    # The next five arrays have one entry per block.
    refs: Int32Array = _column("blocks")  # reference count of the block
    next: Int32Array = _column("links")
    prev: Int32Array = _column("links")
    # For a used block: 1 + slot of the only request that references it, or 0. For a cached block: the clock at
    # its release.
    stamp: Int32Array = _column("blocks")
    node_of: Int32Array = _column("blocks")  # node of the block; 0 if the block is not in the prefix index

    # The next eight arrays describe the nodes of the prefix index.
    parent: Int32Array = _column("blocks")
    salt: Int32Array = _column("blocks")  # id of the node's cache salt, 0 for nodes that all salts share
    kind: Int32Array = _column("blocks")  # eviction class in the low bits, plus ONE_CHILD for each child node
    chain: Int32Array = _column("blocks")  # next node of the same hash bucket
    node_hash: UInt64Array = _array(u8, "nodes")
    node_tokens: Int32Array = _array(i4, "nodes", "block_size")
    # block of the node in each group, or the null block
    node_blocks: Int32Array = _array(i4, "groups", "nodes")
    heads: Int32Array = _array(i4, "buckets")  # first node of the hash bucket, 0: none

    # The next two arrays have one entry per salt id.
    salt_nodes: Int32Array = _array(i4, "salts", lazy=True)  # number of nodes with this salt
    seeds: UInt64Array = _array(u8, "salts", lazy=True)  # hash with which the first block of a prompt is seeded

    # The next four arrays have one row per sequence. A recurrent state that is not cached with prefixes is at
    # entry 0 of its block table. A state that is cached is at the entry of the token block in which it ends.
    tables: Int32Array = _array(i4, "groups", "rows", "max_blocks", lazy=True)
    first: Int64Array = _array(i8, "groups", "rows")  # table index of the first block in the sliding window
    tokens: Int32Array = _array(i4, "rows", "max_model_len", lazy=True)
    hashes: UInt64Array = _array(u8, "rows", "max_hashes", lazy=True)  # hash of each full block of tokens

    # The next three arrays belong to learned eviction.
    history: Records = _array(ENTRY, "history")
    # 1 + index of the first history entry in the hash bucket; 0: the bucket is empty
    history_heads: Int32Array = _array(i4, "history_buckets")
    model: Records = _array(MODEL, 1)
    # The next two arrays hold the KV events since the last read, if there is a subscriber, in order: the hashes
    # of evicted nodes, and inserted nodes.
    removed: UInt64Array = _array(u8, "log")
    stored: Int32Array = _array(i4, "log")


# The functions of eviction take the arrays of the block manager, or those of an `EvictionOrder`.
Evictable = Core | OrderArrays


def new_core(
    layout: KVLayout,
    num_blocks: int,
    *,
    rows: int,
    max_model_len: int,
    max_step: int,
    caching: bool,
    seed: int,
    logged: bool,
    learning: bool,
    aligned: bool = False,
    state_every: int = 0,
) -> Core:
    """Return the arrays of a new block manager, with no block in use or cached.

    ``seed`` seeds the hash of the first block of a prompt without salt. Arrays by row and by salt are sized for
    the worst case; their memory is allocated when first used.
    """
    groups = group_records(layout, aligned)
    model, history = new_model(num_blocks, learning and caching)
    nodes, size = num_blocks if caching else 1, layout.block_size
    sizes = {
        "blocks": num_blocks,
        "links": num_blocks + CLASSES,
        "nodes": nodes,
        "block_size": size,
        "buckets": 1 << (nodes - 1).bit_length(),  # on average at most one node falls into a hash bucket
        "salts": nodes + rows,
        "groups": len(groups),
        "rows": rows,
        "max_blocks": ceil_div(max_model_len, size),
        "max_hashes": ceil_div(max_model_len, size) if caching else 1,
        "max_model_len": max_model_len,
        "history": history,
        "history_buckets": history_buckets(history),
        "log": num_blocks if logged else 1,
    }
    fields = Core._field_defaults
    side_by_side = [name for name, spec in fields.items() if spec.column]
    table = resident(len(side_by_side), sizes["links"], dtype=i4)
    core = Core(
        **{name: table[at, : sizes[fields[name].shape[0]]] for at, name in enumerate(side_by_side)},
        **{name: _new(spec, sizes) for name, spec in fields.items() if not spec.column},
    )
    core.groups[:], core.model[:] = groups, model
    pool = columns(core.pool)
    pool.num_blocks[0], pool.block_size[0], pool.num_groups[0] = num_blocks, size, len(groups)
    pool.max_step[0], pool.caching[0], pool.logged[0] = max_step, caching, logged
    pool.anchor[0], pool.windows_only[0] = anchor_of(groups), windows_only(layout)
    pool.windowed[0] = int((groups["window"] > 0).sum())
    pool.aligned[0], pool.state_every[0] = int((groups["kind"] == ALIGNED).sum()), state_every
    pool.free[0], pool.free_head[0] = num_blocks - 1, 1
    core.next[: num_blocks - 1] = np.arange(1, num_blocks, dtype=np.int32)
    core.next[num_blocks - 1] = NULL_BLOCK
    core.next[num_blocks:] = core.prev[num_blocks:] = np.arange(num_blocks, num_blocks + CLASSES)
    core.next[0] = NULL_BLOCK
    core.seeds[0] = seed
    core.rows["request"] = -1
    return core


def _new(spec: _Array, sizes: dict[str, int]) -> npt.NDArray[Any]:
    shape = [axis if isinstance(axis, int) else sizes[axis] for axis in spec.shape]
    return records((lazy if spec.lazy else resident)(*shape, dtype=spec.dtype))


def records(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a structured array as a recarray, for uncompiled code; return other arrays unchanged."""
    # Uncompiled code reads record fields by attribute, which numpy allows only in a recarray; it costs 1 us per
    # call.
    return array.view(np.recarray) if numba.config.DISABLE_JIT and array.dtype.names else array


def columns(records: Records) -> Any:
    """Return each field of a structured array as an array of its own, by name, sharing the memory."""
    plain = records.view(np.ndarray)
    return SimpleNamespace(**{name: plain[name] for name in plain.dtype.names or ()})
