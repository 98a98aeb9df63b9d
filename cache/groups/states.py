"""Recurrent states cached with the prefixes they belong to, like vLLM's "align" mode.

A recurrent state summarizes all positions before it, so a state that is to be found again must not be
overwritten. With caching on, a sequence takes a new block for its state whenever a step ends in another block
of tokens than the step before. The old state is first copied there (`sequences.steps` returns the copy) and is
held until the next step, so a sequence holds at most two blocks. Between two such steps the state is
overwritten in place.

Not every state is worth a block. By vLLM's default (``prefix_cache_retention_interval`` 0) these are kept:

- the state at the last block end before a prompt's last token, where the same prompt or a longer one continues;
- the state at the end of the common prefix that another request had in full-attention groups without a state
  (`ROW.found`), so that the next request with this prefix finds both (Marconi: Pan et al., MLSys 2025);

and with an interval every ``state_every`` blocks. A state is kept only if a step ended exactly there. The
scheduler makes steps end at these places (`tonnage.cache.scheduler.chunks`).

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
    """Return whether the row's recurrent state follows the last token of its block ``at`` and is to be kept."""
    pool, state, blocks = core.pool[0], core.rows[row], at + 1
    if blocks * pool.block_size != state.computed:
        return False
    if blocks == state.found or (pool.state_every > 0 and blocks % pool.state_every == 0):
        return True
    return bool(blocks == (core.requests[state.request].prompt - 1) // pool.block_size)


@inner
def grow_state(core: Core, at_row: int, group: int, to: int, copies: Int32Array, copied: int) -> int:
    """Move the row's recurrent state to block ``to``, where its next step ends, beyond the blocks it has.

    Returns the number of copies so far.
    """
    row, table, size = core.rows[at_row], core.tables[group, at_row], core.pool[0].block_size
    last, source = row.room // size - 1, (row.computed + size - 1) // size - 1
    if last > source:  # a step that was never computed has taken this block and copied the state to it
        table[to], table[last] = table[last], NULL_BLOCK
        return copied
    table[to] = pop_free(core, False, row.request)
    if source >= 0:
        copies[0, copied], copies[1, copied] = table[source], table[to]
        copied += 1
        row.shared_tail |= DROP_SOURCE
    return copied
