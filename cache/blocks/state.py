"""The whole state of the block manager, each field declared once: `Core`, a named tuple of numpy arrays.

Compiled code takes the `Core` itself and reads it by name: ``core.refs[block]``, ``core.rows[row].length``.
Everything else reads records by column: ``manager.rows.length[row]``.

**Rows or columns, measured** (numba 0.65, numpy 2.3, one core of an AMD EPYC, 262,144 blocks, CPU time). Fields
of a block are columns: taking a block out of its list and its bucket and putting it back costs 6 to 8 ns where
each field is an array, and 22 to 44 where a block is one record. What is small enough for the nearest cache
(sequences, requests, counters, the model of eviction) is records: the checks of a decode cost 2.5 ns a sequence
as records and 2.1 as columns, and an array of records is one argument of a call. Handing the arrays over from
Python costs 2.3 us a call for 33, 3.7 for 60, and 1.7 for 14 and 5 of records; a scalar record costs 1.5 us
alone, which is why `pool` and `model` are arrays of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from tonnage.cache.blocks.groups import ALIGNED, FULL, GROUP, group_records
from tonnage.cache.blocks.memory import lazy, resident
from tonnage.cache.eviction.model import CLASSES, ENTRY, MODEL, new_model
from tonnage.cache.results import EVICTION_CAUSES
from tonnage.planner.model.layout import KVLayout
from tonnage.planner.units import ceil_div

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]

NULL_BLOCK = 0
ROOT = NULL_BLOCK  # parent of a first block

# `Core.kind` holds the class of a node (below 64) and, above it, its children.
CLASS_MASK, ONE_CHILD = 63, 64
CLOCK_MASK = 0x7FFFFFFF  # times are kept modulo 2^31

FOR_PREFILL, FOR_DECODE, FOR_COPY, BY_RESET = range(4)  # places in EVICTION_CAUSES

COPY_TAIL = 1  # copy the last block before the next write
DROP_SOURCE = 2  # the next step gives back the state that this one was copied from

i4, i8, u8 = np.int32, np.int64, np.uint64

POOL = np.dtype(
    [
        ("num_blocks", i8),  # with the null block
        ("block_size", i8),  # tokens
        ("num_groups", i8),
        ("windowed", i8),  # groups with a window, and those of cached states
        ("aligned", i8),  # groups of cached states
        ("state_every", i8),  # blocks of tokens from one state kept to the next; 0: only where prompts are cut
        ("anchor", i8),  # the first full group: its blocks name the nodes of the prefix index
        ("max_step", i8),  # positions that one sequence computes in a step
        ("caching", i8),  # 1: there is a prefix index
        ("logged", i8),  # 1: somebody listens to KV events
        ("free", i8),  # blocks without content
        ("free_head", i8),  # the next to be handed out
        ("cached", i8),  # blocks with content that nobody references
        ("used_full", i8),  # blocks of full groups with a reference
        ("clock", i8),  # blocks that have become cached since the start
        ("lists", i8),  # bit c is set where the list of class c is not empty
        ("nodes", i8),  # of the prefix index
        ("merged", i8),  # duplicates given back
        ("calls", i8),  # of `steps.step`
        ("removed", i8),  # entries of `Core.removed`
        ("stored", i8),  # entries of `Core.stored`
        ("evicted", i8, (len(EVICTION_CAUSES),)),  # blocks by cause
    ]
)
ROW = np.dtype(
    [
        ("length", i8),  # tokens known
        ("computed", i8),  # K/V written for positions below
        ("slots", i8),  # positions below have been extended to
        ("room", i8),  # positions the blocks held have room for
        ("limit", i8),  # prompt + max_tokens
        ("published", i8),  # full blocks that are nodes of the prefix index
        ("hashed", i8),  # entries of `Core.hashes`
        ("found", i8),  # full blocks of its prompt that full groups had when it was admitted
        ("shared_tail", i8),  # bits: COPY_TAIL, DROP_SOURCE
        ("request", i8),  # slot of its request, -1 for an empty row
        ("salt", i8),  # salt id
        ("shared", i8),  # leading blocks that belong to an allowed shared prefix
        ("turn", i8),  # turn of its conversation, from 1, as far as is known
        ("mark", i8),  # number of the last call that named the row, to find one named twice
        ("written", i8),  # in this call: what `computed` becomes,
        ("end", i8),  # and what `slots` does
    ]
)
# What admission reads (see `tonnage.cache.admission.snapshot`); 0 where nothing runs.
REQUEST = np.dtype(
    [
        ("held", i4),  # distinct blocks of full groups
        ("private", i4),  # those that no other request references, or fewer
        ("reserved", i4),  # most blocks of full groups it can ever hold
        ("prompt", i4),  # tokens
        ("live", i4),  # sequences with a row
        ("forks_left", i4),
    ]
)


@dataclass(frozen=True, slots=True)
class _Array:
    dtype: Any
    shape: tuple[str | int, ...]
    lazy: bool = False
    column: bool = False


def _array(dtype: Any, *shape: str | int, lazy: bool = False) -> Any:
    return _Array(dtype, shape, lazy)


def _column(axis: str) -> Any:
    """int32 [axis], side by side with the other columns, whose entries for one block would otherwise lie at the
    same place of as many pages and share one set of the nearest cache."""
    return _Array(i4, (axis,), column=True)


class Core(NamedTuple):
    """All arrays, as compiled code takes them; the axes are those of `new_core`.

    Free blocks are a stack linked by ``next``. Cached ones that may be evicted stand in the list of their
    class, the oldest first, linked both ways, with entry ``num_blocks + c`` as the sentinel of class c; a
    cached block in no list, because its node has children, has the null block as ``next``. A node of the prefix
    index is named by its block in the anchor group; nodes of one bucket are linked by ``chain``.
    """

    pool: Records = _array(POOL, 1)
    groups: Records = _array(GROUP, "groups")
    rows: Records = _array(ROW, "rows")  # by sequence
    requests: Records = _array(REQUEST, "rows")  # by request slot
    # by block
    refs: Int32Array = _column("blocks")  # reference count
    next: Int32Array = _column("links")
    prev: Int32Array = _column("links")
    # used: 1 + slot of the only request that references it, or 0; cached: the clock when it became so
    stamp: Int32Array = _column("blocks")
    node_of: Int32Array = _column("blocks")  # its node, 0 outside the index
    # by node
    parent: Int32Array = _column("blocks")
    salt: Int32Array = _column("blocks")  # id of the salt, 0 for the shared ones
    kind: Int32Array = _column("blocks")  # its class, and ONE_CHILD for each child
    chain: Int32Array = _column("blocks")  # next of the bucket
    node_hash: UInt64Array = _array(u8, "nodes")
    node_tokens: Int32Array = _array(i4, "nodes", "block_size")
    node_blocks: Int32Array = _array(i4, "groups", "nodes")  # the null block where it has none
    heads: Int32Array = _array(i4, "buckets")  # first node, 0: none
    # by salt id
    salt_nodes: Int32Array = _array(i4, "salts", lazy=True)  # nodes with it
    seeds: UInt64Array = _array(u8, "salts", lazy=True)  # hash that a chain of it starts from
    # by sequence; a recurrent state is entry 0, a cached one that of the block of tokens it ends in
    tables: Int32Array = _array(i4, "groups", "rows", "max_blocks", lazy=True)
    first: Int64Array = _array(i8, "groups", "rows")  # first block that no window has left
    tokens: Int32Array = _array(i4, "rows", "max_model_len", lazy=True)
    hashes: UInt64Array = _array(u8, "rows", "max_hashes", lazy=True)  # of the full blocks of tokens
    # learned eviction
    history: Records = _array(ENTRY, "history")
    history_heads: Int32Array = _array(i4, "history_buckets")  # 1 + first entry, 0: none
    model: Records = _array(MODEL, 1)
    # where somebody listens, since the last look: hashes evicted, and nodes inserted, in order
    removed: UInt64Array = _array(u8, "log")
    stored: Int32Array = _array(i4, "log")


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
    """An empty pool. Rows and salts are reserved for the worst case; their memory is taken where it is used."""
    groups = group_records(layout, aligned)
    model, history = new_model(num_blocks, learning and caching)
    nodes, size = num_blocks if caching else 1, layout.block_size
    sizes = {
        "blocks": num_blocks,
        "links": num_blocks + CLASSES,
        "nodes": nodes,
        "block_size": size,
        "buckets": 1 << (nodes - 1).bit_length(),  # at most one node a bucket on average
        "salts": nodes + rows,
        "groups": len(groups),
        "rows": rows,
        "max_blocks": ceil_div(max_model_len, size),
        "max_hashes": ceil_div(max_model_len, size) if caching else 1,
        "max_model_len": max_model_len,
        "history": history,
        "history_buckets": 1 << max(0, (history // 2).bit_length() - 1),
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
    full = np.flatnonzero(groups["kind"] == FULL)
    pool.anchor[0] = int(full[0]) if len(full) else 0
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
    array = (lazy if spec.lazy else resident)(*shape, dtype=spec.dtype)
    # The same source uncompiled: numpy reads records by attribute in a recarray, which costs a call 1 us.
    return array.view(np.recarray) if numba.config.DISABLE_JIT and array.dtype.names else array


def columns(records: Records) -> Any:
    """Each field of an array of records as an array of its own, by name; the same memory."""
    plain = records.view(np.ndarray)
    return SimpleNamespace(**{name: plain[name] for name in plain.dtype.names or ()})
