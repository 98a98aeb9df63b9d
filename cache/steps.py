"""What a step does to many sequences at once: compiled loops over rows. Checks first, changes after.

Each function takes the rows of one call and answers ``(code, at)``: `OK`, or the first check that failed and
the place of the sequence in the call, nothing having changed. `tonnage.cache.manager` turns codes into errors.
"""

from __future__ import annotations

import numpy as np

from tonnage.cache.compiled import compiled
from tonnage.cache.pool import pop_free, release
from tonnage.cache.prefix import evict, first_needed, hash_row, lock, match, publish
from tonnage.cache.state import (
    BLOCK_SIZE,
    CACHED,
    CACHING,
    CALLS,
    FREE,
    GROUPS,
    MAX_STEP,
    NULL_BLOCK,
    Int32Array,
    Int64Array,
    State,
)

OK, TWICE, NEGATIVE, TOO_LONG, STEP_TOO_LONG, NO_ROOM, OUT_OF_ORDER = range(7)


@compiled
def start(state: State, row: int) -> int:
    """The row holds its prompt: hash it, lock the longest usable hit; returns its blocks. At least the last
    token is left to compute."""
    rows, size = state.rows, state.constants[BLOCK_SIZE]
    if not state.constants[CACHING]:
        return 0
    hash_row(state, row, rows.length[row] // size)
    count = match(state, row, (rows.length[row] - 1) // size)
    if count > 0:
        lock(state, row, count)
        rows.computed[row] = rows.slots[row] = rows.room[row] = count * size
        rows.published[row] = count
    return count


@compiled
def extend(state: State, batch: Int64Array, ends: Int64Array, copies: Int32Array) -> tuple[int, int]:
    """Make positions [computed, end) writable. ``copies`` int32 [2, groups * rows] receives (src, dst) pairs,
    as many as the second answer says where the first is OK."""
    code, at = _check_extend(state, batch, ends)
    if code != OK:
        return code, at
    code, at = _check_room(state, batch, state.rows.computed[batch], ends)
    if code != OK:
        return code, at
    copied = 0
    for i in range(batch.size):
        copied = _extend_row(state, batch[i], ends[i], copies, copied)
    return OK, copied


@compiled
def _check_extend(state: State, batch: Int64Array, ends: Int64Array) -> tuple[int, int]:
    rows, counters = state.rows, state.pool.counters
    counters[CALLS] += 1
    for i in range(batch.size):
        row, end = batch[i], ends[i]
        if rows.mark[row] == counters[CALLS]:
            return TWICE, i
        rows.mark[row] = counters[CALLS]
        if end < 0:
            return NEGATIVE, i
        if end > rows.limit[row]:
            return TOO_LONG, i
        if end - rows.computed[row] > state.constants[MAX_STEP]:
            return STEP_TOO_LONG, i
    return OK, 0


@compiled
def _check_room(state: State, batch: Int64Array, computed: Int64Array, ends: Int64Array) -> tuple[int, int]:
    """Whether every block that `_extend_row` will take is there. A block given back on the way (a window moves
    on, all sharers but the last copy) counts: references are taken off as if it had happened, and put back."""
    rows, pool, groups, size = state.rows, state.pool, state.constants[GROUPS], state.constants[BLOCK_SIZE]
    most = batch.size * groups
    for i in range(batch.size):
        for group in range(groups):
            if state.windows[group] > 0 and ends[i] > rows.room[batch[i]]:
                most += max(
                    0, first_needed(state.windows[group], computed[i], state) - rows.first[group, batch[i]]
                )
    dropped = np.empty(most, np.int32)
    available = pool.counters[FREE] + pool.counters[CACHED]
    noted, code, at = 0, OK, 0
    for i in range(batch.size):
        row, end = batch[i], ends[i]
        if rows.shared_tail[row] and end > computed[i]:
            for group in range(groups):
                block = rows.tables[group, row, computed[i] // size]
                if pool.refs[block] > 1:
                    pool.refs[block] -= 1
                    dropped[noted] = block
                    noted += 1
                    available -= 1
        if end > rows.room[row]:
            for group in range(groups):
                if state.windows[group] > 0:
                    first = first_needed(state.windows[group], computed[i], state)
                    for place in range(rows.first[group, row], first):
                        block = rows.tables[group, row, place]
                        pool.refs[block] -= 1
                        dropped[noted] = block
                        noted += 1
                        if pool.refs[block] == 0:
                            available += 1
            available -= groups * ((end + size - 1) // size - rows.room[row] // size)
        if available < 0:
            code, at = NO_ROOM, i
            break
    for i in range(noted):
        pool.refs[dropped[i]] += 1
    return code, at


@compiled
def wanted_blocks(state: State, batch: Int64Array, ends: Int64Array, wanted: Int64Array) -> None:
    """``wanted[i]``: blocks of full groups that `extend` would take for the i-th row, a copy included."""
    rows, size = state.rows, state.constants[BLOCK_SIZE]
    for i in range(batch.size):
        row, end, count = batch[i], ends[i], 0
        for group in range(state.constants[GROUPS]):
            if state.windows[group] > 0:
                continue
            if end > rows.room[row]:
                count += (end + size - 1) // size - rows.room[row] // size
            tail = rows.tables[group, row, rows.computed[row] // size]
            if rows.shared_tail[row] and end > rows.computed[row] and state.pool.refs[tail] > 1:
                count += 1
        wanted[i] = count


@compiled
def _extend_row(state: State, row: int, end: int, copies: Int32Array, copied: int) -> int:
    rows, size, slot = state.rows, state.constants[BLOCK_SIZE], state.rows.request[row]
    rows.slots[row] = max(rows.slots[row], end)
    if rows.shared_tail[row] and end > rows.computed[row]:
        copied = _copy_shared_tail(state, row, copies, copied)
    if end <= rows.room[row]:
        return copied
    have, need = rows.room[row] // size, (end + size - 1) // size
    for group in range(state.constants[GROUPS]):
        if state.windows[group] > 0:
            first = first_needed(state.windows[group], rows.computed[row], state)
            for at in range(rows.first[group, row], first):
                release(state, rows.tables[group, row, at], False, slot)
                rows.tables[group, row, at] = NULL_BLOCK
            rows.first[group, row] = max(first, rows.first[group, row])
    for group in range(state.constants[GROUPS]):
        full = state.windows[group] == 0
        for at in range(have, need):
            rows.tables[group, row, at] = _take(state, full, slot)
        if full:
            state.requests.held[slot] += need - have
    rows.room[row] = need * size
    return copied


@compiled
def _take(state: State, full: bool, slot: int) -> int:
    if state.pool.counters[FREE] == 0:
        evict(state, 1)
    return pop_free(state, full, slot)


@compiled
def _copy_shared_tail(state: State, row: int, copies: Int32Array, copied: int) -> int:
    rows, slot = state.rows, state.rows.request[row]
    at = rows.computed[row] // state.constants[BLOCK_SIZE]
    for group in range(state.constants[GROUPS]):
        full = state.windows[group] == 0
        shared = rows.tables[group, row, at]
        if state.pool.refs[shared] > 1:
            own = _take(state, full, slot)
            rows.tables[group, row, at] = own
            release(state, shared, full, slot)  # the others of its request still hold it
            if full:
                state.requests.held[slot] += 1
            copies[0, copied], copies[1, copied] = shared, own
            copied += 1
    rows.shared_tail[row] = False
    return copied


@compiled
def append(state: State, batch: Int64Array, tokens: Int32Array) -> tuple[int, int]:
    """One token for each row."""
    rows, counters = state.rows, state.pool.counters
    counters[CALLS] += 1
    for i in range(batch.size):
        row = batch[i]
        if rows.mark[row] == counters[CALLS]:
            return TWICE, i
        rows.mark[row] = counters[CALLS]
        if tokens[i] < 0:
            return NEGATIVE, i
        if rows.length[row] >= rows.limit[row]:
            return TOO_LONG, i
    for i in range(batch.size):
        row = batch[i]
        rows.tokens[row, rows.length[row]] = tokens[i]
        rows.length[row] += 1
    return OK, 0


@compiled
def commit(state: State, batch: Int64Array, ends: Int64Array) -> tuple[int, int]:
    """K/V below each end is written; full blocks become nodes of the prefix index."""
    rows, counters, size = state.rows, state.pool.counters, state.constants[BLOCK_SIZE]
    counters[CALLS] += 1
    for i in range(batch.size):
        row, end = batch[i], ends[i]
        if rows.mark[row] == counters[CALLS]:
            return TWICE, i
        rows.mark[row] = counters[CALLS]
        if end < rows.computed[row] or end > rows.slots[row] or end > rows.length[row]:
            return OUT_OF_ORDER, i
    for i in range(batch.size):
        row = batch[i]
        rows.computed[row] = ends[i]
        if state.constants[CACHING] and ends[i] // size > rows.published[row]:
            publish(state, row)
    return OK, 0


@compiled
def decode(state: State, batch: Int64Array, tokens: Int32Array, copies: Int32Array) -> tuple[int, int]:
    """One decode step in one pass: every known token of each row is computed, a new one is appended and gets
    its slot. As commit, append and extend after one another; answers as `extend`."""
    rows, counters, size = state.rows, state.pool.counters, state.constants[BLOCK_SIZE]
    ends = rows.length[batch] + 1
    counters[CALLS] += 1
    growing = False
    for i in range(batch.size):
        row = batch[i]
        if rows.mark[row] == counters[CALLS]:
            return TWICE, i
        rows.mark[row] = counters[CALLS]
        if tokens[i] < 0:
            return NEGATIVE, i
        if ends[i] > rows.limit[row]:
            return TOO_LONG, i
        to_copy = rows.shared_tail[row]
        if rows.slots[row] < ends[i] - 1 or (to_copy and rows.computed[row] < ends[i] - 1):
            return OUT_OF_ORDER, i
        growing = growing or ends[i] > rows.room[row] or to_copy
    if growing:
        code, at = _check_room(state, batch, rows.length[batch], ends)
        if code != OK:
            return code, at
    copied = 0
    for i in range(batch.size):
        row = batch[i]
        length = rows.length[row]
        rows.computed[row] = length
        if state.constants[CACHING] and length // size > rows.published[row]:
            publish(state, row)
        rows.tokens[row, length] = tokens[i]
        rows.length[row] = length + 1
        if ends[i] > rows.room[row] or rows.shared_tail[row]:
            copied = _extend_row(state, row, ends[i], copies, copied)
        else:
            rows.slots[row] = length + 1
    return OK, copied


@compiled
def share(state: State, parent: int, child: int) -> None:
    """The child's row becomes the parent's: all blocks with computed positions are shared."""
    rows, size = state.rows, state.constants[BLOCK_SIZE]
    computed, slot = rows.computed[parent], rows.request[parent]
    held = (computed + size - 1) // size
    for group in range(state.constants[GROUPS]):
        for at in range(rows.first[group, parent], held):
            block = rows.tables[group, parent, at]
            state.pool.refs[block] += 1  # of the same request: nobody's private count changes
            rows.tables[group, child, at] = block
        rows.first[group, child] = rows.first[group, parent]
    length, hashed = rows.length[parent], rows.hashed[parent]
    for at in range(length):
        rows.tokens[child, at] = rows.tokens[parent, at]
    for at in range(hashed):
        rows.hashes[child, at] = rows.hashes[parent, at]
    rows.length[child], rows.hashed[child] = length, hashed
    rows.computed[child], rows.limit[child] = computed, rows.limit[parent]
    rows.published[child], rows.salt[child] = rows.published[parent], rows.salt[parent]
    rows.shared[child], rows.kind[child] = rows.shared[parent], rows.kind[parent]
    rows.request[child] = slot
    rows.room[child] = held * size
    # The parent's slots go back to what is computed: writing again takes an extend, which copies.
    rows.slots[child] = rows.slots[parent] = computed
    if computed % size != 0:
        rows.shared_tail[child] = rows.shared_tail[parent] = True


@compiled
def leave(state: State, row: int) -> None:
    """Give back the row's blocks, last block first, and clear it."""
    rows, requests, size = state.rows, state.requests, state.constants[BLOCK_SIZE]
    slot, held = rows.request[row], rows.room[row] // size
    for at in range(held - 1, -1, -1):
        for group in range(state.constants[GROUPS]):
            block = rows.tables[group, row, at]
            if block == NULL_BLOCK:
                continue
            full = state.windows[group] == 0
            if full and not _sibling_holds(state, row, group, at, block):
                requests.held[slot] -= 1
            release(state, block, full, slot)
            rows.tables[group, row, at] = NULL_BLOCK
    for group in range(state.constants[GROUPS]):
        rows.first[group, row] = 0
    rows.length[row] = rows.computed[row] = rows.slots[row] = rows.room[row] = rows.limit[row] = 0
    rows.published[row] = rows.hashed[row] = rows.shared[row] = 0
    rows.shared_tail[row] = False
    rows.salt[row] = rows.kind[row] = 0
    rows.request[row] = -1
    requests.live[slot] -= 1


@compiled
def _sibling_holds(state: State, row: int, group: int, at: int, block: int) -> bool:
    """Whether another sequence of the same request has the block (at the same place, where else)."""
    rows, slot = state.rows, state.rows.request[row]
    if state.requests.live[slot] < 2 or state.pool.refs[block] < 2:
        return False
    for other in range(rows.request.size):
        if other != row and rows.request[other] == slot and rows.tables[group, other, at] == block:
            return True
    return False


@compiled
def summarize(state: State, place: Int32Array, out: Int32Array) -> None:
    """Per running request what only its rows know. ``place`` [slots] the entry of each slot; ``out`` int32
    [3, running], zero before: prompt tokens left, tokens produced, tokens that may still be produced."""
    rows, requests = state.rows, state.requests
    for row in range(rows.request.size):
        slot = rows.request[row]
        if slot < 0:
            continue
        entry, prompt = place[slot], requests.prompt[slot]
        out[0, entry] = max(out[0, entry], prompt - rows.computed[row])
        out[1, entry] = max(out[1, entry], rows.length[row] - prompt)
        out[2, entry] = max(out[2, entry], rows.limit[row] - rows.length[row])
