"""Compiled functions that apply a step, a fork or an end to sequences, each a row of the block tables.

`step` takes a batch. It checks every row first and changes nothing if one fails. It returns ``(code, at)``:
`OK` and the number of copies, or the first failed check and the index of its sequence in the call.
`tonnage.cache.manager` turns the codes into errors.
"""

from __future__ import annotations

from tonnage.cache.blocks.groups import ALIGNED, FULL, STATE
from tonnage.cache.blocks.pool import pop_free, release
from tonnage.cache.blocks.state import (
    COPY_TAIL,
    DROP_SOURCE,
    FOR_COPY,
    FOR_DECODE,
    FOR_PREFILL,
    NULL_BLOCK,
    Core,
    Int32Array,
    Int64Array,
)
from tonnage.cache.compiled import compiled, inlined, inner
from tonnage.cache.groups import states, windows
from tonnage.cache.groups.entries import blocks_to_grow, entries, entry_of
from tonnage.cache.prefix.index import evict, publish, sibling_holds

OK, TWICE, NEGATIVE, TOO_LONG, STEP_TOO_LONG, NO_ROOM, OUT_OF_ORDER, STATE_ELSEWHERE = range(8)

# Bits that select what a call does to each row; they are applied in this order.
COMMIT, APPEND, EXTEND = 1, 2, 4
# A decode commits all known tokens, appends one more token and allocates its slot.
DECODE = COMMIT | APPEND | EXTEND


@compiled
def step(
    core: Core, what: int, batch: Int64Array, ends: Int64Array, tokens: Int32Array, copies: Int32Array
) -> tuple[int, int]:
    """Commit, append to and extend the sequences of distinct table rows in one call, all or nothing.

    Args:
        core: The block manager's arrays.
        what: Bits of COMMIT, APPEND and EXTEND. COMMIT: record that K/V below each end is written, and add full
            blocks to the prefix index. If recurrent states are cached, the end must be in the sequence's last
            allocated block. APPEND: add tokens. EXTEND: make positions [computed, end) writable.
        batch: int64 [rows of the call]: row indices.
        ends: int64 [rows of the call], for COMMIT or EXTEND. With all three bits (DECODE), the ends of COMMIT
            and EXTEND follow from the known tokens.
        tokens: int32 [rows of the call * count], for APPEND: the same count for each row.
        copies: int32 [2, 2 * groups * rows]: receives (src, dst) block pairs.

    Returns:
        The result code, and the number of copies or the index of the sequence that failed.
    """
    pool = core.pool[0]
    pool.calls += 1
    size, most, count = pool.block_size, 0, tokens.size // max(1, batch.size)
    for i in range(batch.size):
        row = core.rows[batch[i]]
        if row.mark == pool.calls:
            return TWICE, i
        row.mark = pool.calls
        written, length, end = row.computed, row.length, row.slots
        if what & APPEND:
            for at in range(i * count, i * count + count):
                if tokens[at] < 0:
                    return NEGATIVE, i
            length += count
            if length > row.limit:
                return TOO_LONG, i
        if what & COMMIT:
            written = row.length if what == DECODE else ends[i]
            if written < row.computed or written > min(row.slots, row.length):
                return OUT_OF_ORDER, i
            if pool.aligned and written > row.computed and (written - 1) // size < (row.slots - 1) // size:
                return STATE_ELSEWHERE, i
        if what & EXTEND:
            end = length if what == DECODE else ends[i]
            if end < 0:
                return NEGATIVE, i
            if end > row.limit:
                return TOO_LONG, i
            if end - written > pool.max_step:
                return STEP_TOO_LONG, i
            if end > row.room or (row.shared_tail != 0 and end > written):
                most += demand(core, batch[i], written, end, False)
        row.written, row.end = written, end
    # `most` is an upper bound of the missing blocks: blocks that the call itself releases are not subtracted.
    if most > pool.free + pool.cached:
        short_at = _first_without_room(core, batch, copies)
        if short_at >= 0:
            return NO_ROOM, short_at
    copied = 0
    for i in range(batch.size):
        row = core.rows[batch[i]]
        end = row.end
        if what & COMMIT:
            row.computed = row.written
            if pool.caching and row.computed >= (row.published + 1) * size:
                publish(core, batch[i])
        if what & APPEND:
            for at in range(count):
                core.tokens[batch[i], row.length + at] = tokens[i * count + at]
            row.length += count
        if what & EXTEND:
            row.slots = max(row.slots, end)
            if end > row.room or (row.shared_tail != 0 and end > row.computed):
                copied = _grow(core, batch[i], end, copies, copied)
    return OK, copied


@inlined
def demand(core: Core, at_row: int, computed: int, end: int, full_only: bool) -> int:
    """Return the number of KV blocks that a sequence needs to write K/V up to position ``end``.

    The number includes new blocks, and a copy of a last block that is shared. ``at_row`` is the sequence's row
    in the tables. Its K/V below position ``computed`` is written. ``full_only`` counts full-attention groups
    only.
    """
    row, size, blocks = core.rows[at_row], core.pool[0].block_size, 0
    for group in range(core.groups.size):
        kind = core.groups[group].kind
        if full_only and kind != FULL:
            continue
        if end > row.room:
            blocks += blocks_to_grow(kind, computed, row.room, end, size)
        if row.shared_tail & COPY_TAIL and end > computed:
            blocks += core.refs[core.tables[group, at_row, entry_of(kind, computed, size)]] > 1
    return blocks


@inner
def _first_without_room(core: Core, batch: Int64Array, copies: Int32Array) -> int:
    """Return the index of the first row for which the pool has too few blocks to extend it, or -1.

    Blocks released during the call count as available: blocks before a moving window, and a shared block after
    all sharers but the last have copied it. The function decrements their reference counts temporarily;
    ``copies`` stores the affected blocks until the counts are restored.
    """
    pool, size = core.pool[0], core.pool[0].block_size
    available = pool.free + pool.cached
    copied, done, short_at = 0, 0, -1
    while done < batch.size and short_at < 0:
        at_row = batch[done]
        row = core.rows[at_row]
        available -= demand(core, at_row, row.written, row.end, False)
        if row.shared_tail & COPY_TAIL and row.end > row.written:
            for group in range(pool.num_groups):
                block = core.tables[group, at_row, entry_of(core.groups[group].kind, row.written, size)]
                if core.refs[block] > 1:
                    core.refs[block] -= 1
                    copies[0, copied] = block
                    copied += 1
        if pool.windowed and _moves_on(core, at_row):
            available += windows.count_left(core, at_row, row.written, -1)
        if available < 0:
            short_at = done
        done += 1
    for i in range(copied):
        core.refs[copies[0, i]] += 1
    if pool.windowed:
        for i in range(done):
            if _moves_on(core, batch[i]):
                windows.count_left(core, batch[i], core.rows[batch[i]].written, 1)
    return short_at


@inlined
def _moves_on(core: Core, at_row: int) -> bool:
    """Return whether the current call releases blocks that the row's sliding windows have left behind."""
    row = core.rows[at_row]
    return bool(row.end > row.room or (row.shared_tail & DROP_SOURCE and row.end > row.written))


@compiled
def wanted_blocks(core: Core, batch: Int64Array, ends: Int64Array, wanted: Int64Array) -> None:
    """Write to ``wanted[i]`` how many more full-attention blocks row i needs for positions below ``ends[i]``.

    The number includes the copy of a shared last block.
    """
    for i in range(batch.size):
        wanted[i] = demand(core, batch[i], core.rows[batch[i]].computed, ends[i], True)


@inner
def _grow(core: Core, at_row: int, end: int, copies: Int32Array, copied: int) -> int:
    """Allocate a row's KV blocks for positions below ``end``, and copy shared blocks that it will write to.

    Returns the number of block copies so far.
    """
    pool, row = core.pool[0], core.rows[at_row]
    size, slot = pool.block_size, row.request
    if pool.windowed and _moves_on(core, at_row):
        windows.drop_left(core, at_row)
        if row.room // size == (row.computed + size - 1) // size:
            row.shared_tail &= ~DROP_SOURCE
    if row.shared_tail & COPY_TAIL and end > row.computed:
        copied = _copy_shared_tail(core, at_row, copies, copied)
    if end <= row.room:
        return copied
    held = (end + size - 1) // size
    if pool.num_groups * held > pool.free:
        short = demand(core, at_row, row.computed, end, False) - pool.free
        if short > 0:
            evict(core, short, FOR_PREFILL if end <= core.requests[slot].prompt else FOR_DECODE)
    for group in range(pool.num_groups):
        kind = core.groups[group].kind
        if kind == ALIGNED:
            copied = states.grow_state(core, at_row, group, held - 1, copies, copied)
            continue
        for at in range(entries(kind, row.room, size), entries(kind, end, size)):
            core.tables[group, at_row, at] = pop_free(core, kind == FULL, slot)
    row.room = held * size
    return copied


@inner
def _copy_shared_tail(core: Core, at_row: int, copies: Int32Array, copied: int) -> int:
    pool, row = core.pool[0], core.rows[at_row]
    for group in range(pool.num_groups):
        kind = core.groups[group].kind
        at = entry_of(kind, row.computed, pool.block_size)
        shared = core.tables[group, at_row, at]
        if core.refs[shared] > 1:
            if pool.free == 0:
                evict(core, 1, FOR_COPY)
            own = pop_free(core, kind == FULL, row.request)
            core.tables[group, at_row, at] = own
            # other sequences of the request still hold the block
            release(core, shared, kind == FULL, row.request)
            copies[0, copied], copies[1, copied] = shared, own
            copied += 1
    row.shared_tail &= ~COPY_TAIL
    return copied


@compiled
def share(core: Core, parent: int, child: int) -> None:
    """Fork a sequence: fill the row ``child`` with the parent's, sharing all blocks with computed positions."""
    size, old, new = core.pool[0].block_size, core.rows[parent], core.rows[child]
    computed, stateful = old.computed, False
    for group in range(core.groups.size):
        for at in range(core.first[group, parent], entries(core.groups[group].kind, computed, size)):
            block = core.tables[group, parent, at]
            if block != NULL_BLOCK:
                # Parent and child belong to one request, so the request's number of private blocks (blocks that
                # no other request references) does not change.
                core.refs[block] += 1
                core.tables[group, child, at] = block
        core.first[group, child] = core.first[group, parent]
        stateful = stateful or core.groups[group].kind == STATE
    for at in range(old.length):
        core.tokens[child, at] = core.tokens[parent, at]
    for at in range(old.hashed):
        core.hashes[child, at] = core.hashes[parent, at]
    new.length, new.hashed, new.computed, new.limit = old.length, old.hashed, computed, old.limit
    new.published, new.salt, new.shared, new.turn = old.published, old.salt, old.shared, old.turn
    new.request, new.room = old.request, (computed + size - 1) // size * size
    # The parent's number of writable positions is reset to its number of computed positions. Before
    # its next write, the parent then needs an extend, which copies the shared block.
    new.slots = old.slots = computed
    new.shared_tail = old.shared_tail & DROP_SOURCE
    if computed % size != 0 or stateful:  # a recurrent state is written in every step
        new.shared_tail |= COPY_TAIL
        old.shared_tail |= COPY_TAIL


@compiled
def leave(core: Core, batch: Int64Array) -> None:
    """Release the KV blocks of each row of ``batch``, last block first, and clear the row."""
    for i in range(batch.size):
        leave_row(core, batch[i])


@inlined
def leave_row(core: Core, at_row: int) -> None:
    """Release the KV blocks of one sequence's row, last block first, and clear the row."""
    pool, row, slot = core.pool[0], core.rows[at_row], core.rows[at_row].request
    for at in range(row.room // pool.block_size - 1, -1, -1):
        for group in range(pool.num_groups):
            block = core.tables[group, at_row, at]
            if block == NULL_BLOCK:
                continue
            full = core.groups[group].kind == FULL
            if full and not (core.refs[block] > 1 and sibling_holds(core, at_row, group, at, block)):
                core.requests[slot].held -= 1
            release(core, block, full, slot)
            core.tables[group, at_row, at] = NULL_BLOCK
    for group in range(pool.num_groups):
        core.first[group, at_row] = 0
    row.length = row.computed = row.slots = row.room = row.limit = row.published = row.hashed = 0
    row.shared_tail = row.shared = row.salt = row.turn = row.found = 0
    row.request = -1
    core.requests[slot].live -= 1
