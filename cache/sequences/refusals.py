"""Errors for the result codes of `tonnage.cache.sequences.steps`, with the numbers that a message needs."""

from __future__ import annotations

from tonnage.cache.blocks.state import Core, Int32Array, Int64Array
from tonnage.cache.errors import CacheError, InvalidRequest, NoFreeBlocks, OutOfOrder, ReservationExceeded
from tonnage.cache.sequences import steps


def refused(
    core: Core, code: int, sequence_id: int, row: int, ends: Int64Array, tokens: Int32Array
) -> CacheError:
    """Return the exception for a failed step of the block manager, given `steps.step`'s result code.

    Args:
        core: The block manager's arrays.
        code: The result code of the failed check.
        sequence_id: Id of the first sequence that failed.
        row: Row of that sequence in the block tables.
        ends: Requested positions from this sequence on, or empty.
        tokens: New tokens of that sequence, or empty.
    """
    state, pool = core.rows[row], core.pool[0]
    length, limit, appended = int(state["length"]), int(state["limit"]), len(tokens)
    end = int(ends[0]) if len(ends) else length + appended
    if code == steps.TWICE:
        return InvalidRequest(f"sequence {sequence_id} is named twice", field="sequence_ids")
    if code == steps.NEGATIVE and len(tokens):
        return InvalidRequest(f"token id {int(tokens.min())} is negative", field="token_ids")
    if code == steps.NEGATIVE:
        return InvalidRequest(f"sequence {sequence_id} cannot be extended to {end} tokens", field="num_tokens")
    if code == steps.TOO_LONG:
        return ReservationExceeded(
            f"sequence {sequence_id} needs {end} tokens; {limit} are reserved (prompt + max_tokens)",
            field="num_tokens",
            hint="admit it with a larger max_tokens",
        )
    if code == steps.STEP_TOO_LONG:
        return ReservationExceeded(
            f"sequence {sequence_id} would compute {end - int(state['computed'])} positions in a step, "
            f"max_num_batched_tokens is {pool['max_step']}",
            field="num_tokens",
            hint="commit what is computed, or take a smaller chunk",
        )
    if code == steps.OUT_OF_ORDER:
        return OutOfOrder(
            f"sequence {sequence_id} cannot be computed up to {end - appended}: it is computed up to "
            f"{state['computed']}, has slots up to {state['slots']} and knows {length} tokens",
            field="num_computed",
            hint="extend and append come before commit",
        )
    if code == steps.STATE_ELSEWHERE:
        return OutOfOrder(
            f"sequence {sequence_id} is computed up to {end - appended} and was extended to {state['slots']}: "
            "its recurrent state is in another block",
            field="num_computed",
            hint="with cached states, extend to where the step ends",
        )
    return NoFreeBlocks(
        f"not enough blocks to extend sequence {sequence_id} to {end} tokens: {pool['free']} free, "
        f"{pool['cached']} cached",
        field="num_tokens",
        hint="extend only what admission has granted",
    )
