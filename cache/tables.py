"""SequenceTables: one row of ints per live sequence; nothing here allocates or frees a block.

Rows are what an engine reads: per group a block table, int32 [rows, max_blocks], updated in place, with the
null block where nothing is yet or where a sliding window has left. Beside them one int a sequence: tokens
known, positions computed, positions with slots, and so on. Freed rows are reused last in, first out, so that
a few sequences touch few pages of memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission import AdmissionRequest, Limits, ceil_div
from tonnage.cache.errors import InvalidRequest, SequenceFinished, UnknownSequence
from tonnage.cache.pool import Int32Array
from tonnage.cache.prefix import START, Point

Int64Array = npt.NDArray[np.int64]
TokenIds = Sequence[int] | npt.NDArray[np.integer]


@dataclass(slots=True)
class Family:
    """The sequences of one request: they share one promise.

    ``live`` of them hold blocks, ``forks_left`` may still be forked off; ``promise`` is for both together.
    """

    request: AdmissionRequest
    salt: bytes
    promise: int
    live: int
    forks_left: int

    @property
    def sequences(self) -> int:
        """Sequences that count against max_num_seqs."""
        return self.live + self.forks_left


class SequenceTables:
    """Rows for up to ``max_num_seqs`` sequences of up to ``max_model_len`` tokens."""

    def __init__(self, limits: Limits) -> None:
        self.block_size = limits.layout.block_size
        rows = limits.max_num_seqs
        self.max_blocks = ceil_div(limits.max_model_len, self.block_size)
        self.blocks: tuple[Int32Array, ...] = tuple(
            np.zeros((rows, self.max_blocks), np.int32) for _ in limits.layout.groups
        )
        # Pages nobody has written take no memory (calloc), so the worst case is reserved and not used.
        self.tokens: Int32Array = np.zeros((rows, limits.max_model_len), np.int32)
        self.length: Int64Array = np.zeros(rows, np.int64)  # tokens known
        self.computed: Int64Array = np.zeros(rows, np.int64)  # K/V written for positions below
        self.slots: Int64Array = np.zeros(rows, np.int64)  # positions below have been extended to
        self.room: Int64Array = np.zeros(rows, np.int64)  # positions the blocks held have room for
        self.limit: Int64Array = np.zeros(rows, np.int64)  # prompt + max_tokens
        self.first: Int64Array = np.zeros(
            (len(limits.layout.groups), rows), np.int64
        )  # first block not dropped
        self.published: Int64Array = np.zeros(rows, np.int64)  # full blocks that are nodes of the prefix index
        self.shared_tail: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)  # copy before the next write
        self.points: list[Point] = [START] * rows  # last published node
        self.families: list[Family | None] = [None] * rows
        self.row_of: dict[int, int] = {}
        self._unused = list(range(rows - 1, -1, -1))
        self._last_id: list[int | None] = [None] * rows
        self._finished: dict[int, int] = {}  # ids whose row has not been reused yet

    def __len__(self) -> int:
        return len(self.row_of)

    def row(self, sequence_id: int) -> int:
        """Row of a live sequence. Raises SequenceFinished or UnknownSequence."""
        row = self.row_of.get(sequence_id)
        if row is None:
            raise self._missing(sequence_id)
        return row

    def rows(self, sequence_ids: Iterable[int]) -> Int64Array:
        """Rows of live sequences, int64; raises as `row`."""
        try:
            return np.array([self.row_of[i] for i in sequence_ids], dtype=np.int64)
        except KeyError as error:
            raise self._missing(error.args[0]) from None

    def finished(self, sequence_id: int) -> bool:
        """Whether the sequence is known to have been freed (remembered until its row is reused)."""
        return sequence_id in self._finished

    def open(self, sequence_id: int, family: Family) -> int:
        """A row for a new sequence, all zero."""
        row = self._unused.pop()
        last = self._last_id[row]
        if last is not None and self._finished.get(last) == row:
            del self._finished[last]
        self._finished.pop(sequence_id, None)  # the id may be used again
        self._last_id[row] = None
        self.row_of[sequence_id] = row
        self.families[row] = family
        return row

    def close(self, sequence_id: int) -> None:
        """Clear the row and remember the id as finished."""
        row = self.row_of.pop(sequence_id)
        held = self.held_blocks(row)
        for table in self.blocks:
            table[row, :held] = 0
        for values in (self.length, self.computed, self.slots, self.room, self.limit, self.published):
            values[row] = 0
        self.first[:, row] = 0
        self.shared_tail[row] = False
        self.points[row] = START
        self.families[row] = None
        self._unused.append(row)
        self._last_id[row] = sequence_id
        self._finished[sequence_id] = row

    def family(self, row: int) -> Family:
        """The request of a row in use."""
        family = self.families[row]
        assert family is not None
        return family

    def held_blocks(self, row: int) -> int:
        """Blocks of the row in a full group; entries beyond are the null block."""
        return int(self.room[row]) // self.block_size

    def full_blocks_of_tokens(self, row: int, start: int, stop: int) -> Int32Array:
        """Tokens of blocks [start, stop) of the row, int32 [stop - start, block_size]; a view."""
        tokens: Int32Array = self.tokens[row, start * self.block_size : stop * self.block_size]
        return tokens.reshape(-1, self.block_size)

    def _missing(self, sequence_id: int) -> UnknownSequence:
        if self.finished(sequence_id):
            return SequenceFinished(f"sequence {sequence_id} has been freed", field="sequence_id")
        return UnknownSequence(
            f"sequence {sequence_id} is not live", field="sequence_id", hint="admit or fork it first"
        )


def token_array(token_ids: TokenIds) -> Int32Array:
    """Token ids as int32 [len]. Raises InvalidRequest for what is no list of ints in [0, 2^31)."""
    try:
        if isinstance(token_ids, (bytes, bytearray, memoryview)):
            raise TypeError("bytes are no token ids")
        if isinstance(token_ids, np.ndarray):
            if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
                raise TypeError(f"an array of {token_ids.dtype}, {token_ids.ndim} axes")
            if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < 2**31:
                raise OverflowError("a token id is negative or 2^31 or more")
            return token_ids.astype(np.int32)
        ids: Int32Array = np.frombuffer(array("i", token_ids), dtype=np.int32)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidRequest(str(error), field="token_ids", hint="give a flat list of ints") from None
    if ids.size and int(ids.min()) < 0:
        raise InvalidRequest(f"token id {int(ids.min())} is negative", field="token_ids")
    return ids
