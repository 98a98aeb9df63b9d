"""Learned eviction attached to the calls of the block manager that start and end sequences.

`lock_hit` and `leave` replace the functions of the same names in `tonnage.cache.prefix.hits` and
`tonnage.cache.sequences.steps`: they first report the request to the model of reuse.
"""

from __future__ import annotations

from tonnage.cache.blocks.state import Core, Int64Array
from tonnage.cache.compiled import compiled
from tonnage.cache.eviction.reuse import choose_rule, observe_end, observe_start
from tonnage.cache.prefix import hits
from tonnage.cache.sequences import steps


@compiled
def lock_hit(core: Core, row: int, count: int) -> None:
    """Report an admitted request to the model of block reuse, then reference the blocks of its prefix hit."""
    pool, state = core.pool[0], core.rows[row]
    if pool.caching:
        table = core.tables[pool.anchor, row]
        state.turn = observe_start(core, core.hashes[row], table, state.length, count)
        choose_rule(core)
    hits.lock_hit(core, row, count)


@compiled
def leave(core: Core, batch: Int64Array) -> None:
    """Report the end of each row's request to the model of block reuse, then release the row's blocks."""
    pool = core.pool[0]
    for i in range(batch.size):
        at_row = batch[i]
        row = core.rows[at_row]
        if pool.caching:
            table, prompt = core.tables[pool.anchor, at_row], core.requests[row.request].prompt
            observe_end(core, core.hashes[at_row], table, row.published, prompt, row.length, row.turn)
        steps.leave_row(core, at_row)
