"""A snapshot of the running requests, one row of counts per request, which admission reads.

A *request* is the unit of admission: one prompt with its n sequences, including forks to come. Rows are in
order of admission, oldest first. Only blocks of **full-attention** groups are counted individually. For groups
with windows or states, the upper bound of a request's blocks (`tonnage.cache.admission.reservation`) is added
to ``windowed`` when the request is admitted. A window that releases a shared block therefore changes no
reservation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

HELD, PRIVATE, RESERVED, PROMPT, PROMPT_LEFT, OUTPUT, OUTPUT_LEFT, SEQUENCES = range(8)
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class RunningSnapshot:
    """Counts of the KV block pool, and of the blocks and tokens of each running request.

    Attributes:
        usable: Blocks of the pool without the null block.
        used: Number of distinct blocks that the tables of full-attention groups reference.
        windowed: Upper bound of the blocks of all running requests in groups with windows or states; 0 without
            such groups.
        rows: int32 [running requests, COLUMNS]: the columns are the properties ``held`` to ``sequences``. The
            array may be a view, since readers do not change it.
    """

    usable: int
    used: int
    windowed: int
    rows: Int32Array

    @property
    def held(self) -> Int32Array:
        """Number of distinct KV blocks in each request's tables of full-attention groups, int32 [running]."""
        return self.rows[:, HELD]

    @property
    def private(self) -> Int32Array:
        """Number of KV blocks that each request alone references, or a lower bound of it, int32 [running]."""
        return self.rows[:, PRIVATE]

    @property
    def reserved(self) -> Int32Array:
        """Upper bound of each request's KV blocks in full-attention groups, int32 [running]."""
        return self.rows[:, RESERVED]

    @property
    def prompt(self) -> Int32Array:
        """Number of prompt tokens of each running request, int32 [running]."""
        return self.rows[:, PROMPT]

    @property
    def prompt_left(self) -> Int32Array:
        """Prompt tokens of each request that are not computed yet, int32 [running]."""
        return self.rows[:, PROMPT_LEFT]

    @property
    def output(self) -> Int32Array:
        """Output tokens of each request's longest live sequence, int32 [running]."""
        return self.rows[:, OUTPUT]

    @property
    def output_left(self) -> Int32Array:
        """Upper bound of the tokens that each request's live sequence may still produce, int32 [running]."""
        return self.rows[:, OUTPUT_LEFT]

    @property
    def sequences(self) -> Int32Array:
        """Live sequences of each request plus forks to come, int32 [running]."""
        return self.rows[:, SEQUENCES]

    @property
    def capacity(self) -> int:
        """Number of blocks that full-attention groups can use: all but those for windows and states."""
        return self.usable - self.windowed

    @property
    def available(self) -> int:
        """Number of blocks that full-attention groups can still allocate: free, or cached and unreferenced."""
        return self.usable - self.windowed - self.used

    @property
    def need(self) -> Int32Array:
        """Number of KV blocks that each request can still allocate: reserved minus held, int32 [running]."""
        return self.reserved - self.held

    def __len__(self) -> int:
        return len(self.rows)
