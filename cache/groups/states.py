"""Recurrent states cached with the prefixes they belong to, as vLLM's "align" mode keeps them.

A state stands for all positions before it, so one that is to be found again must not be written again. Where
caching is on, a sequence therefore takes a new block for its state whenever a step ends in another block of
tokens than the one before; the old state is copied there first (`sequences.steps` returns the copy) and is held
until the next step, two blocks at most. Between two such places the state is overwritten in place.

Not every state is worth a block. Kept are, by vLLM's own default (``prefix_cache_retention_interval`` 0):

- the last end of a block before a prompt's last token, where the same prompt goes on and a longer one may;
- the end of what another request of a common prefix had in full groups while no state was there (`ROW.found`):
  the next one that shares it finds both (Marconi: Pan et al., MLSys 2025);

and every ``state_every`` blocks where an interval is given. A state is kept only where a step ended exactly
there; that steps end where it matters is the scheduler's work (`tonnage.cache.scheduler.chunks`).

Source: vllm/v1/core/single_type_kv_cache_manager.py (MambaManager), kv_cache_coordinator.py, 0.32.0 and 0.33.0,
with hashes of whole blocks, without draft models and without Mamba-2's checkpoint inside a chunk (the same hits
with one step less and one block more).
"""

from __future__ import annotations

from tonnage.cache.blocks.pool import pop_free
from tonnage.cache.blocks.state import DROP_SOURCE, NULL_BLOCK, Core, Int32Array
from tonnage.cache.compiled import inlined, inner


@inlined
def is_kept(core: Core, row: int, at: int) -> bool:
    """Whether the row's state at block ``at`` is that after the block's last token, and is to be kept."""
    pool, state, blocks = core.pool[0], core.rows[row], at + 1
    if blocks * pool.block_size != state.computed:
        return False
    if blocks == state.found or (pool.state_every > 0 and blocks % pool.state_every == 0):
        return True
    return bool(blocks == (core.requests[state.request].prompt - 1) // pool.block_size)


@inner
def grow_state(core: Core, at_row: int, group: int, to: int, copies: Int32Array, copied: int) -> int:
    """The row's next step ends in block ``to``, beyond those it has: its state moves there."""
    row, table, size = core.rows[at_row], core.tables[group, at_row], core.pool[0].block_size
    last, source = row.room // size - 1, (row.computed + size - 1) // size - 1
    if last > source:  # taken, and copied to, for a step that was never computed
        table[to], table[last] = table[last], NULL_BLOCK
        return copied
    table[to] = pop_free(core, False, row.request)
    if source >= 0:
        copies[0, copied], copies[1, copied] = table[source], table[to]
        copied += 1
        row.shared_tail |= DROP_SOURCE
    return copied
