"""Compiled loops over the running requests, for every admission decision.

Import this module inside the functions that call it. It loads numba, which a process that only reads an
admission policy does not need.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.snapshot import (
    COLUMNS,
    HELD,
    OUTPUT,
    OUTPUT_LEFT,
    PRIVATE,
    PROMPT,
    PROMPT_LEFT,
    RESERVED,
    SEQUENCES,
)
from tonnage.cache.compiled import compiled

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@compiled
def lengths_left(
    edges: FloatArray, survival: FloatArray, share: float, done: Int64Array, most: Int64Array, left: Int64Array
) -> None:
    """Forecast the remaining tokens of each sequence from a survival curve, and write them to ``left``.

    Of the outputs longer than ``done`` tokens, the fraction ``share`` is longer than ``done`` plus the
    forecast.

    Args:
        edges: Output lengths, ascending.
        survival: Share of all outputs longer than each of ``edges``; values between are interpolated linearly.
        share: Fraction of the outputs longer than ``done`` that are longer than forecast, in (0, 1).
        done: int64 [sequences]: tokens produced so far.
        most: int64 [sequences]: upper bounds of the result.
        left: int64 [sequences]: receives 1 to ``most`` tokens.
    """
    last, rising = edges.size - 1, survival[::-1]  # searchsorted needs ascending values
    for at in range(done.size):
        # the last entry of ``edges`` that is at most ``done``
        low = max(0, np.searchsorted(edges, done[at], side="right") - 1)
        now = survival[low]
        if low < last:
            now += (survival[low + 1] - now) / (edges[low + 1] - edges[low]) * (done[at] - edges[low])
        wanted = share * now
        length = most[at]
        if wanted >= survival[last]:
            # the last entry of ``edges`` whose survival is at least ``wanted``
            low = max(0, last - np.searchsorted(rising, wanted))
            end = edges[low]
            if low < last:
                step = (edges[low + 1] - end) / (survival[low] - survival[low + 1])
                end += step * (survival[low] - wanted)
            length = min(length, np.int64(np.ceil(end)) - done[at])
        left[at] = max(1, length)


@compiled
def summarize(
    kept: Int32Array,
    slots: Int32Array,
    computed: Int32Array,
    tables: Int32Array,
    lookahead: int,
    groups: int,
    rows: Int32Array,
) -> None:
    """Write one row of counts (a row of a `RunningSnapshot`) for each running request of vLLM's scheduler.

    Each request has one sequence.

    Args:
        kept: int32 [slots, 5], one row per request: prompt tokens, max_tokens, reserved blocks, shared blocks,
            and the length in tokens when the request was admitted.
        slots: int32 [requests]: the row of ``kept`` of each request.
        computed: int32 [requests]: computed tokens of each request.
        tables: int32 [requests]: blocks in each request's table of one group. They cannot be derived from
            ``computed``, because a request keeps the blocks of a rejected draft.
        lookahead: Token slots that a step allocates beyond the last token, for drafts.
        groups: Number of full-attention groups.
        rows: int32 [.., COLUMNS]: its first rows receive the result.
    """
    for at in range(slots.size):
        slot = slots[at]
        prompt, max_tokens, reserved = kept[slot, 0], kept[slot, 1], kept[slot, 2]
        shared, start = kept[slot, 3], kept[slot, 4]
        held = min(tables[at] * groups, reserved)
        output = max(computed[at], start) - prompt
        if computed[at] >= start:
            output += 1  # a sampled token gets its K/V only in the next step
        rows[at, HELD], rows[at, PRIVATE], rows[at, RESERVED] = held, max(held - shared, 0), reserved
        rows[at, PROMPT], rows[at, PROMPT_LEFT] = prompt + lookahead, max(start - computed[at], 0)
        rows[at, OUTPUT], rows[at, OUTPUT_LEFT] = output, max(max_tokens - output, 1)
        rows[at, SEQUENCES] = 1


@compiled
def missing_blocks(rows: Int32Array, block_size: int, groups: int) -> int:
    """Return how many KV blocks the running requests' prompts need beyond those that the requests hold.

    The number is the sum over all ``groups`` full-attention groups.
    """
    missing = 0
    for at in range(len(rows)):
        missing += max(0, (rows[at, PROMPT] + block_size - 1) // block_size * groups - rows[at, HELD])
    return missing


@compiled
def grow(
    rows: Int32Array, output_left: Int64Array, block_size: int, chunk: int, groups: int, out: Int64Array
) -> tuple[int, int, int]:
    """Compute how many KV blocks the running requests will hold over time, as the fields of a `peak.Growth`.

    The fields are written to ``out``, int64 [4, requests]. `outlook.outlook_of` describes the arguments.
    `outlook.Outlook` describes the results ``private``, ``prompts`` and ``beyond``.
    """
    prompts, private, beyond = 0, 0, 1 << 62
    for at in range(len(rows)):
        shared, left = rows[at, HELD] - rows[at, PRIVATE], rows[at, PROMPT_LEFT]
        out[0, at] = rows[at, PROMPT] // block_size - shared // groups
        out[1, at] = rows[at, PROMPT] % block_size + rows[at, OUTPUT]
        out[2, at] = rows[at, SEQUENCES]
        out[3, at] = output_left[at]
        private += rows[at, PRIVATE]
        prompts += left
        if left > 0:
            out[3, at] += -(-prompts // chunk)
        more = -(-(rows[at, OUTPUT_LEFT] - output_left[at]) // block_size)
        beyond = min(beyond, more * rows[at, SEQUENCES] * groups)
    return private, prompts, beyond


@compiled
def most_held(
    latest_first: Int64Array,
    fixed: Int64Array,
    tail: Int64Array,
    sequences: Int64Array,
    end: Int64Array,
    added: Int64Array,
    block_size: int,
    scale: int,
    since: int,
    counts: Int64Array,
) -> int:
    """Return the largest number of blocks held at any step >= ``since`` (the loop of `peak.peak_of`).

    The arrays are the fields of a `Growth`. ``added``, int64 [requests, 4], has the fields of other requests by
    descending end. ``counts``, int64 [block_size // scale + 1] of zeros, receives the number of sequences by
    spare token slots of their last block, in units of ``scale`` slots.
    """
    most = held = number = more = 0
    for place in range(latest_first.size + len(added)):
        at = latest_first[place - more] if place - more < latest_first.size else -1
        if more < len(added) and (at < 0 or added[more, 3] >= end[at]):
            base, short, many, last = added[more, 0], added[more, 1], added[more, 2], added[more, 3]
            more += 1
        else:
            base, short, many, last = fixed[at], tail[at], sequences[at], end[at]
        if last < since:
            break
        # The loop computes ceil((tail + end) / size) as a sum of three numbers. ``blocks`` counts the blocks of
        # ``tail`` tokens, the last of which has spare slots. The second number is the whole blocks of ``end``
        # more tokens. The third is 1 if the remainder of ``end`` exceeds the spare slots.
        blocks = -(-short // block_size)
        counts[(blocks * block_size - short) // scale] += many
        number += many
        held += base + many * blocks
        over = 0
        for spare in range(-(-(last % block_size) // scale)):
            over += counts[spare]
        total = held + number * (last // block_size) + over
        most = total if place == 0 else max(most, total)
    return most


@compiled
def least_slack(keys: Int64Array, available: int) -> int:
    """Return the smallest surplus of available over needed KV blocks while requests finish in key order.

    ``keys`` are sorted; `safety.finishing_keys` packs the needed and returned blocks of a request into one key.
    `safety.slack_of` describes the surplus (slack).
    """
    least = 1 << 62
    for at in range(keys.size):
        need = (keys[at] + (1 << 31)) >> 32
        least = min(least, available - need)
        available += (need << 32) - keys[at]
    return least


def compile_loops() -> None:
    """Compile the loops of admission (a few seconds), or read their machine code from disk."""
    one, narrow, line = np.ones(1, np.int64), np.ones(1, np.int32), np.array([0.0, 1.0])
    rows = np.ones((1, COLUMNS), np.int32)
    summarize(np.ones((1, 5), np.int32), narrow - 1, narrow, narrow, 0, 1, rows)
    missing_blocks(rows, 16, 1)
    grow(rows, one, 16, 1, 1, np.zeros((4, 1), np.int64))
    least_slack(one, 1)
    lengths_left(line, 1 - line, 0.5, one, one, np.empty_like(one))
    added = np.ones((1, 4), np.int64)
    most_held(np.zeros(1, np.int64), one, one, one, one, added, 16, 1, 0, np.zeros(17, np.int64))
