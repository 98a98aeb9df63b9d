"""Recurrent states cached with the prefixes they belong to, like vLLM's "align" mode.

A recurrent state summarizes all positions before it, so a cached state must not be overwritten. With caching
on, a sequence takes a new block for its state whenever a step ends in another block of tokens than the step
before. The old state is first copied to the new block (`sequences.steps` returns the copy). The old block is
held until the next step, so a sequence holds at most two blocks. While steps end in the same block of tokens,
the state is overwritten in place.

Not every state is worth a block. By vLLM's default (``prefix_cache_retention_interval`` 0) these are kept:

- the state at the last block end before a prompt's last token, which a later request with the same prompt or a
  longer one can reuse;
- the state at the end of a prefix that full-attention groups had cached, but without a state (`ROW.found`). The
  next request with this prefix then finds K/V and state (Marconi: Pan et al., MLSys 2025).

With an interval, the state after every ``state_every`` blocks is kept as well. A state can be kept only if a
step ended exactly at its position. The scheduler makes steps end at these positions
(`tonnage.cache.scheduler.chunks`).

Source: vllm/v1/core/single_type_kv_cache_manager.py (MambaManager) and kv_cache_coordinator.py, 0.32.0 and
0.33.0. Hashes of whole blocks are used; draft models and Mamba-2's checkpoint inside a chunk are left out. The
checkpoint gives the same hits with one step less and one block more.
"""

from __future__ import annotations

from tonnage.cache.blocks.pool import pop_free
from tonnage.cache.blocks.state import DROP_SOURCE, NULL_BLOCK, Core, Int32Array
from tonnage.cache.compiled import inlined, inner


@inlined
def is_kept(core: Core, row: int, at: int) -> bool:
    """Return whether to keep the recurrent state of a sequence's row after its token block ``at``.

    The state is kept if a step ended exactly at this position, and the position is one of those that the
    module's docstring lists.
    """
    pool, state, blocks = core.pool[0], core.rows[row], at + 1
    if blocks * pool.block_size != state.computed:
        return False
    if blocks == state.found or (pool.state_every > 0 and blocks % pool.state_every == 0):
        return True
    return bool(blocks == (core.requests[state.request].prompt - 1) // pool.block_size)


@inner
def grow_state(core: Core, at_row: int, group: int, to: int, copies: Int32Array, copied: int) -> int:
    """Move a row's recurrent state to a new block at table entry ``to``, where the sequence's next step ends.

    The call appends the needed block copy to ``copies`` and returns the number of copies so far.
    """
    row, table, size = core.rows[at_row], core.tables[group, at_row], core.pool[0].block_size
    last, source = row.room // size - 1, (row.computed + size - 1) // size - 1
    # An earlier step, which was then not computed, has taken this block and copied the state to it.
    if last > source:
        table[to], table[last] = table[last], NULL_BLOCK
        return copied
    table[to] = pop_free(core, False, row.request)
    if source >= 0:
        copies[0, copied], copies[1, copied] = table[source], table[to]
        copied += 1
        row.shared_tail |= DROP_SOURCE
    return copied
