"""The mapping of live sequences to block-table rows, and the conversion of call arguments to arrays.

An engine reads rows: for each group a block table, int32 [rows, max_blocks], updated in place. An entry is the
null block if no block is allocated there yet or a sliding window has released it. Freed rows are reused last
in, first out, so that a few sequences touch few pages of memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tonnage.cache.blocks.state import Int32Array, Int64Array
from tonnage.cache.errors import InvalidRequest, SequenceFinished, UnknownSequence

TokenIds = Sequence[int] | npt.NDArray[np.integer]

_PIECE = 4096  # number of token ids that one call of struct.pack_into converts


class Sequences:
    """A mapping from sequence ids to rows of the block tables, for up to ``rows`` live sequences."""

    def __init__(self, rows: int) -> None:
        self.row_of: dict[int, int] = {}
        self._unused = list(range(rows - 1, -1, -1))
        # Id of the last sequence in each unused row.
        self._finished: list[int | None] = [None] * rows
        # Sequence ids and result of the last call of `rows`.
        self._asked: tuple[tuple[int, ...], Int64Array] = (), np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.row_of)

    def row(self, sequence_id: int) -> int:
        """Return the block-table row of a live sequence. Raises SequenceFinished or UnknownSequence."""
        row = self.row_of.get(sequence_id)
        if row is None:
            raise self._missing(sequence_id)
        return row

    def rows(self, sequence_ids: Iterable[int]) -> Int64Array:
        """Return the block-table rows of live sequences, int64 [sequences], read-only.

        Raises SequenceFinished or UnknownSequence.
        """
        ids = tuple(sequence_ids)
        if ids != self._asked[0]:  # most calls name the same sequences as the call before
            try:
                self._asked = ids, np.fromiter(map(self.row_of.__getitem__, ids), dtype=np.int64)
            except KeyError as error:
                raise self._missing(error.args[0]) from None
        return self._asked[1]

    @property
    def next_row(self) -> int:
        """The block-table row that the next call of `open` returns, or -1 if all rows are in use."""
        return self._unused[-1] if self._unused else -1

    def finished(self, sequence_id: int) -> bool:
        """Return whether the id belonged to a freed sequence; the answer is False once its row is reused."""
        return sequence_id in self._finished

    def open(self, sequence_id: int) -> int:
        """Allocate a block-table row for a new sequence and return it."""
        row = self._unused.pop()
        self._finished[row] = None
        self.row_of[sequence_id] = row
        return row

    def close(self, sequence_id: int) -> None:
        """Free the block-table row of a sequence, and remember its id as finished."""
        row = self.row_of.pop(sequence_id)
        self._asked = (), np.zeros(0, np.int64)
        self._unused.append(row)
        self._finished[row] = sequence_id

    def _missing(self, sequence_id: int) -> UnknownSequence:
        if self.finished(sequence_id):
            return SequenceFinished(f"sequence {sequence_id} has been freed", field="sequence_id")
        return UnknownSequence(
            f"sequence {sequence_id} is not live", field="sequence_id", hint="admit or fork it first"
        )


def token_array(token_ids: TokenIds, *, signed: bool = False, out: Int32Array | None = None) -> Int32Array:
    """Return token ids as an int32 array [len].

    Args:
        token_ids: A flat list or array of ints in [0, 2^31).
        signed: Accept negative ids, for a caller that checks them itself.
        out: Buffer to write a list into if it fits; the result is then a view of it.

    Raises:
        InvalidRequest: The argument is not a flat list of token ids.
    """
    try:
        if isinstance(token_ids, (bytes, bytearray, memoryview)):
            raise TypeError("bytes are not token ids")
        if isinstance(token_ids, np.ndarray):
            if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
                raise TypeError(
                    f"an array of {token_ids.dtype} with {token_ids.ndim} axes, not one axis of ints"
                )
            if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= 2**31):
                raise OverflowError("a token id is negative or 2^31 or more")
            return token_ids.astype(np.int32, copy=False)
        count = len(token_ids)
        if not isinstance(token_ids, (list, tuple)):
            token_ids = list(token_ids)
        ids: Int32Array = np.empty(count, np.int32) if out is None or count > len(out) else out[:count]
        # struct rejects floats and numbers beyond 32 bits, and takes half the time of array or numpy. Its call
        # takes the numbers as a tuple of arguments. A long list is converted in pieces, because a tuple of
        # 100,000 numbers would be allocated anew in each call.
        for start in range(0, count, _PIECE):
            piece = token_ids[start : start + _PIECE]
            struct.pack_into(f"{len(piece)}i", ids.data, 4 * start, *piece)
    except (TypeError, OverflowError, ValueError, struct.error) as error:
        raise InvalidRequest(str(error), field="token_ids", hint="give a flat list of ints") from None
    if not signed and ids.size and int(ids.min()) < 0:
        raise InvalidRequest(f"token id {int(ids.min())} is negative", field="token_ids")
    return ids


def tokens_by_row(batch: Int64Array, token_ids: TokenIds) -> Int32Array:
    """Return the tokens of a batch as int32 [rows * count].

    ``token_ids`` has one token per row, or is an array [rows, count]. Raises InvalidRequest if their number
    does not match the rows; negative ids pass.
    """
    count = 1
    if isinstance(token_ids, np.ndarray) and token_ids.ndim == 2:
        count, token_ids = token_ids.shape[1], token_ids.reshape(-1)
    tokens = token_array(token_ids, signed=True)
    if tokens.size != batch.size * count:
        raise InvalidRequest(f"{tokens.size} tokens do not match {len(batch)} sequences", field="token_ids")
    return tokens


def end_array(batch: Int64Array, ends: TokenIds, field: str) -> Int64Array:
    """Return an argument that has one position per sequence of a batch as int64 [rows].

    Raises InvalidRequest, naming ``field``, if their number does not match.
    """
    array: Int64Array = np.ascontiguousarray(ends, dtype=np.int64)
    if array.shape != batch.shape:
        raise InvalidRequest(f"{array.size} numbers for {len(batch)} sequences, not one each", field=field)
    return array
