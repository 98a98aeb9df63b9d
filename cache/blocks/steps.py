"""What a step does to many sequences at once: compiled loops over rows. Checks first, changes after.

Each function takes the rows of one call and answers ``(code, at)``: `OK`, or the first check that failed and
the place of the sequence in the call, nothing having changed. `tonnage.cache.manager` turns codes into errors.
"""

from __future__ import annotations

from tonnage.cache.blocks.pool import pop_free, release
from tonnage.cache.blocks.state import (
    BLOCK_SIZE,
    CACHED,
    CACHING,
    CALLS,
    COMPUTED,
    FIRST,
    FOR_COPY,
    FOR_DECODE,
    FOR_PREFILL,
    FREE,
    GROUPS,
    HASHED,
    HELD,
    LENGTH,
    LIMIT,
    LIVE,
    MARK,
    MAX_STEP,
    NULL_BLOCK,
    PROMPT,
    PUBLISHED,
    REFS,
    REQUEST,
    ROOM,
    ROW_SALT,
    SHARED,
    SHARED_TAIL,
    SLOTS,
    STATES,
    TURN,
    Core,
    Int32Array,
    Int64Array,
)
from tonnage.cache.compiled import compiled
from tonnage.cache.eviction.reuse import observe_end
from tonnage.cache.prefix.index import evict, first_needed, publish

OK, TWICE, NEGATIVE, TOO_LONG, STEP_TOO_LONG, NO_ROOM, OUT_OF_ORDER = range(7)


@compiled
def extend(core: Core, batch: Int64Array, ends: Int64Array, copies: Int32Array) -> tuple[int, int]:
    """Make positions [computed, end) writable. ``copies`` int32 [2, groups * rows] receives (src, dst) pairs,
    as many as the second answer says where the first is OK."""
    code, at = _check_extend(core, batch, ends)
    if code != OK:
        return code, at
    for i in range(batch.size):
        core.before[i] = core.rows[COMPUTED, batch[i]]
    code, at = _check_room(core, batch, core.before, ends)
    if code != OK:
        return code, at
    copied = 0
    for i in range(batch.size):
        copied = _extend_row(core, batch[i], ends[i], copies, copied)
    return OK, copied


@compiled
def _check_extend(core: Core, batch: Int64Array, ends: Int64Array) -> tuple[int, int]:
    rows, counters = core.rows, core.counters
    counters[CALLS] += 1
    for i in range(batch.size):
        row, end = batch[i], ends[i]
        if rows[MARK, row] == counters[CALLS]:
            return TWICE, i
        rows[MARK, row] = counters[CALLS]
        if end < 0:
            return NEGATIVE, i
        if end > rows[LIMIT, row]:
            return TOO_LONG, i
        if end - rows[COMPUTED, row] > core.constants[MAX_STEP]:
            return STEP_TOO_LONG, i
    return OK, 0


@compiled
def _check_room(core: Core, batch: Int64Array, computed: Int64Array, ends: Int64Array) -> tuple[int, int]:
    """Whether every block that `_extend_row` will take is there. A block given back on the way (a window moves
    on, all sharers but the last copy) counts: references are taken off as if it had happened, and put back."""
    rows, blocks = core.rows, core.blocks
    groups, size = core.constants[GROUPS], core.constants[BLOCK_SIZE]
    available = core.counters[FREE] + core.counters[CACHED]
    copied, done, code = 0, 0, OK
    for i in range(batch.size):
        row, end = batch[i], ends[i]
        done += 1
        if rows[SHARED_TAIL, row] and end > computed[i]:
            for group in range(groups):
                block = core.tables[group, row, computed[i] // size]
                if blocks[REFS, block] > 1:
                    blocks[REFS, block] -= 1
                    core.scratch[copied] = block
                    copied += 1
                    available -= 1
            for at in range(core.constants[STATES]):
                block = core.states[at, row]
                if blocks[REFS, block] > 1:
                    blocks[REFS, block] -= 1
                    core.scratch[copied] = block
                    copied += 1
                    available -= 1
        if end > rows[ROOM, row]:
            for at in range(core.constants[STATES]):
                available -= core.states[at, row] == NULL_BLOCK
            available += _drop_dead(core, row, computed[i], -1)
            available -= groups * ((end + size - 1) // size - rows[ROOM, row] // size)
        if available < 0:
            code = NO_ROOM
            break
    for i in range(copied):
        blocks[REFS, core.scratch[i]] += 1
    for i in range(done):
        if ends[i] > rows[ROOM, batch[i]]:
            _drop_dead(core, batch[i], computed[i], 1)
    return code, done - 1


@compiled
def _drop_dead(core: Core, row: int, computed: int, change: int) -> int:
    """Add ``change`` to the references of the blocks that the row's windows have left; how many have none."""
    blocks, gone = core.blocks, 0
    for group in range(core.constants[GROUPS]):
        if core.windows[group] != 0:
            for at in range(core.rows[FIRST + group, row], first_needed(core.windows[group], computed, core)):
                block = core.tables[group, row, at]
                blocks[REFS, block] += change
                if blocks[REFS, block] == 0:
                    gone += 1
    return gone


@compiled
def wanted_blocks(core: Core, batch: Int64Array, ends: Int64Array, wanted: Int64Array) -> None:
    """``wanted[i]``: blocks of full groups that `extend` would take for the i-th row, a copy included."""
    rows, size = core.rows, core.constants[BLOCK_SIZE]
    for i in range(batch.size):
        row, end, count = batch[i], ends[i], 0
        for group in range(core.constants[GROUPS]):
            if core.windows[group] != 0:
                continue
            if end > rows[ROOM, row]:
                count += (end + size - 1) // size - rows[ROOM, row] // size
            tail = core.tables[group, row, rows[COMPUTED, row] // size]
            if rows[SHARED_TAIL, row] and end > rows[COMPUTED, row] and core.blocks[REFS, tail] > 1:
                count += 1
        wanted[i] = count


@compiled
def _extend_row(core: Core, row: int, end: int, copies: Int32Array, copied: int) -> int:
    rows, size, slot = core.rows, core.constants[BLOCK_SIZE], core.rows[REQUEST, row]
    rows[SLOTS, row] = max(rows[SLOTS, row], end)
    if rows[SHARED_TAIL, row] and end > rows[COMPUTED, row]:
        copied = _copy_shared_tail(core, row, copies, copied)
    if end <= rows[ROOM, row]:
        return copied
    have, need = rows[ROOM, row] // size, (end + size - 1) // size
    for group in range(core.constants[GROUPS]):
        if core.windows[group] != 0:
            first = first_needed(core.windows[group], rows[COMPUTED, row], core)
            for at in range(core.rows[FIRST + group, row], first):
                release(core, core.tables[group, row, at], False, slot)
                core.tables[group, row, at] = NULL_BLOCK
            core.rows[FIRST + group, row] = max(first, core.rows[FIRST + group, row])
    short = (need - have) * core.constants[GROUPS] - core.counters[FREE]
    for at in range(core.constants[STATES]):
        short += core.states[at, row] == NULL_BLOCK
    if short > 0:
        evict(core, short, FOR_PREFILL if end <= core.requests[PROMPT, slot] else FOR_DECODE)
    for group in range(core.constants[GROUPS]):
        full = core.windows[group] == 0
        for at in range(have, need):
            core.tables[group, row, at] = pop_free(core, full, slot)
        if full:
            core.requests[HELD, slot] += need - have
    for at in range(core.constants[STATES]):
        if core.states[at, row] == NULL_BLOCK:
            core.states[at, row] = pop_free(core, False, slot)
    rows[ROOM, row] = need * size
    return copied


@compiled
def _copy_shared_tail(core: Core, row: int, copies: Int32Array, copied: int) -> int:
    rows, slot = core.rows, core.rows[REQUEST, row]
    at = rows[COMPUTED, row] // core.constants[BLOCK_SIZE]
    for group in range(core.constants[GROUPS]):
        full = core.windows[group] == 0
        shared = core.tables[group, row, at]
        if core.blocks[REFS, shared] > 1:
            if core.counters[FREE] == 0:
                evict(core, 1, FOR_COPY)
            own = pop_free(core, full, slot)
            core.tables[group, row, at] = own
            release(core, shared, full, slot)  # the others of its request still hold it
            if full:
                core.requests[HELD, slot] += 1
            copies[0, copied], copies[1, copied] = shared, own
            copied += 1
    for state in range(core.constants[STATES]):
        shared = core.states[state, row]
        if core.blocks[REFS, shared] > 1:
            if core.counters[FREE] == 0:
                evict(core, 1, FOR_COPY)
            own = pop_free(core, False, slot)
            core.states[state, row] = own
            release(core, shared, False, slot)
            copies[0, copied], copies[1, copied] = shared, own
            copied += 1
    rows[SHARED_TAIL, row] = 0
    return copied


@compiled
def append(core: Core, batch: Int64Array, tokens: Int32Array) -> tuple[int, int]:
    """``tokens`` [rows of the call, count] for each row."""
    rows, counters = core.rows, core.counters
    counters[CALLS] += 1
    for i in range(batch.size):
        row = batch[i]
        if rows[MARK, row] == counters[CALLS]:
            return TWICE, i
        rows[MARK, row] = counters[CALLS]
        for at in range(tokens.shape[1]):
            if tokens[i, at] < 0:
                return NEGATIVE, i
        if rows[LENGTH, row] + tokens.shape[1] > rows[LIMIT, row]:
            return TOO_LONG, i
    for i in range(batch.size):
        row = batch[i]
        for at in range(tokens.shape[1]):
            core.tokens[row, rows[LENGTH, row] + at] = tokens[i, at]
        rows[LENGTH, row] += tokens.shape[1]
    return OK, 0


@compiled
def commit(core: Core, batch: Int64Array, ends: Int64Array) -> tuple[int, int]:
    """K/V below each end is written; full blocks become nodes of the prefix index."""
    rows, counters, size = core.rows, core.counters, core.constants[BLOCK_SIZE]
    counters[CALLS] += 1
    for i in range(batch.size):
        row, end = batch[i], ends[i]
        if rows[MARK, row] == counters[CALLS]:
            return TWICE, i
        rows[MARK, row] = counters[CALLS]
        if end < rows[COMPUTED, row] or end > rows[SLOTS, row] or end > rows[LENGTH, row]:
            return OUT_OF_ORDER, i
    for i in range(batch.size):
        row = batch[i]
        rows[COMPUTED, row] = ends[i]
        if core.constants[CACHING] and ends[i] // size > rows[PUBLISHED, row]:
            publish(core, row)
    return OK, 0


@compiled
def decode(core: Core, batch: Int64Array, tokens: Int32Array, copies: Int32Array) -> tuple[int, int]:
    """One decode step in one pass: every known token of each row is computed, a new one is appended and gets
    its slot. As commit, append and extend after one another; answers as `extend`."""
    rows, counters, size = core.rows, core.counters, core.constants[BLOCK_SIZE]
    ends, known = core.after, core.before
    for i in range(batch.size):
        known[i] = rows[LENGTH, batch[i]]
        ends[i] = known[i] + 1
    counters[CALLS] += 1
    growing = False
    for i in range(batch.size):
        row = batch[i]
        if rows[MARK, row] == counters[CALLS]:
            return TWICE, i
        rows[MARK, row] = counters[CALLS]
        if tokens[i] < 0:
            return NEGATIVE, i
        if ends[i] > rows[LIMIT, row]:
            return TOO_LONG, i
        to_copy = rows[SHARED_TAIL, row] != 0
        if rows[SLOTS, row] < ends[i] - 1 or (to_copy and rows[COMPUTED, row] < ends[i] - 1):
            return OUT_OF_ORDER, i
        growing = growing or ends[i] > rows[ROOM, row] or to_copy
    if growing:
        code, at = _check_room(core, batch, known, ends)
        if code != OK:
            return code, at
    copied = 0
    for i in range(batch.size):
        row = batch[i]
        length = rows[LENGTH, row]
        rows[COMPUTED, row] = length
        if core.constants[CACHING] and length // size > rows[PUBLISHED, row]:
            publish(core, row)
        core.tokens[row, length] = tokens[i]
        rows[LENGTH, row] = length + 1
        if ends[i] > rows[ROOM, row] or rows[SHARED_TAIL, row]:
            copied = _extend_row(core, row, ends[i], copies, copied)
        else:
            rows[SLOTS, row] = length + 1
    return OK, copied


@compiled
def share(core: Core, parent: int, child: int) -> None:
    """The child's row becomes the parent's: all blocks with computed positions are shared."""
    rows, size = core.rows, core.constants[BLOCK_SIZE]
    computed, slot = rows[COMPUTED, parent], rows[REQUEST, parent]
    held = (computed + size - 1) // size
    for group in range(core.constants[GROUPS]):
        for at in range(core.rows[FIRST + group, parent], held):
            block = core.tables[group, parent, at]
            core.blocks[REFS, block] += 1  # of the same request: nobody's private count changes
            core.tables[group, child, at] = block
        core.rows[FIRST + group, child] = core.rows[FIRST + group, parent]
    for at in range(core.constants[STATES]):
        block = core.states[at, parent]
        if block != NULL_BLOCK:
            core.blocks[REFS, block] += 1
        core.states[at, child] = block
    length, hashed = rows[LENGTH, parent], rows[HASHED, parent]
    for at in range(length):
        core.tokens[child, at] = core.tokens[parent, at]
    for at in range(hashed):
        core.hashes[child, at] = core.hashes[parent, at]
    rows[LENGTH, child], rows[HASHED, child] = length, hashed
    rows[COMPUTED, child], rows[LIMIT, child] = computed, rows[LIMIT, parent]
    rows[PUBLISHED, child], rows[ROW_SALT, child] = rows[PUBLISHED, parent], rows[ROW_SALT, parent]
    rows[SHARED, child], rows[TURN, child] = rows[SHARED, parent], rows[TURN, parent]
    rows[REQUEST, child] = slot
    rows[ROOM, child] = held * size
    # The parent's slots go back to what is computed: writing again takes an extend, which copies.
    rows[SLOTS, child] = rows[SLOTS, parent] = computed
    if computed % size != 0 or core.constants[STATES] > 0:  # a state is written in every step
        rows[SHARED_TAIL, child] = rows[SHARED_TAIL, parent] = 1


@compiled
def leave(core: Core, row: int) -> None:
    """Give back the row's blocks, last block first, and clear it."""
    rows, requests, size = core.rows, core.requests, core.constants[BLOCK_SIZE]
    slot, held = rows[REQUEST, row], rows[ROOM, row] // size
    if core.constants[CACHING]:
        observe_end(core, row)
    for at in range(held - 1, -1, -1):
        for group in range(core.constants[GROUPS]):
            block = core.tables[group, row, at]
            if block == NULL_BLOCK:
                continue
            full = core.windows[group] == 0
            if full and not _sibling_holds(core, row, group, at, block):
                requests[HELD, slot] -= 1
            release(core, block, full, slot)
            core.tables[group, row, at] = NULL_BLOCK
    for at in range(core.constants[STATES]):
        if core.states[at, row] != NULL_BLOCK:
            release(core, core.states[at, row], False, slot)
            core.states[at, row] = NULL_BLOCK
    for group in range(core.constants[GROUPS]):
        core.rows[FIRST + group, row] = 0
    rows[LENGTH, row] = rows[COMPUTED, row] = rows[SLOTS, row] = rows[ROOM, row] = rows[LIMIT, row] = 0
    rows[PUBLISHED, row] = rows[HASHED, row] = rows[SHARED, row] = 0
    rows[SHARED_TAIL, row] = 0
    rows[ROW_SALT, row] = rows[TURN, row] = 0
    rows[REQUEST, row] = -1
    requests[LIVE, slot] -= 1


@compiled
def _sibling_holds(core: Core, row: int, group: int, at: int, block: int) -> bool:
    """Whether another sequence of the same request has the block (at the same place, where else)."""
    rows, slot = core.rows, core.rows[REQUEST, row]
    if core.requests[LIVE, slot] < 2 or core.blocks[REFS, block] < 2:
        return False
    for other in range(core.rows.shape[1]):
        if other != row and rows[REQUEST, other] == slot and core.tables[group, other, at] == block:
            return True
    return False


@compiled
def summarize(core: Core, place: Int32Array, out: Int32Array) -> None:
    """Per running request what only its rows know. ``place`` [slots] the entry of each slot; ``out`` int32
    [3, running], zero before: prompt tokens left, tokens produced, tokens that may still be produced."""
    rows, requests = core.rows, core.requests
    for row in range(core.rows.shape[1]):
        slot = rows[REQUEST, row]
        if slot < 0:
            continue
        entry, prompt = place[slot], requests[PROMPT, slot]
        out[0, entry] = max(out[0, entry], prompt - rows[COMPUTED, row])
        out[1, entry] = max(out[1, entry], rows[LENGTH, row] - prompt)
        out[2, entry] = max(out[2, entry], rows[LIMIT, row] - rows[LENGTH, row])
