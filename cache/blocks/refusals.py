"""Why a call on a batch was refused: the codes of `tonnage.cache.blocks.steps` as errors with their numbers."""

from __future__ import annotations

from tonnage.cache.blocks import steps
from tonnage.cache.blocks.state import CACHED, FREE, MAX_STEP, State
from tonnage.cache.errors import InvalidRequest, NoFreeBlocks, OutOfOrder, ReservationExceeded


def twice(sequence_id: int) -> InvalidRequest:
    return InvalidRequest(f"sequence {sequence_id} is named twice", field="sequence_ids")


def token_error(state: State, code: int, sequence_id: int, row: int, token: int, count: int = 1) -> Exception:
    if code == steps.TWICE:
        return twice(sequence_id)
    if code == steps.NEGATIVE:
        return InvalidRequest(f"token id {token} is negative", field="token_ids")
    return too_long(state, sequence_id, row, int(state.rows.length[row]) + count)


def extend_error(state: State, code: int, sequence_id: int, row: int, num_tokens: int) -> Exception:
    if code == steps.TWICE:
        return twice(sequence_id)
    if code == steps.NEGATIVE:
        return InvalidRequest(f"{num_tokens} is negative", field="num_tokens")
    if code == steps.TOO_LONG:
        return too_long(state, sequence_id, row, num_tokens)
    if code == steps.STEP_TOO_LONG:
        step = num_tokens - int(state.rows.computed[row])
        return ReservationExceeded(
            f"sequence {sequence_id} would compute {step} positions in a step, "
            f"max_num_batched_tokens is {state.constants[MAX_STEP]}",
            field="num_tokens",
            hint="commit what is computed, or take a smaller chunk",
        )
    return NoFreeBlocks(
        f"sequence {sequence_id} to {num_tokens} tokens: {state.pool.counters[FREE]} blocks are free, "
        f"{state.pool.counters[CACHED]} cached",
        field="num_tokens",
        hint="extend only what admission has granted",
    )


def too_long(state: State, sequence_id: int, row: int, tokens: int) -> ReservationExceeded:
    return ReservationExceeded(
        f"sequence {sequence_id} to {tokens} tokens, reserved {state.rows.limit[row]} (prompt + max_tokens)",
        field="num_tokens",
        hint="admit it with a larger max_tokens",
    )


def out_of_order(state: State, sequence_id: int, row: int, num_computed: int) -> OutOfOrder:
    rows = state.rows
    computed, slots, length = (int(v[row]) for v in (rows.computed, rows.slots, rows.length))
    return OutOfOrder(
        f"sequence {sequence_id} cannot be computed up to {num_computed}: it is computed up to {computed}, "
        f"has slots up to {slots} and knows {length} tokens",
        field="num_computed",
        hint="extend and append_tokens come before commit",
    )
